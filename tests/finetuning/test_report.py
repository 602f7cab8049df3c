"""The report on made results: the paper's table where the grid is whole, and what is said where it is not."""

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from glue_results import write_failure, write_grid, write_result
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.finetuning import report as pictures
from lazyformer_fairseq.finetuning.benchmark import PAPER_ROWS, PAPER_TASKS, SCORES
from lazyformer_fairseq.finetuning.report import checkpoint_series, write_report
from lazyformer_fairseq.finetuning.results import RunKey, read_results
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK as GLUE
from lazyformer_fairseq.report.figures import styles

RATES, SEEDS = [2e-5, 5e-5], [1, 2, 3]
BERT = PAPER_ROWS[0].scores


def make_grid(folder: Path, models=("lazy",), tasks=PAPER_TASKS, rates=RATES, seeds=SEEDS, without=(), **more) -> Path:
    """Every run of a grid but those `without`: the median over seeds at the last rate is BERT's score in the paper."""
    write_grid(folder, dict.fromkeys(models, "checkpoint.pt"), list(tasks), rates, seeds)
    for key in itertools.starmap(RunKey, itertools.product(models, tasks, rates, seeds)):
        if key not in without:
            shift = 0.01 * (key.seed - seeds[len(seeds) // 2]) - 0.1 * (key.rate != rates[-1])
            scores = [BERT[score.name] for score in SCORES.values() if score.task == key.task] or [50.0]
            write_result(folder, key, tuple(score / 100 + shift for score in scores), baseline=0.4, **more)
    return folder


def cells(markdown: str, first: str) -> list[str]:
    """Of the first table row that begins with this."""
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_whole_grid_gives_the_paper_s_table(tmp_path):
    markdown = write_report(make_grid(tmp_path, updates=1_000_000), tmp_path / "report")
    row = cells(markdown, "lazy")
    assert row[1:] == cells(markdown, "BERT (paper)")[1:]
    assert row[1:] == "1,000,000 85.72/85.67 92.07 91.21 92.78 58.80 88.73 67.51 89.23 83.52".split()
    assert cells(markdown, "M2x6 (paper)")[-1] == "84.56"
    assert cells(markdown, "majority class or constant")[-1] == "40.00"
    assert "ncomplete" not in markdown


def test_each_score_stands_beside_its_spread_and_baseline(tmp_path):
    markdown = write_report(make_grid(tmp_path), tmp_path / "report")
    scores = markdown[markdown.index("## Each score") :]
    rte = next(line for line in scores.splitlines() if "| RTE " in line)
    for cell in ("accuracy", "67.51", "66.51 to 68.51", "3 of 3", "5e-05", "40.00", "65.03 to 69.99", "yes"):
        assert f" {cell} |" in rte
    others = markdown[markdown.index("## Other metrics") :]
    for task, metric in (("MRPC", "f1"), ("QQP", "f1"), ("STS-B", "spearman")):
        assert [line for line in others.splitlines() if f"| {task} " in line and f"| {metric} " in line]


@pytest.mark.parametrize("value", [0.4, 0.401])
def test_a_lower_bound_that_is_not_above_the_baseline_is_marked(tmp_path, value):
    write_grid(tmp_path, {"lazy": "c.pt"}, ["RTE"], [2e-5], [1, 2])
    for seed, score in ((1, value), (2, 0.4)):
        write_result(tmp_path, RunKey("lazy", "RTE", 2e-5, seed), score, baseline=0.4)
    markdown = write_report(tmp_path, tmp_path / "report")
    assert [line for line in markdown.splitlines() if "| RTE " in line][-1].endswith(" no |")


def test_one_run_less_and_there_is_no_average(tmp_path):
    lost = RunKey("lazy", "RTE", 2e-5, 3)
    markdown = write_report(make_grid(tmp_path, without=[lost]), tmp_path / "report")
    row = cells(markdown, "lazy")
    assert row[8] == "67.51*"
    assert row[-1] == "incomplete"
    assert "| lazy | RTE | 5 of 6 | 1: 2e-05 (3) | 0 |" in " ".join(markdown.split())


def test_failed_runs_and_numbers_that_are_none_are_counted_and_explained(tmp_path):
    failed, broken = RunKey("lazy", "RTE", 5e-5, 1), RunKey("lazy", "RTE", 5e-5, 2)
    make_grid(tmp_path, without=[failed])
    write_failure(tmp_path, failed, "out of memory")
    write_result(tmp_path, broken, float("nan"))
    markdown = write_report(tmp_path, tmp_path / "report")
    assert cells(markdown, "lazy")[-1] == "incomplete"
    assert "| lazy | RTE | 4 of 6 | 0 | 2: 5e-05 (1 2) |" in " ".join(markdown.split())
    assert "lr5e-05_seed1: out of memory" in markdown
    assert "lr5e-05_seed2: accuracy of dev is not a number" in markdown
    assert "nan" not in markdown


def test_tasks_that_were_not_asked_for_are_left_open(tmp_path):
    markdown = write_report(make_grid(tmp_path, tasks=["CoLA", "WNLI"], seeds=[1]), tmp_path / "report")
    row = cells(markdown, "lazy")
    assert row[2:] == ["-/-", "-", "-", "-", "58.80", "-", "-", "-", "incomplete"]
    assert "1 of 1" in markdown  # one seed has no bounds
    assert [line for line in markdown.splitlines() if "| WNLI " in line][-1].endswith(" - |")


def test_what_is_not_the_paper_s_protocol_is_said(tmp_path):
    tasks = ["MNLI", "RTE"]
    markdown = write_report(make_grid(tmp_path, tasks=tasks, epochs=3, started_from="MNLI"), tmp_path / "report")
    assert "The protocol has rates 2e-05, 3e-05, 4e-05, 5e-05 and 5 seeds" in markdown
    assert "Epochs: MNLI 3, RTE 3; the protocol has 10." in markdown
    assert "RTE: runs started from the MNLI checkpoint" in markdown
    assert "Hours of all runs (12) together: 0.12." in markdown
    assert "Training rows: MNLI 100 (the official file has 392,702), RTE 100 (the official file has 2,490)." in markdown


@pytest.mark.parametrize(
    ("in_file", "words"),
    [
        (640, "RTE 100 of 640 (the official file has 2,490)."),
        (2490, "RTE 100 of 2,490."),
        (None, "RTE 100 (the official file has 2,490)."),  # results of older versions
    ],
)
def test_training_rows_are_those_of_the_files_that_were_prepared(tmp_path, in_file, words):
    markdown = write_report(make_grid(tmp_path, tasks=["RTE"], rows_in_file=in_file), tmp_path / "report")
    assert f"Training rows: {words}" in markdown


def test_another_head_is_said(tmp_path):
    assert "Head: " not in write_report(make_grid(tmp_path / "one", tasks=["RTE"]), tmp_path / "report")
    markdown = write_report(make_grid(tmp_path / "two", tasks=["RTE"], head="linear", head_dropout=0.1), tmp_path / "b")
    assert "Head: linear with dropout 0.1; the default is dense." in markdown
    markdown = write_report(make_grid(tmp_path / "three", tasks=["RTE"], head=None, head_dropout=0.1), tmp_path / "c")
    assert "Head: dense with dropout 0.1; the default is dense." in markdown


def test_csv_and_latex_hold_the_same_numbers(tmp_path):
    lost = RunKey("lazy_2", "RTE", 2e-5, 3)
    make_grid(tmp_path, models=["lazy_1", "lazy_2"], without=[lost])
    write_report(tmp_path, tmp_path / "report")
    with (tmp_path / "report" / "glue.csv").open(newline="") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert float(rows["lazy_1"]["Avg."]) == pytest.approx(83.5244)
    assert (rows["lazy_2"]["Avg."], rows["lazy_2"]["incomplete"]) == ("", "RTE")
    assert rows["BERT (paper)"]["source"] == "paper"
    with (tmp_path / "report" / "glue_scores.csv").open(newline="") as file:
        (rte,) = [row for row in csv.DictReader(file) if (row["model"], row["task"]) == ("lazy_2", "RTE")]
    assert (float(rte["median"]), rte["rate"], rte["seeds"], rte["runs"]) == (67.51, "5e-05", "3", "5")
    latex = (tmp_path / "report" / "glue.tex").read_text()
    assert r"\toprule" in latex
    assert r"lazy\_1" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 4


def test_pictures_are_drawn(tmp_path):
    write_report(make_grid(tmp_path, models=["lazy", "bert"], without=[RunKey("bert", "RTE", 2e-5, 1)]), tmp_path / "r")
    with Image.open(tmp_path / "r" / "glue_seeds.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50
    assert not (tmp_path / "r" / "glue_updates.png").exists()


def axes_of(values: list[float], baseline: float) -> Axes:
    axis = Figure().subplots()
    pictures._draw_model(axis, 0, np.array(values), styles(["model"])["model"])
    pictures._draw_baseline(axis, baseline, np.array(values))
    return axis


def test_seeds_are_points():
    points = [52.71, 52.71, 53.07]
    axis = axes_of(points, 52.71)
    assert list(axis.lines[0].get_ydata()) == points
    assert np.ptp(axis.get_ylim()) > 1.99, "a third of a point does not fill the panel"


def test_checkpoints_of_one_model_make_a_series(tmp_path):
    models = {"bert": (9, "b"), "lazy_10": (10, "l"), "lazy_200": (200, "l"), "x": (1, "other"), "y": (2, "other")}
    write_grid(tmp_path, {name: "c.pt" for name in models}, ["RTE"], [2e-5], [1])
    for name, (updates, folder) in models.items():
        key = RunKey(name, "RTE", 2e-5, 1)
        write_result(tmp_path, key, 0.5, updates=updates, checkpoint=f"{folder}/checkpoint_{updates}.pt")
    assert checkpoint_series(read_results(tmp_path, GLUE)) == {
        "bert": [(9, "bert")],
        "lazy": [(10, "lazy_10"), (200, "lazy_200")],
        "other": [(1, "x"), (2, "y")],
    }
    write_report(tmp_path, tmp_path / "report")
    assert "](glue_updates.png)" in (tmp_path / "report" / "glue.md").read_text()
    assert (tmp_path / "report" / "glue_updates.png").stat().st_size > 10_000


def test_the_command_prints_the_table_and_where_it_is(tmp_path):
    done = CliRunner().invoke(main, ["evaluate", str(make_grid(tmp_path))], catch_exceptions=False)
    assert cells(done.output, "lazy")[-1] == "83.52"
    assert (tmp_path / "report" / "glue.md").read_text().partition("![")[0] in done.output
    assert str(tmp_path / "report") in done.output
