"""The report on made results: marks beside heuristics and the paper, and what is said where runs are missing."""

import csv
import itertools
import json
from pathlib import Path

import pytest

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.report import write_report
from lazyformer_fairseq.finetuning.results import RunKey

HEURISTICS = {"first sentence": {"f1": 0.1, "exact_match": 0.01}, "near the question": {"f1": 0.3, "exact_match": 0.02}}


def make_grid(folder: Path, f1_of: dict[float, list[float]], models=("par",), without=(), **more) -> Path:
    """Runs of each model at each rate, one a seed, with these F1; exact match is 0.1 less."""
    seeds = list(range(1, 1 + max(map(len, f1_of.values()))))
    runs = folder / "runs"
    runs.mkdir(parents=True)
    grid = {"models": dict.fromkeys(models, "c.pt"), "tasks": ["SQuAD"], "lrs": list(f1_of), "seeds": seeds}
    (runs / "grid.json").write_text(json.dumps(grid))
    for model, (rate, values) in itertools.product(models, f1_of.items()):
        for seed, f1 in enumerate(values, start=1):
            if RunKey(model, "SQuAD", rate, seed) not in without:
                write_result(runs / model / "SQuAD" / f"lr{rate:g}_seed{seed}", model, rate, seed, f1, **more)
    return folder


def write_result(folder: Path, model: str, rate: float, seed: int, f1: float, **more) -> None:
    result = {
        **{"format_version": 1, "model": model, "checkpoint": f"{model}/c.pt", "updates": 8601, "task": "SQuAD"},
        **{"lr": rate, "seed": seed, "epochs": 2, "best_epoch": 2, "selected_by": "f1", "train_rows": 87_599},
        **{"seconds": 60.0, "metrics": {"dev-v1.1": {"f1": f1, "exact_match": f1 - 0.1}}},
        "baseline": {"dev-v1.1": HEURISTICS["near the question"]},
        "baselines": {name: {"dev-v1.1": marks} for name, marks in HEURISTICS.items()},
        **more,
    }
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result))


def cells(markdown: str, first: str) -> list[str]:
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_medians_stand_beside_heuristics_and_the_paper(tmp_path):
    make_grid(tmp_path, {3e-5: [0.874, 0.871, 0.879, 0.86, 0.88]})
    markdown = write_report(tmp_path, tmp_path / "report")
    assert cells(markdown, "par") == ["par", "8,601", "87.40", "77.40"]
    assert cells(markdown, "PAR BERT Base (paper)")[2:] == ["87.40", "-"]
    assert cells(markdown, "near the question")[2:] == ["30.00", "2.00"]
    assert markdown.index("| near the question") < markdown.index("| first sentence")
    scores = markdown[markdown.index("## Each score") :]
    row = next(line for line in scores.splitlines() if line.startswith("| par "))
    for cell in ("86.00 to 88.00", "5 of 5", "3e-05", "30.00", "yes"):
        assert f" {cell} |" in row
    assert "Training rows: SQuAD 87,599." in markdown
    assert "ncomplete" not in markdown


def test_a_missing_run_is_marked_and_counted(tmp_path):
    make_grid(tmp_path, {3e-5: [0.5, 0.6]}, without=[RunKey("par", "SQuAD", 3e-5, 2)], train_rows=100)
    markdown = write_report(tmp_path, tmp_path / "report")
    assert cells(markdown, "par")[2:] == ["50.00*", "40.00*"]
    assert "| par | SQuAD | 1 of 2 | 1: 3e-05 (2) | 0 |" in " ".join(markdown.split())
    assert "Training rows: SQuAD 100 (the official file has 87,599)." in markdown


def test_csv_and_latex_hold_the_same_and_no_run_at_all_is_an_error(tmp_path):
    make_grid(tmp_path, {3e-5: [0.5, 0.6, 0.7]}, models=("par_1", "bert"))
    write_report(tmp_path, tmp_path / "report")
    with (tmp_path / "report" / "squad.csv").open(newline="") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert (float(rows["bert"]["f1"]), float(rows["bert"]["exact_match"])) == (60, 50)
    sources = [rows[name]["source"] for name in ("bert", "first sentence", "DistilBERT (paper)")]
    assert sources == ["ours", "baseline", "paper"]
    assert r"par\_1" in (tmp_path / "report" / "squad.tex").read_text()
    make_grid(tmp_path / "empty", {3e-5: [0.5]}, without=[RunKey("par", "SQuAD", 3e-5, 1)])
    with pytest.raises(UserError, match="no run has ended well yet, 0 failed.*lazyformer finetune"):
        write_report(tmp_path / "empty", tmp_path / "report")
