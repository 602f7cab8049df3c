"""What of the scripts that measure can be checked on any machine: loaders, start-up, a GPU's aims."""

import json
import re
import subprocess
import sys

import pytest
from helpers import ROOT, load_script, run_script

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --tokens-per-sample 32 --batch-size 4"


def run(name: str, *words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


# By script its options, and what the rows of its tables begin with.
TABLES = {
    "bench_loader": (f"{{data}} {TINY} --workers 0 --seconds 0.1 --cpu", ["model, an update", "loader, 0 workers"]),
    "bench_start_up": (
        f"{{data}} {TINY} --processes 2 --num-workers 1",
        ["start Python", "set up the task", "make the batches' list", "first batch", "processes: 2", "all"],
    ),
    "bench_trainer": (
        "--arch bert_tiny --sublayer-pattern M2x2 --vocab-size 500 --tokens-per-sample 16 --batch-size 2 --rounds 1 "
        "--device cpu",
        ["BertForMaskedLM, sdpa", "ours, (sf)xN", "M2x2"],
    ),
    "bench_muon": ("--arch bert_tiny --precision fp32 --rounds 1 --device cpu", ["bert_tiny"]),
    "time_documents": ("{text} --tokens-per-sample 32 --batch-size 2 --batches 2", []),
    "time_tail": (
        "--patterns sff --words 50 --tokens 16 --batch-size 2 --texts 2 --rounds 1",
        ["sff, update", "sff, classes"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_script_prints_its_rows_of_numbers(name, data_folder, tmp_path):
    """Each script that measures runs at tiny size, and its rows hold numbers above zero."""
    if name == "bench_trainer":
        pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    text = tmp_path / "text"
    text.write_text("\n\n".join(" ".join(["word"] * count) for count in (7, 20, 3) * 40))
    options, firsts = TABLES[name]
    done = run(name, *options.format(data=data_folder, text=text).split())
    assert done.returncode == 0, done.stderr
    rows = [row for row in cells(done.stdout) if row]
    for first in firsts:
        ((_, *found),) = [row for row in rows if row[0].startswith(first)]
        numbers = [float(cell.replace(",", "").rstrip("%")) for cell in found if re.fullmatch(r"[\d.,]+%?", cell)]
        assert numbers and max(numbers) > 0, first


def test_a_text_too_short_to_be_timed_is_named(tmp_path, monkeypatch):
    (text := tmp_path / "text").write_text("word " * 70)
    sizes = "--tokens-per-sample 32 --batch-size 2 --batches 1"
    monkeypatch.setattr(sys, "argv", ["time_documents.py", str(text), *sizes.split()])
    with pytest.raises(SystemExit, match=f"{text}: fills 2 blocks of 32 tokens, 6 are needed: give a longer text"):
        load_script("time_documents").main()


# --- scripts/bench_gpu.sh


@pytest.fixture
def bench_gpu(tmp_path, monkeypatch):
    """``bench_gpu("--tiny")``: it runs without a GPU, and writes to "out"."""
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return lambda *arguments: run_script("bench_gpu.sh", *arguments, cwd=tmp_path)


def test_without_a_gpu_and_other_mistakes_are_named(bench_gpu, tmp_path):
    run = bench_gpu()
    assert run.returncode == 1 and "torch finds no GPU here" in run.stderr
    assert "usage:" in bench_gpu("--help").stdout
    assert "--fast: no such option" in bench_gpu("--fast").stderr
    assert "holds no wheels" in bench_gpu(tmp_path).stderr
    (tmp_path / "out" / "models").mkdir(parents=True)
    assert "holds results already" in bench_gpu().stderr


@pytest.mark.slow
def test_a_rehearsal_writes_all_files(bench_gpu, tmp_path):
    run = bench_gpu("--tiny")
    assert run.returncode == 0, run.stderr[-3000:]
    out = tmp_path / "out"
    assert {"tests.txt", "models", "bars.txt", "back_ends.txt", "variants.txt"} <= {path.name for path in out.iterdir()}
    assert json.loads((out / "models" / "results.json").read_text())["cells"]
    assert "m2x6_w3072: memory" in (out / "bars.txt").read_text()


def test_aims_are_compared_for_models_that_the_script_measures_with_tests_that_there_are():
    bars, text = load_script("gpu_bars"), (ROOT / "scripts" / "bench_gpu.sh").read_text()
    tests = re.findall(r"tests/[\w/]+\.py", text)
    assert tests and all((ROOT / path).is_file() for path in tests)
    for model, time in bars.SPEEDUPS:
        assert model in text and str(time) in text

    def row(model: str, back_end: str, speedup: float, **more) -> dict:
        beside = {"limit": 1.1, "memory": 1.01, "back_end": "fused"}
        beside |= dict.fromkeys(("speedup", "low", "high"), speedup)
        shared = {"buckets": 0, "baseline": None, "against": {bars.OURS: beside}}
        return {"model": model, "back_end": back_end, **shared, **more}

    ours = {"baseline": bars.OURS, "share_of_peak": 0.46}
    rows = [row("our bert_base", "fused", 1.0, **ours), row("our bert_base", "eager", 0.5, **ours)]
    rows.append(row("lazyformer_m2x6_s", "fused", 0.99))
    beside = {"speedup": 1.2, "n": 1, "limit": 1.1, "back_end": "fused"}
    once = row("lazyformer_m6x2_s", "fused", 1.2, against={bars.OURS: beside})
    cells = [
        {"time": 512, "workload": "training", "rows": rows},
        {"time": 8192, "workload": "encoder", "rows": rows},
        {"time": 8192, "workload": "encoder", "rows": [once]},
    ]
    found = [(line[0], line[1], line[5], line[-1]) for line in bars.lines_of({"cells": cells})]
    assert found == [
        ("our bert_base: share of the matrix peak", 512, "46.0%", "yes"),
        ("lazyformer_m2x6_s x our bert_base", 512, "0.990 (0.990 to 0.990)", "no"),
        ("lazyformer_m2x6_s: memory / our bert_base's", 512, "1.010", "no"),
        ("lazyformer_m2x6_s x our bert_base", 8192, "0.990 (0.990 to 0.990)", "no"),
        ("lazyformer_m6x2_s x our bert_base", 8192, "1.200 (n = 1)", "yes"),
    ]
