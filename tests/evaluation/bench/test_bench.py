"""`lazyformer bench` at tiny size, from the command to its files; updates and their memory."""

import json
import re
import signal
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from in_process import invoke, refusal
from matplotlib import image

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.bench import models
from lazyformer_fairseq.evaluation.bench import run as bench_run
from lazyformer_fairseq.evaluation.bench.models import (
    FAIRSEQ,
    HUGGING_FACE,
    OURS,
    TRANSFORMER_XL,
    BenchModel,
    our_model,
)
from lazyformer_fairseq.evaluation.bench.run import Update
from lazyformer_fairseq.evaluation.bench.settings import BenchSettings
from lazyformer_fairseq.evaluation.costs import latency
from lazyformer_fairseq.extras import has_fairseq
from lazyformer_fairseq.modules.attention import BACK_ENDS
from lazyformer_fairseq.modules.networks.huggingface_bert import has_transformers
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES
from lazyformer_fairseq.report.page import markdown

TINY = "--baseline-arch bert_tiny --baseline-backend eager,fused --tokens 16 --rounds 2 --device cpu"
QUICK = f"{TINY} --arch lazyformer_m2x6_s_tiny --lengths 8,16 --what encoder --relative-position-buckets 0"
OF_ENCODERS = [*([FAIRSEQ] if has_fairseq() else []), *([HUGGING_FACE] if has_transformers() else []), OURS]


@pytest.fixture(scope="module", autouse=True)
def small_baselines():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(latency, "MATRIX_SIZES", {"cpu": (32, 64)})
        patched.setattr(models, "REMEMBERED", 4)
        yield


def run(options: str, code: int = 0) -> str:
    return invoke("bench", *options.split(), code=code)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_baselines) -> tuple[str, Path]:
    """What the command printed, and its folder."""
    folder = tmp_path_factory.mktemp("bench") / "results"
    archs = "--arch lazyformer_m2x6_s_tiny,par_transformer_tiny --pattern mine=M3x1 --lengths 8"
    return run(f"{TINY} {archs} --rounds 3 --what training,inference --output {folder}"), folder


@pytest.fixture
def results(finished) -> dict:
    return json.loads((finished[1] / "results.json").read_text())


def test_every_cell_has_every_model(results):
    *cells, causal = results["cells"]
    assert [(cell["workload"], cell["time"], cell["batch"]) for cell in cells] == [
        *(("training", 8, 2), ("inference", 8, 1), ("inference", 8, 2))
    ]
    for cell in cells:
        assert not cell["left_out"]
        found = [(row["model"], row["buckets"], row["back_end"]) for row in cell["rows"]]
        for buckets in (32, 0):
            assert {("lazyformer_m2x6_s_tiny", buckets, "auto"), ("mine", buckets, "auto")} <= set(found)
            assert sum(model == OURS and its == buckets for model, its, _ in found) == 2
        assert ((FAIRSEQ, 0, "its own") in found) == has_fairseq() and len(set(found)) == len(found)
    assert (causal["workload"], causal["time"], causal["batch"]) == ("causal", 64, 1)
    assert [row["model"] for row in causal["rows"]] == ["transformer_xl_tiny", "par_transformer_tiny"]
    assert results["settings"]["rounds"] == 3 and results["machine"]["device"]
    assert {"torch", "python", *(["fairseq-fixed"] if has_fairseq() else [])} <= results["versions"].keys()


def test_a_row_has_what_it_costs_and_speedups_against_the_fastest_of_a_baseline(results):
    for cell, row in [(each, row) for each in results["cells"] for row in each["rows"]]:
        assert row["flops"] > 0 and row["memory_bytes"] > 4 * row["parameters"] > 4e5
        of_weights = row["memory_bytes"] / (4 * row["parameters"])
        # Weights, gradients and two moments, or weights alone.
        assert row["model"] != OURS or (of_weights > 4 if cell["workload"] == "training" else of_weights < 1.5)
        seconds = row["seconds"]
        assert len(seconds["samples"]) == seconds["n"] == 3
        assert seconds["low"] <= seconds["median"] <= seconds["high"]
        assert row["flops_per_second"] == pytest.approx(row["flops"] / seconds["median"])
        assert row["share_of_peak"] == pytest.approx(row["flops_per_second"] / cell["matrix_peak"])
        assert list(row["against"]) == ([TRANSFORMER_XL] if cell["workload"] == "causal" else OF_ENCODERS)
        for name, beside in row["against"].items():
            candidates = [other for other in cell["rows"] if other["baseline"] == name]
            if name == OURS:
                candidates = [other for other in candidates if other["buckets"] == row["buckets"]]
            baseline = min(candidates, key=lambda candidate: candidate["seconds"]["median"])
            assert beside["back_end"] == baseline["back_end"]
            assert beside["speedup"] == pytest.approx(baseline["seconds"]["median"] / seconds["median"])
            assert beside["limit"] == pytest.approx(baseline["flops"] / row["flops"])
            assert beside["memory"] == pytest.approx(row["memory_bytes"] / baseline["memory_bytes"])
    assert row["model"] == "par_transformer_tiny" and beside["limit"] > 1


