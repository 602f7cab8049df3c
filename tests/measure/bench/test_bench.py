"""`lazyformer bench` at tiny size, from the command to its files."""

import csv
import json
import re
import signal
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from matplotlib import image

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.huggingface_bert import has_transformers
from lazyformer_fairseq.measure.bench import measuring, models, pictures
from lazyformer_fairseq.measure.bench import run as bench_run
from lazyformer_fairseq.measure.bench.models import BASELINES, FAIRSEQ, HUGGING_FACE, OURS
from lazyformer_fairseq.measure.bench.report import page
from lazyformer_fairseq.measure.bench.settings import BenchSettings
from lazyformer_fairseq.measure.costs import matrix_peak
from lazyformer_fairseq.modules.attention import BACK_ENDS
from lazyformer_fairseq.report import figures as figures_kit
from lazyformer_fairseq.report.page import markdown

TINY = "--baseline-arch bert_tiny --lengths 8,16 --tokens 16 --rounds 2 --device cpu"


def run(options: str, **how):
    return CliRunner().invoke(main, ["bench", *options.split()], catch_exceptions=False, **how)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[str, Path]:
    """What the command printed, and its folder."""
    folder = tmp_path_factory.mktemp("bench") / "results"
    archs = "--arch lazyformer_m2x6_s_tiny,par_transformer_tiny --pattern mine=M3x1 --tgt-len 4 --mem-len 4"
    archs += " --baseline-backend eager,fused"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(matrix_peak, "SIZES", {"cpu": (32, 64)})
        result = run(f"{TINY} {archs} --rounds 3 --what training,inference --output {folder}")
    assert result.exit_code == 0, result.output
    return result.output, folder


def results_of(finished: tuple[str, Path]) -> dict:
    return json.loads((finished[1] / "results.json").read_text())


def rows_of(finished: tuple[str, Path]) -> list[dict]:
    return [row for cell in results_of(finished)["cells"] for row in cell["rows"]]


def test_every_cell_has_every_model(finished):
    cells = results_of(finished)["cells"]
    assert [(cell["workload"], cell["time"], cell["batch"]) for cell in cells] == [
        *(("training", 8, 2), ("inference", 8, 1), ("inference", 8, 2)),
        *(("training", 16, 1), ("inference", 16, 1)),
    ]
    for cell in cells:
        assert not cell["left_out"]
        models = [(row["model"], row["buckets"], row["back_end"]) for row in cell["rows"]]
        for buckets in (32, 0):
            assert {("lazyformer_m2x6_s_tiny", buckets, "auto"), ("mine", buckets, "auto")} <= set(models)
            assert sum(model == OURS and its == buckets for model, its, _ in models) == 2
        assert (FAIRSEQ, 0, "its own") in models and len(set(models)) == len(models)


def test_a_row_has_what_it_costs(finished):
    for row in rows_of(finished):
        assert row["parameters"] > 1e6 and row["flops"] > 0 and row["memory_bytes"] > 4 * row["parameters"]
        seconds = row["seconds"]
        assert len(seconds["samples"]) == seconds["n"] == 3 and seconds["low"] <= seconds["median"] <= seconds["high"]
        assert row["flops_per_second"] == pytest.approx(row["flops"] / seconds["median"])
    for cell in results_of(finished)["cells"]:
        for row in cell["rows"]:
            assert row["share_of_peak"] == pytest.approx(row["flops_per_second"] / cell["matrix_peak"])


def test_training_keeps_adams_moments_too(finished):
    for row in rows_of(finished):
        if row["model"] == OURS:
            of_weights = row["memory_bytes"] / (4 * row["parameters"])
            assert of_weights > 4 or 1 < of_weights < 1.5  # weights, gradients and two moments, or weights alone


def baselines_in(rows: list[dict], name: str, buckets: int) -> list[dict]:
    """Rows that stand for a baseline; of ours those with this bias."""
    return [row for row in rows if row["baseline"] == name and (name != OURS or row["buckets"] == buckets)]


def test_speedups_are_against_the_fastest_of_a_baseline(finished):
    for cell in results_of(finished)["cells"]:
        for row in cell["rows"]:
            assert list(row["against"]) == [name for name in BASELINES if baselines_in(cell["rows"], name, 0)]
            for name, beside in row["against"].items():
                candidates = baselines_in(cell["rows"], name, row["buckets"])
                baseline = min(candidates, key=lambda candidate: candidate["seconds"]["median"])
                assert beside["back_end"] == baseline["back_end"]
                assert beside["speedup"] == pytest.approx(baseline["seconds"]["median"] / row["seconds"]["median"])
                assert beside["limit"] == pytest.approx(baseline["flops"] / row["flops"])
                assert beside["memory"] == pytest.approx(row["memory_bytes"] / baseline["memory_bytes"])


