"""The page: what was measured beside what the paper prints, and what is not there yet."""

import json
from pathlib import Path

import pytest
from glue_results import write_grid, write_result
from helpers import write_toy_glue
from training_logs import BERT, LAZY, write_run

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.reproduce.report import write_report
from lazyformer_fairseq.experiments.reproduce.steps import PAPER, TINY, Size, find_inputs, steps
from lazyformer_fairseq.finetuning.benchmark import PAPER_TASKS
from lazyformer_fairseq.finetuning.results import RunKey


def prepare(tmp_path: Path, size: Size):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "text.txt").write_text("A text.\n")
    write_toy_glue(tmp_path / "raw" / "glue", train=4, valid=2)
    inputs = find_inputs(str(tmp_path / "raw"), (), size, tmp_path)
    return steps(size, inputs, tmp_path / "out", "fp32"), size, inputs, tmp_path / "out"


def record(out: Path, *names: str) -> None:
    (out / "steps").mkdir(parents=True, exist_ok=True)
    for name in names:
        (out / "steps" / f"{name}.json").write_text('{"command": "", "ended": "", "seconds": 1800}')


def write_bench(out: Path, name: str, lengths: tuple[int, ...]) -> None:
    ours = "our bert_base"
    rows = [
        {"model": model, "baseline": baseline, "back_end": back_end, "seconds": {"median": seconds}}
        | {"against": {ours: {"speedup": speedup}}}
        for model, baseline, back_end, seconds, speedup in (
            (ours, ours, "eager", 0.1, 0.9),
            (ours, ours, "recompute", 0.09, 1),
            ("lazyformer_m2x6_s", None, "eager", 0.08, 1.125),
        )
    ]
    cells = [{"time": length, "batch": 2, "precision": "fp32", "rows": rows} for length in lengths]
    (out / "bench" / name).mkdir(parents=True)
    (out / "bench" / name / "results.json").write_text(json.dumps({"cells": cells, "machine": {"device": "an abacus"}}))
    (out / "bench" / name / "speedup_training_fp32.png").write_bytes(b"\x89PNG")


def write_glue(out: Path, scores: dict[str, float]) -> None:
    write_grid(out / "glue", {name: f"{name}.pt" for name in scores}, list(PAPER_TASKS), [2e-5], [1])
    for name, score in scores.items():
        for task in PAPER_TASKS:
            arch, updates = name.rsplit("-", 1)
            more = {"updates": int(updates), "checkpoint": f"{arch}/checkpoint_update_{updates}.pt"}
            write_result(out / "glue", RunKey(name, task, 2e-5, 1), score, **more)


def rows_of(page: str, start: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith(start)]


def test_the_papers_numbers_stand_beside_ours(tmp_path):
    given = prepare(tmp_path, PAPER)
    out = given[-1]
    write_glue(out, {"bert_base-1000000": 0.5, "lazyformer_m2x6-500000": 0.6, "lazyformer_m2x6-1000000": 0.75})
    for name, lengths in (("tables", (512,)), ("figure_3", (512, 1024))):
        write_bench(out, name, lengths)
    write_run(out / "pretraining" / "bert_base" / "train.log", [9.0, 8.0], BERT)
    write_run(out / "pretraining" / "lazyformer_m2x6_s" / "train.log", [9.0, 7.5], LAZY)
    record(out, "bench_tables", "bench_figure_3")
    page = write_report(*given).read_text()
    assert [row[-1] for row in rows_of(page, "| bert_base-1000000 ")] == ["50.00"]
    assert [row[-1] for row in rows_of(page, "| lazyformer_m2x6-")] == ["75.00", "60.00"]
    assert [row[-1] for row in rows_of(page, "| BERT (paper)")] == ["83.52"]
    [[_, milliseconds, speedup, back_end, average, printed, printed_average]] = rows_of(page, "| BERT  ")
    assert (milliseconds, speedup, back_end) == ("90.0", "1.00x", "recompute")
    assert (average, printed, printed_average) == ("50.00", "1.00x", "83.52")
    assert rows_of(page, "| M2x6-S  ")[0][1:3] == ["80.0", "1.12x"]
    assert rows_of(page, "| M2x6-S  ")[0][5] == "1.29x"  # 45 / 35
    assert rows_of(page, "| M6x2-SD ")[0] == ["M6x2-SD", "-", "-", "-", "-", "1.36x", "82.47"]
    assert rows_of(page, "| M2x6  ")[-1] == ["M2x6", "4480, 896, 14", "75.00/75.00", "75.00", "86.34/86.31", "84.56"]
    assert rows_of(page, "| lazyformer_m2x6_s ")[0][1:] == ["1.12x", "1.12x"]  # of Figure 3
    assert "0.500" in [row[-1] for row in rows_of(page, "| bench_tables ")]
    for name in ("loss.png", "glue/glue_updates.png", "speedup_training_fp32.png"):
        assert f"]({name})" in page
        assert (out / "report" / name).read_bytes().startswith(b"\x89PNG")
    assert "in miniature" not in page


def test_what_is_not_there_is_named_and_a_miniature_says_that_it_is_one(tmp_path):
    given = prepare(tmp_path, TINY)
    out = given[-1]
    with pytest.raises(UserError, match="no step is done yet"):
        write_report(*given)
    write_run(out / "pretraining" / "bert_base" / "train.log", [9.0], BERT)
    (out / "data").mkdir()
    (out / "data" / "manifest.json").touch()
    record(out, "corpus")
    page = write_report(*given).read_text()
    for missing in ("glue_*", "bench_tables", "bench_figure_3"):
        assert f"Not there yet: `{missing}`." in page
    assert "This shows that everything runs, not which model is better" in page
    assert "not done" in [row[-1] for row in rows_of(page, "| glue_bert_base ")]