def test_there_is_no_speedup_without_its_baselines_name(finished):
    output, folder = finished
    named = {f"x {name}" for name in (*OF_ENCODERS, TRANSFORMER_XL)}
    for text in (output, (folder / "results.md").read_text()):
        # Cells of all tables' first lines.
        heads = [line for line, below in pairwise(text.splitlines()) if re.match(r"\|[-:|]+\|$", below)]
        headers = {cell.strip() for head in heads for cell in head.strip("|").split("|")}
        assert {header for header in headers if header.startswith("x ") or "speed" in header} == named
        outside_of_tables = [line for line in text.splitlines() if not line.startswith("|")]
        assert not re.search(r"\d(\.\d+)? ?x\b", "\n".join(outside_of_tables))
    for name in named:
        assert f"- {name[2:]}: " in output, "what a baseline is, in full"


def test_pictures(finished):
    folder = finished[1]
    pictures = {path.name for path in folder.glob("*.png")}
    assert pictures == {f"speedup_{workload}_fp32.png" for workload in ("training", "latency", "throughput")}
    for name in pictures:
        assert image.imread(folder / name).std() > 0.01, "something is drawn"


def test_baselines_are_as_they_say():
    found = {each.baseline: each for each in models.build_models(BenchSettings(baseline_arch="bert_tiny"), "bf16")}
    if has_fairseq():
        layer = found[FAIRSEQ].model.model.encoder.sentence_encoder.layers[0]
        assert (layer.dropout_module.p, layer.self_attn.dropout_module.p) == (0.1, 0.1)
    assert found[OURS].model.network.dropout == 0.1 and found[OURS].model.network.options.attention_dropout == 0
    if has_transformers():
        config = found[HUGGING_FACE].model.model.bert.config
        assert config._attn_implementation == "sdpa"
        assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.1, 0.0)
    beside = BenchSettings(("bert_tiny", "lazyformer_m2x6_s_tiny"), baseline_arch="bert_tiny")
    registered = [each for each in models.build_models(beside, "bf16") if each.called == "bert_tiny"]
    assert {each.baseline for each in registered} == {models.REGISTERED}
    assert registered[0].model.network.options.attention_dropout == 0.1, "like LazyFormer's BERT"
    sizes = {each.model.parameters for each in found.values() if each.buckets == 0 and each.baseline}
    assert max(sizes) < 1.001 * min(sizes), "they differ by RoBERTa's two further positions"


def test_what_cannot_run_or_fails_is_left_out_by_name(monkeypatch, capsys):
    def attend(*arguments):
        raise ValueError("no kernel image is available")

    monkeypatch.setattr(models, "has_transformers", lambda: False)
    monkeypatch.setattr(BACK_ENDS["fused"], "attend", attend)
    archs = ("bert_tiny", "lazyformer_m2x6_s_tiny")
    settings = BenchSettings(
        archs=archs, lengths=(8,), tokens=8, back_ends=("fused", "eager"), buckets=(0,), rounds=2, device="cpu",
        baseline_arch="bert_tiny", baseline_back_ends=("eager", "fused"), workloads=("encoder",),
    )  # fmt: skip
    results = bench_run.run_bench(settings)
    (cell,) = results["cells"]
    left_out = {name.removesuffix(", fused, 0 buckets"): reason for name, reason in cell["left_out"].items()}
    assert left_out.keys() == {OURS, *archs} and "attention-dropout" in left_out["bert_tiny"]
    assert left_out[OURS] == left_out[archs[1]] == "ValueError: no kernel image is available"
    assert {row["back_end"] for row in cell["rows"] if row["model"] == "bert_tiny"} == {"eager"}
    assert all({OURS, models.REGISTERED} <= row["against"].keys() for row in cell["rows"])
    assert HUGGING_FACE not in {row["model"] for row in cell["rows"]}
    assert "pip install 'lazyformer_fairseq[bench]'" in capsys.readouterr().err
    page = markdown(bench_run.page({**results, "settings": asdict(settings)}))
    assert "skipped: bert_tiny, fused" in page


def test_a_noisy_machine_is_named(results):
    seconds = {"n": 3, "median": 1.0, "samples": [0.5, 1.0, 1.5]}
    cell = results["cells"][0]
    for high, is_noisy in ((1.05, False), (1.5, True)):
        row = {**cell["rows"][0], "seconds": {**seconds, "low": 1.0, "high": high}}
        page = markdown(bench_run.page({**results, "cells": [{**cell, "rows": [row]}]}))
        assert ("The machine was noisy: for 1 of 1 timings" in page) == is_noisy