def test_one_round_has_no_quartiles_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix_peak, "SIZES", {"cpu": (32,)})
    monkeypatch.setattr(models, "has_transformers", lambda: False)
    archs = "--arch lazyformer_m2x6_s_tiny,par_transformer_tiny --tgt-len 4 --mem-len 4 --backend eager"
    quick = "--what encoder --relative-position-buckets 0 --baseline-backend eager --budget 0.0001s"
    output = run(f"{TINY} {archs} {quick} --output {tmp_path / 'out'}").output
    assert (
        output.count("; 1 round") == 3
        and "encoder alone: forward and backward: n = 8, batch 2, fp32; 1 round;" in output
    )
    table_rows = [line for line in output.splitlines() if line.startswith("| lazyformer_m2x6_s_tiny")]
    assert len(table_rows) == 2 and all(row.count("(n = 1)") == 3 for row in table_rows)
    assert not re.search(r"\d to \d", output)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = [row for cell in results["cells"] for row in cell["rows"]] + results["causal"]
    assert {row["seconds"]["n"] for row in rows} == {1} and not any("low" in row["seconds"] for row in rows)
    assert (tmp_path / "out" / "speedup_encoder_fp32.png").exists()


def headers_of(text: str) -> list[str]:
    """Cells of all tables' first lines."""
    lines = text.splitlines()
    heads = [line for line, below in pairwise(lines) if re.match(r"\|[-:|]+\|$", below)]
    return [cell.strip() for head in heads for cell in head.strip("|").split("|")]


def test_no_speedup_without_its_baselines_name(finished):
    output, folder = finished
    named = {f"x {name}" for name in (*BASELINES, "our transformer_xl_tiny")}
    for text in (output, (folder / "results.md").read_text()):
        speedups = {header for header in headers_of(text) if header.startswith("x ") or "speed" in header}
        assert speedups == named
        outside_of_tables = [line for line in text.splitlines() if not line.startswith("|")]
        assert not re.search(r"\d(\.\d+)? ?x\b", "\n".join(outside_of_tables))
    with (folder / "results.csv").open(newline="") as file:
        columns = csv.DictReader(file).fieldnames
    for column in columns:
        if "speed" in column or "limit" in column:
            assert re.fullmatch(r"(speedup|limit) against (.+)", column)[2] in {name[2:] for name in named}
    for name in BASELINES:
        assert f"- {name}: " in output, "what a baseline is, in full"


def test_csv_holds_what_json_holds(finished):
    results = results_of(finished)
    with (finished[1] / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(rows_of(finished)) + len(results["causal"])
    for line, row in zip(lines, [*rows_of(finished), *results["causal"]], strict=True):
        assert line["model"] == row["model"] and float(line["seconds_median"]) == row["seconds"]["median"]
        for name, beside in row["against"].items():
            assert float(line[f"speedup against {name}"]) == beside["speedup"]


def test_causal_models_stand_beside_transformer_xl(finished):
    first, second = results_of(finished)["causal"]
    assert (first["model"], second["model"]) == ("transformer_xl_tiny", "par_transformer_tiny")
    assert second["against"]["our transformer_xl_tiny"]["limit"] == first["flops"] / second["flops"] > 1


def test_pictures(finished):
    folder = finished[1]
    pictures = {path.name for path in folder.glob("*.png")}
    assert pictures == {f"speedup_{kind}_fp32.png" for kind in ("training", "latency", "throughput")}
    for name in pictures:
        assert image.imread(folder / name).std() > 0.01, "something is drawn"


def test_each_series_of_a_picture_has_a_look_of_its_own_and_panels_one_axis(finished, tmp_path, monkeypatch):
    figures = {}
    monkeypatch.setattr(figures_kit, "write_picture", lambda figure, path: figures.update({path.name: figure}))
    pictures.draw_all(results_of(finished), tmp_path)
    panels = figures["speedup_training_fp32.png"].axes
    assert len(panels) == len(rows_of(finished)[0]["against"]) > 1
    for panel in panels:
        looks = [(line.get_color(), line.get_marker()) for line in panel.lines if line.get_label()[0] != "_"]
        assert len(looks) == len(set(looks)) == 4, "two models, with and without bias"
    assert len({panel.get_ylim() for panel in panels}) == 1


def test_what_it_was_measured_with(finished):
    results = results_of(finished)
    assert {"torch", "fairseq-fixed", "python"} <= results["versions"].keys() and results["machine"]["device"]
    assert results["settings"]["rounds"] == 3


def test_baselines_are_as_they_say():
    found = {each.baseline: each for each in models.build_models(BenchSettings(baseline_arch="bert_tiny"), "bf16")}
    layer = found[FAIRSEQ].model.model.encoder.sentence_encoder.layers[0]
    assert (layer.dropout_module.p, layer.self_attn.dropout_module.p) == (0.1, 0.1)
    assert found[OURS].model.encoder.dropout == 0.1 and found[OURS].model.encoder.options.attention_dropout == 0
    if has_transformers():
        config = found[HUGGING_FACE].model.model.bert.config
        assert config._attn_implementation == "sdpa"
        assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.1, 0.0)
    sizes = {each.model.parameters for each in found.values() if each.buckets == 0 and each.baseline}
    assert max(sizes) < 1.001 * min(sizes), "they differ by RoBERTa's two further positions"


