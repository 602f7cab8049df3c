"""The plan for a GPU, scripts/gpu: each line is rehearsed on a processor, and its report is looked at."""

import json
import re
import sys
from pathlib import Path

import pytest
from helpers import (
    NAMES,
    ROOT,
    THINGS,
    build_toy_corpus,
    load_script,
    run_script,
    toy_texts,
    write_lines,
    write_toy_glue,
)

from lazyformer_fairseq.storage.json_files import read_json

LINES = sorted(path.stem for path in (ROOT / "scripts" / "gpu" / "lines").iterdir())


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """What a line reads, in miniature."""
    folder = tmp_path_factory.mktemp("gpu_data")
    build_toy_corpus(folder / "babylm", 160)
    pairs = [
        {"sentence_good": f"{name} sees the {thing}.", "sentence_bad": f"{name} the sees {thing}.", "UID": "order"}
        for name in NAMES[:2]
        for thing in THINGS[:2]
    ]
    write_lines(folder / "blimp" / "order.jsonl", [json.dumps(pair) for pair in pairs])
    write_toy_glue(folder / "glue", train=80, valid=10)
    (folder / "documents.txt").write_text("\n".join(toy_texts(60)))
    return folder


@pytest.fixture
def run_line(monkeypatch, tmp_path, data):
    """``run_line("learning", "--tiny")`` without a GPU, into the folder "out"."""
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DATA", str(data))
    return lambda line, *words: run_script("gpu/run.sh", line, tmp_path / "out", *words)


def rehearsed(run, folder: Path) -> dict:
    """Return the report of a line that ran: all its parts were done, and it says that it is a rehearsal."""
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    report = read_json(folder / "report.json")
    assert {part["end"] for part in report["parts"]} == {"done"}
    page = (folder / "report.md").read_text()
    assert report["verdict"] in page and "its numbers are meaningless" in report["verdict"]
    assert "H100" in report["facts"]["device"] or "tokens/s" not in page
    assert not list(folder.parent.glob("*.unfinished"))
    return report


def test_mistakes_are_named(run_line, tmp_path, monkeypatch):
    assert "torch finds no GPU here" in run_line("throughput").stderr
    assert "--fast: no such option" in run_line("throughput", "--fast").stderr
    assert "fastest: no such line" in run_line("fastest", "--tiny").stderr
    assert "run the line `learning` first" in run_line("base-best", "--tiny").stderr
    (tmp_path / "out" / "throughput").mkdir()
    assert "already exists" in run_line("throughput", "--tiny").stderr
    monkeypatch.setenv("WHEELS", str(tmp_path))
    assert "contains no wheels" in run_line("learning", "--tiny").stderr
    monkeypatch.delenv("WHEELS")
    monkeypatch.setenv("DATA", str(tmp_path))
    assert "/babylm does not exist, but `learning` needs it" in run_line("learning", "--tiny").stderr


def test_help_names_every_line():
    shown = run_script("gpu/run.sh", "--help").stdout
    assert sorted(re.findall(r"^  ([a-z-]+)  ", shown, re.MULTILINE)) == LINES
    assert sorted(load_script(ROOT / "scripts" / "gpu" / "report.py").LINES) == LINES


@pytest.mark.slow
def test_throughput(run_line, tmp_path):
    report = rehearsed(run_line("throughput", "--tiny"), tmp_path / "out" / "throughput")
    assert len(report["rows"]) == 3 * 6
    assert [bar["bar"] for bar in report["bars"]] == [1.2, 1.2]
    assert all(bar["measured"] > 0 for bar in report["bars"])


@pytest.mark.slow
def test_learning_and_the_base_size_of_its_best_row(run_line, tmp_path):
    report = rehearsed(run_line("learning", "--tiny"), tmp_path / "out" / "learning")
    models = [row["model"] for row in report["rows"]]
    assert models == ["bert", "lazyformer", "conv", "modern"]
    assert report["rows"][0]["above BERT"] == 0 and report["rows"][1]["standard error"] is not None
    assert report["rows"][1]["pattern"] == "M2x4"
    best = max(row["BLiMP, %"] for row in report["rows"])
    assert [bar["measured"] for bar in report["bars"] if "best row" in bar["what"]] == [best, best]
    assert "](blimp/phenomena.png)" in (tmp_path / "out" / "learning" / "report.md").read_text()

    report = rehearsed(run_line("base-best", "--tiny"), tmp_path / "out" / "base-best")
    (row,) = report["rows"]
    assert row["model"] in models and {"RTE", "CoLA", "BLiMP, %"} <= row.keys()
    (bar,) = report["bars"]
    assert bar["bar"] == best and bar["measured"] == row["BLiMP, %"]