def test_a_cell_in_which_nothing_fits_is_said_and_not_drawn(tmp_path):
    sizes = {"workload": "encoder", "precision": "fp32", "time": 8, "batch": 1, "matrix_peak": 1e9}
    cell = {**sizes, "rows": [], "left_out": {"bert_tiny, eager": "out of memory"}}
    results = {"cells": [cell], "cells_planned": 1, "settings": {"baseline_arch": "bert_tiny"}, "machine": {}}
    page = markdown(bench_run.page(results))
    assert "n = 8, batch 1, fp32; 0 rounds" in page and "skipped: bert_tiny, eager (out of memory)" in page
    bench_run.draw_all(results, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--arch bert_bass", "bert_bass: no such arch; did you mean bert_base, "),
        ("--baseline-arch transformer_xl_base", "transformer_xl_base is not an encoder that repeats sf"),
        ("--baseline-arch lazyformer_m2x6_s", "lazyformer_m2x6_s is not an encoder that repeats sf"),
        ("--precision fp64", "'fp64' is not one of 'fp32', 'bf16', 'fp16'"),
        ("--backend flash", "flash: choose from auto, eager, materialize, recompute, fused"),
        ("--what sleeping", "'sleeping' is not one of 'training', 'encoder', 'inference'"),
        ("--lengths 0", "0 is not in the range 1<=x<="),
        ("--pattern mine=sz", "'sz', character 2"),
        ("--pattern bert_base=M1 --arch bert_base", "--pattern bert_base=...: an --arch already has this name"),
        ("--device cuda", "--device cuda: torch finds no GPU here"),
    ],
)
def test_mistakes_are_named(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert message in refusal("bench", *options.split(), "--output", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_stop_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_run, "run_bench", mock.Mock(side_effect=KeyboardInterrupt))
    assert "stopped; nothing was written" in run(f"{TINY} --output {tmp_path / 'out'}", code=130)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "note").write_text("mine")  # a folder that is there is kept
    assert "already exists" in refusal("bench", *TINY.split(), "--output", tmp_path)


GPU_FAILS = mock.Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered\nand more"))


@pytest.mark.parametrize(
    "stop", [partial(signal.raise_signal, signal.SIGTERM), pytest.param(GPU_FAILS, marks=pytest.mark.slow)]
)
def test_a_stop_after_a_cell_keeps_what_was_measured(stop, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(models, "has_transformers", lambda: False)
    original = latency.measure

    def stopped_in_the_second(*things, description, **how):
        if "n = 16" in description:
            stop()
        return original(*things, description=description, **how)

    monkeypatch.setattr(latency, "measure", stopped_in_the_second)
    before = signal.getsignal(signal.SIGTERM)
    printed = run(f"{QUICK} --budget 0.0001s --output {tmp_path / 'out'}")
    assert "The benchmark was stopped before everything was measured." in printed
    assert ("RuntimeError: CUDA error: an illegal memory access was encountered" in caplog.text) == (stop is GPU_FAILS)
    assert [cell["time"] for cell in json.loads((tmp_path / "out" / "results.json").read_text())["cells"]] == [8]
    assert signal.getsignal(signal.SIGTERM) is before
    # One round, for which the time was enough, has no quartiles.
    assert "encoder alone: forward and backward: n = 8, batch 2, fp32; 1 round;" in printed
    assert "(n = 1)" in printed and not re.search(r"\d to \d", printed)


def endless() -> None:
    while True:
        pass


def test_a_spent_budget_ends_what_is_under_way_and_tries_no_more(monkeypatch, caplog):
    monkeypatch.setattr(latency, "GRACE", 0.1)
    things = {"quick": {"a": int, "b": int}, "endless": {"a": int, "b": endless}}
    (measured,) = latency.measure_interleaved(list(things), things.get, "cpu", 2, budget=0.1)
    assert measured[0] == "quick" and [len(timing.samples) for timing in measured[1].values()] == [2, 2]
    assert "the budget is used up; 1 of 2 conditions were measured" in caplog.text
    with pytest.raises(UserError, match="--budget: 0.1 seconds plus 0.1 were not enough for one round"):
        list(latency.measure_interleaved(["endless"], things.get, "cpu", 2, budget=0.1))
    tried = latency.run_once({"a": int, "b": endless}, "cpu", seconds=0)
    assert list(tried.callables) == ["a"] and tried.left_out["b"].startswith("no time left; use a longer --budget")


def tiny(positions: int = 16, **options) -> BenchModel:
    row = ARCHITECTURES["lazyformer_m2x6_s_tiny"].options()
    return our_model({**row, "sublayer_pattern": "M2", **options}, positions)


@pytest.mark.parametrize(("precision", "bytes_a_weight"), [("float32", 4 + 8), ("bfloat16", 2 + 4 + 8)])
def test_an_update_trains(precision, bytes_a_weight):
    model = tiny()
    model.model.to(getattr(torch, precision))
    update = Update(model, batch=2, time=8)
    update.optimizer.param_groups[0]["lr"] = 0.1
    before = [weight.detach().clone() for weight in update.weights]
    update()
    assert sum(not torch.equal(*pair) for pair in zip(before, update.weights, strict=True)) == len(before)
    assert all(weight.grad is None for weight in [*update.weights, *update.masters])
    steps = 4 * len(before)  # Adam counts them for each weight
    assert update.held_bytes() == bytes_a_weight * model.parameters + steps