def test_what_cannot_run_is_left_out_by_name(monkeypatch, capsys):
    monkeypatch.setattr(models, "has_transformers", lambda: False)
    monkeypatch.setattr(matrix_peak, "SIZES", {"cpu": (32,)})
    settings = BenchSettings(
        archs=("bert_tiny",), lengths=(8,), tokens=8, back_ends=("fused", "eager"), buckets=(0,), rounds=2,
        baseline_arch="bert_tiny", workloads=("encoder",),
    )  # fmt: skip
    results = bench_run.run_bench(settings)
    (cell,) = results["cells"]
    assert list(cell["left_out"]) == ["bert_tiny, fused, 0 buckets"]
    assert "attention-dropout" in cell["left_out"]["bert_tiny, fused, 0 buckets"]
    assert HUGGING_FACE not in {row["model"] for row in cell["rows"]}
    assert "pip install 'lazyformer_fairseq[bench]'" in capsys.readouterr().err
    text = markdown(page({**results, "settings": asdict(settings)}))
    assert "not measured" in text and "left out: bert_tiny, fused" in text


def test_a_kernel_that_fails_is_left_out(monkeypatch):
    def attend(*arguments):
        raise ValueError("no kernel image is available")

    monkeypatch.setattr(models, "has_transformers", lambda: False)
    monkeypatch.setattr(matrix_peak, "SIZES", {"cpu": (32,)})
    monkeypatch.setattr(BACK_ENDS["fused"], "attend", attend)
    settings = BenchSettings(
        archs=("lazyformer_m2x6_s_tiny",), lengths=(8,), tokens=8, back_ends=("fused", "eager"), buckets=(0,), rounds=2,
        baseline_arch="bert_tiny", workloads=("encoder",),
    )  # fmt: skip
    (cell,) = bench_run.run_bench(settings)["cells"]
    reason = "ValueError: no kernel image is available"
    assert cell["left_out"] == {f"{name}, fused, 0 buckets": reason for name in (OURS, "lazyformer_m2x6_s_tiny")}
    assert {"eager", "materialize", "recompute"} <= {row["back_end"] for row in cell["rows"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--arch bert_bass", "--arch bert_bass: there is no such one; there are bert_base, "),
        ("--precision fp64", "--precision fp64: .* fp32, bf16, fp16"),
        ("--backend flash", "--backend flash: .* auto, eager, materialize, recompute, fused"),
        ("--what sleeping", "--what sleeping: .* training, encoder, inference"),
        ("--lengths 0", "--lengths: give numbers from 1 on"),
        ("--pattern mine=sz", "'sz', character 2"),
        ("--pattern bert_base=M1 --arch bert_base", "--pattern bert_base=...: an --arch has this name"),
        ("--device cuda", "--device cuda: torch finds no GPU here"),
    ],
)
def test_mistakes_are_named(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=message):
        run(f"{options} --output {tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_kept(tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        run(f"{TINY} --output {tmp_path}")


def test_a_stop_leaves_nothing(tmp_path, monkeypatch):
    def stopped(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "run_bench", stopped)
    result = run(f"{TINY} --output {tmp_path / 'out'}")
    assert result.exit_code == 130 and "stopped; nothing was written" in result.output
    assert list(tmp_path.iterdir()) == []


def gpu_fails() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")


@pytest.mark.parametrize(
    "stop", [partial(signal.raise_signal, signal.SIGTERM), pytest.param(gpu_fails, marks=pytest.mark.slow)]
)
def test_a_stop_after_a_cell_keeps_what_was_measured(stop, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(matrix_peak, "SIZES", {"cpu": (32,)})
    monkeypatch.setattr(models, "has_transformers", lambda: False)
    original = measuring.measure

    def stopped_in_the_second(*things, description, **how):
        if "n = 16" in description:
            stop()
        return original(*things, description=description, **how)

    monkeypatch.setattr(measuring, "measure", stopped_in_the_second)
    before = signal.getsignal(signal.SIGTERM)
    options = "--arch lazyformer_m2x6_s_tiny --what encoder --relative-position-buckets 0"
    result = run(f"{TINY} {options} --output {tmp_path / 'out'}")
    assert result.exit_code == 0 and "The run was stopped before all was measured." in result.output
    assert ("RuntimeError: CUDA error: an illegal memory access was encountered" in caplog.text) == (stop is gpu_fails)
    assert [cell["time"] for cell in json.loads((tmp_path / "out" / "results.json").read_text())["cells"]] == [8]
    assert signal.getsignal(signal.SIGTERM) is before


def test_pictures_can_be_drawn_again(finished, tmp_path):
    with pytest.raises(UserError, match="results.json: no such file"):
        run(f"draw {tmp_path}")
    (tmp_path / "results.json").write_bytes((finished[1] / "results.json").read_bytes())
    assert "speedup_training_fp32.png" in run(f"draw {tmp_path}").output
    assert {path.name for path in tmp_path.glob("*.png")} == {path.name for path in finished[1].glob("*.png")}


def test_help_has_defaults():
    text = " ".join(run("models --help").output.split())
    assert "[default: 128,512" in text and "[default: results/bench]" in text
    assert {"backends", "kinds"} <= set(run("--help").output.split())