@pytest.mark.slow
@pytest.mark.parametrize("line", ["base-size", "documents", "correctness", "rest"])
def test_other_lines(run_line, tmp_path, line):
    report = rehearsed(run_line(line, "--tiny"), tmp_path / "out" / line)
    measured = {bar["what"]: bar["measured"] for bar in report["bars"]}
    if line == "base-size":
        assert report["rows"][0]["model"] == "bert" and not measured, "there is no line `learning` to compare with"
    elif line == "documents":
        assert {"s: time over visible pairs", "an epoch of RTE without padding, relative to padded"} <= measured.keys()
        assert all(value > 0 for value in measured.values())
    elif line == "correctness":
        assert measured["tests that failed"] == 0 and measured["tests that passed"] > 30
    else:
        assert {"m2x6_w3072", "nbrc_tiny", "gshard_tiny"} <= {row["model"] for row in report["rows"]}


def report_module():
    return load_script(ROOT / "scripts" / "gpu" / "report.py")


def test_what_was_cut_or_failed_is_in_the_report(tmp_path):
    (tmp_path / "parts.tsv").write_text("training\t440\tcut after 440 s\nBLiMP\t0\tno time was left\n")
    report_module().write_report("learning", tmp_path, 535, is_tiny=False)
    report = read_json(tmp_path / "report.json")
    assert report["parts"][0] == {"part": "training", "seconds": "440", "end": "cut after 440 s"}
    assert {bar["reached"] for bar in report["bars"] if "best row" in bar["what"]} == {"not measured"}
    assert "BLiMP of the best row, % (goal)." in report["verdict"] and report["rows"] == []


def test_bars_that_are_no_ratios_are_for_an_h100_alone(tmp_path, monkeypatch):
    (tmp_path / "parts.tsv").write_text("throughput\t400\tdone\n")

    def row(model: str, speed: float) -> dict:
        return {"model": model, "back_end": "sdpa", "tokens_per_second": speed, "share_of_peak": 0.4, "memory_bytes": 1}

    short = [row("transformers' modernbert", 2e5), row("transformers' modernbert", 3e5), row("modernbert", 366_000.0)]
    long = [row("modernbert", 100.0), row("lazy_modernbert", 119.0)]
    cells = [{"time": 1024, "rows": short}, {"time": 8192, "rows": long}]
    (tmp_path / "throughput.json").write_text(json.dumps({"lengths": [1024, 8192, 512], "cells": cells}))
    report = report_module()
    ends = {}
    for card in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        monkeypatch.setattr(report, "describe_machine", lambda device, card=card: {"device": card})
        shown = report.write_report("throughput", tmp_path, 420, is_tiny=False)
        ends[card] = [bar["reached"] for bar in read_json(tmp_path / "report.json")["bars"]]
        assert ("366,000" in shown) == ("H100" in card)
    assert list(ends.values()) == [["yes", "yes", "no"], ["yes", "no"]], "1.22 and 1.19 for 1.2"


def test_aims_of_the_rest_are_for_models_that_it_measures():
    report, text = report_module(), (ROOT / "scripts" / "gpu" / "lines" / "rest.sh").read_text()
    for model, n in report.SPEEDUPS:
        assert model in text and str(n) in text

    def row(model: str, speedup: float, **more) -> dict:
        facts = {"n": 512, "work": "training", "bias": 32, "on": "fused", "memory": 1.01, "share of peak": 0.46}
        return {"model": model, "speedup": speedup, **facts, **more}

    ours = list(report.bars_of_the_rest(row(report.OURS, 1.0)))
    assert [(bar.measured, bar.bar, bar.reached) for bar in ours] == [(0.46, 0.45, "yes")]
    assert not list(report.bars_of_the_rest(row(report.OURS, 0.9))), "only its fastest back end"
    lazy = list(report.bars_of_the_rest(row("lazyformer_m2x6_s", 0.99)))
    assert [(bar.measured, bar.reached) for bar in lazy] == [(0.99, "no"), (1.01, "no")]
    other = list(report.bars_of_the_rest(row("lazyformer_m6x2_s", 1.2, n=8192, work="encoder")))
    assert [bar.reached for bar in other] == ["yes"]


def test_the_line_correctness_names_tests_that_there_are():
    text = (ROOT / "scripts" / "gpu" / "lines" / "correctness.sh").read_text()
    named = re.findall(r"tests/[\w/]+\.py", text)
    assert named and all((ROOT / path).is_file() for path in named)
    with_gpu = set()
    for path in (ROOT / "tests" / "modules").rglob("test_*.py"):
        if "def test_on_a_gpu" in path.read_text() or path.name.endswith("_on_gpu.py"):
            with_gpu.add(str(path.relative_to(ROOT)))
    assert with_gpu == set(named)
