"""Results of a grid's folder, read and refused; the report on made ones: the papers' tables, and what is said."""

import itertools
import json
import re
from pathlib import Path

import pytest
from glue_results import run_folder, write_failure, write_grid, write_result
from in_process import invoke
from PIL import Image

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.paper_numbers import PAPER_ROWS, PAPER_TASKS, SCORES
from lazyformer_fairseq.finetuning.report import model_row, write_report
from lazyformer_fairseq.finetuning.results import RunKey, read_results
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK as GLUE

RATES, SEEDS = [2e-5, 5e-5], [1, 2, 3]
BERT = PAPER_ROWS[0].scores


def make_grid(folder: Path, models=("lazy",), tasks=PAPER_TASKS, rates=RATES, seeds=SEEDS, without=(), **more) -> Path:
    """Every run of a grid but those `without`: the median over seeds at the last rate is BERT's score in the paper."""
    write_grid(folder, dict.fromkeys(models, "checkpoint.pt"), list(tasks), rates, seeds)
    for key in itertools.starmap(RunKey, itertools.product(models, tasks, rates, seeds)):
        if key not in without:
            shift = 0.01 * (key.seed - seeds[len(seeds) // 2]) - 0.1 * (key.rate != rates[-1])
            scores = [BERT[score.name] for score in SCORES if score.task == key.task] or [50.0]
            write_result(folder, key, tuple(score / 100 + shift for score in scores), baseline=0.4, **more)
    return folder


@pytest.fixture(autouse=True)
def figures_where_they_are_tested_alone(request, monkeypatch):
    """Drawing takes most of a report's time."""
    if "figure" not in request.node.name:
        monkeypatch.setattr("lazyformer_fairseq.finetuning.report.draw", lambda *_: None)


def report_of(folder: Path) -> str:
    return write_report(folder, folder / "report")


def cells(markdown: str, first: str) -> list[str]:
    """Of the first table row that begins with this."""
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_whole_grid_gives_the_paper_s_table_by_the_command(tmp_path):
    printed = invoke("report", make_grid(tmp_path, updates=1_000_000))
    markdown = (tmp_path / "report" / "glue.md").read_text()
    assert markdown.partition("![")[0] in printed and str(tmp_path / "report") in printed
    row = cells(markdown, "lazy")
    assert row[1:] == cells(markdown, "BERT (paper)")[1:]
    assert row[1:] == "1,000,000 85.72/85.67 92.07 91.21 92.78 58.80 88.73 67.51 89.23 83.52".split()
    averages = {row.name.removesuffix(" (paper)"): cells(markdown, row.name)[-1] for row in PAPER_ROWS}
    assert averages == {"BERT": "83.52", "M2x6-S": "83.69", "M2x6-SD": "83.52", "M2x6": "84.56", "M2x6 mid": "83.77"}
    assert cells(markdown, "majority class or constant")[-1] == "40.00"
    assert "*" not in markdown
    scores = markdown[markdown.index("## Each score") :]
    rte = next(line for line in scores.splitlines() if "| RTE " in line)
    for cell in ("accuracy", "67.51", "66.51 to 68.51", "3 of 3", "5e-05", "40.00", "65.03 to 69.99", "yes"):
        assert f" {cell} |" in rte
    for score, metric in (("MRPC", "f1"), ("QQP", "f1"), ("STS", "spearman")):
        assert [line for line in scores.splitlines() if f"| {score} " in line and f"| {metric} " in line]


@pytest.mark.parametrize("value", [0.4, 0.401])
def test_a_lower_bound_that_is_not_above_the_baseline_is_marked(tmp_path, value):
    write_grid(tmp_path, {"lazy": "c.pt"}, ["RTE"], [2e-5], [1, 2])
    for seed, score in ((1, value), (2, 0.4)):
        write_result(tmp_path, RunKey("lazy", "RTE", 2e-5, seed), score, baseline=0.4)
    assert cells(report_of(tmp_path), "lazy")[-1] == "no"


def test_runs_that_lack_failed_or_gave_no_number_are_listed_and_there_is_no_average(tmp_path):
    lost, failed, broken = (RunKey("lazy", "RTE", rate, seed) for rate, seed in ((2e-5, 3), (5e-5, 1), (5e-5, 2)))
    markdown = report_of(make_grid(tmp_path, without=[lost, failed]))
    assert (cells(markdown, "lazy")[8], cells(markdown, "lazy")[-1]) == ("68.01*", "-")
    assert (
        "* lazy on RTE: the score is provisional, because runs are missing (rate 2e-05 seed 3, rate 5e-05" in markdown
    )
    write_failure(tmp_path, failed, "out of memory")
    write_result(tmp_path, broken, float("nan"))
    markdown = report_of(tmp_path)
    assert "missing (rate 2e-05 seed 3) or failed (rate 5e-05 seed 1, rate 5e-05 seed 2)." in markdown
    assert "lr5e-05_seed1: out of memory" in markdown
    assert "lr5e-05_seed2: accuracy of dev is not a number" in markdown and "nan" not in markdown


def test_of_some_tasks_the_grid_s_numbers_stand_first_and_the_papers_table_has_these_alone(tmp_path):
    markdown = report_of(make_grid(tmp_path, tasks=["CoLA", "WNLI"], seeds=[1]))
    assert markdown.index("58.80 | 58.80 to 58.80") < markdown.index("(paper)")
    assert cells(markdown, "BERT (paper)") == ["BERT (paper)", "1,000,000", "58.80"]
    assert "Avg." not in markdown.split("development sets")[1].splitlines()[2]
    assert "1 of 1" in markdown  # one seed has no bounds
    assert [line for line in markdown.splitlines() if "| WNLI " in line][-1].endswith(" - |")


def test_settings_stand_beside_the_paper_s_protocol(tmp_path):
    settings = {"task": "RTE", "lr": 2e-5, "epochs": 3, "warmup_ratio": 0.0, "head": "linear", "max_train_rows": None}
    markdown = report_of(make_grid(tmp_path, tasks=["MNLI", "RTE"], settings=settings))
    rows = {
        "training rows": ["MNLI 100, RTE 100", "MNLI 392,702, RTE 2,490"],
        "lr": ["2e-05", "2e-05, 3e-05, 4e-05, 5e-05"],
        "epochs": ["3", "10"],
        "warmup ratio": ["0.0", "0.06"],
        "head": ["linear", "-"],
    }
    assert {name: cells(markdown, name)[1:] for name in rows} == rows
    assert "max train rows" not in markdown and "Total time of all 12 runs, in hours: 0.12." in markdown


def test_the_page_and_the_figure_hold_every_score(tmp_path):
    markdown = report_of(make_grid(tmp_path, models=["lazy_1", "lazy_2"], without=[RunKey("lazy_2", "RTE", 2e-5, 3)]))
    lines = markdown[markdown.index("## Each score") :].splitlines()
    (rte,) = [line for line in lines if line.startswith("| lazy_2 ") and " RTE " in line]
    for cell in ("67.51*", "5e-05", "3 of 3"):
        assert f" {cell} |" in rte
    with Image.open(tmp_path / "report" / "glue.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50


# --- SQuAD


def make_squad_grid(folder: Path, f1: list[float | None], models=("par",), train_rows=87_599) -> Path:
    """Runs of each model at one rate, one a seed, with these F1, None for one that lacks; exact match is 0.1 less."""
    write_grid(folder, dict.fromkeys(models, "c.pt"), ["SQuAD"], [3e-5], list(range(1, 1 + len(f1))))
    for model, (seed, value) in itertools.product(models, enumerate(f1, start=1)):
        if value is not None:
            result = {
                "format_version": 1,
                "model": model,
                "checkpoint": f"{model}/c.pt",
                "updates": 8601,
                "task": "SQuAD",
                "lr": 3e-5,
                "seed": seed,
                "epochs": 2,
                "train_rows": train_rows,
                "seconds": 60.0,
                "baseline": {"dev-v1.1": {"f1": 0.3, "exact_match": 0.02}},
                "metrics": {"dev-v1.1": {"f1": value, "exact_match": value - 0.1}},
            }
            path = run_folder(folder, RunKey(model, "SQuAD", 3e-5, seed)) / "result.json"
            path.write_text(json.dumps(result))
    return folder


def test_squad_s_scores_stand_beside_the_baseline_and_the_paper(tmp_path):
    markdown = report_of(make_squad_grid(tmp_path, [0.874, 0.871, 0.879, 0.86, 0.88], models=("par_1", "bert")))
    assert cells(markdown, "par_1") == ["par_1", "8,601", "87.40", "77.40"]
    assert cells(markdown, "PAR BERT Base (paper)")[2:] == ["87.40", "-"]
    assert cells(markdown, "sentence that shares the most words with the question")[2:] == ["30.00", "2.00"]
    row = next(line for line in markdown[markdown.index("## Each score") :].splitlines() if line.startswith("| par_1 "))
    for cell in ("86.00 to 88.00", "5 of 5", "3e-05", "30.00", "yes"):
        assert f" {cell} |" in row
    assert cells(markdown, "training rows")[1:] == ["SQuAD 87,599", "SQuAD 87,599"]


def test_a_missing_mark_is_counted_and_no_run_at_all_is_an_error(tmp_path):
    markdown = report_of(make_squad_grid(tmp_path, [0.5, None], train_rows=100))
    assert cells(markdown, "par")[2:] == ["50.00*", "40.00*"]
    assert "* par on SQuAD: the score is provisional, because runs are missing (rate 3e-05 seed 2)" in markdown
    assert cells(markdown, "training rows")[1:] == ["SQuAD 100", "SQuAD 87,599"]
    with pytest.raises(UserError, match="no run has succeeded yet and 0 failed.*lazyformer finetune"):
        report_of(make_squad_grid(tmp_path / "empty", [None]))


# --- Reading a grid's folder: what is chosen, what is missing, what is refused


FIRST = RunKey("lazy", "CoLA", 2e-5, 1)


@pytest.fixture
def asked(tmp_path) -> Path:
    """A grid of one model, two tasks, two rates, three seeds, without any run."""
    return write_grid(tmp_path, {"lazy": "lazy/checkpoint_last.pt"}, ["CoLA", "MNLI"], [2e-5, 5e-5], [1, 2, 3])


def fill(folder: Path, task: str, scores: dict[float, list], **more) -> None:
    for rate, values in scores.items():
        for seed, value in enumerate(values, start=1):
            write_result(folder, RunKey("lazy", task, rate, seed), value, **more)


def test_the_best_median_wins_not_the_best_run(asked):
    fill(asked, "CoLA", {2e-5: [0.1, 0.9, 0.2], 5e-5: [0.3, 0.4, 0.3]})
    cola = read_results(asked, GLUE).of("lazy", "CoLA")
    assert cola.rate == 5e-5 and cola.is_complete
    assert cola.values("valid", "matthews").tolist() == pytest.approx([30, 40, 30])
    assert [run.key for run in cola.best] == [RunKey("lazy", "CoLA", 2e-5, 2)]  # that is for predictions
    fill(asked, "CoLA", {2e-5: [0.1, 0.2, 0.3], 5e-5: [0.2, 0.2, 0.2]})
    assert read_results(asked, GLUE).of("lazy", "CoLA").rate == 2e-5, "of equal ones the first"


def test_the_matched_set_chooses_the_rate_for_the_mismatched_one(asked):
    fill(asked, "MNLI", {2e-5: [(0.5, 0.9)] * 3, 5e-5: [(0.6, 0.1)] * 3})
    results = read_results(asked, GLUE)
    assert results.of("lazy", "MNLI").values("valid1", "accuracy").tolist() == pytest.approx([10] * 3)
    assert model_row(results, GLUE, "lazy").scores == pytest.approx({"MNLI-m": 60, "MNLI-mm": 10})


GRID = {"models": {}, "tasks": ["CoLA"], "lrs": [2e-5], "seeds": [1]}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        *(
            ("result.json", change, words)
            for change, words in (
                ({"format_version": 2}, "format version 2 is not supported, only 1"),
                ({"lr": "2e-5"}, "field 'lr' is '2e-5', but must be a valid number"),
                ({"task": "COCA"}, "'COCA' is not a GLUE task"),
                ({"metrics": [0.5]}, "field 'metrics' is [0.5], but must be an object"),
                ({"metrics": {"dev": {"accuracy": 1.0}}}, "field 'metrics.dev.matthews' is missing"),
                ({"baseline": {"dev": {"accuracy": 1.0}}}, "field 'baseline.dev.matthews' is missing"),
            )
        ),
        *(
            (name, content, words)
            for name in ("result.json", "failed.json", "grid.json")
            for content, words in (
                ('{"model": "lazy"', "cannot be read as JSON"),
                ("[]", "found list, not an object"),
                ("\xff", "cannot be read as JSON"),
            )
        ),
        ("grid.json", json.dumps({**GRID, "lrs": ["a"]}), "field 'lrs.0' is 'a'"),
        ("grid.json", json.dumps({**GRID, "seeds": [2**70]}), "field 'seeds.0' is 1180591620717411303424"),
        ("grid.json", json.dumps({**GRID, "models": {"../out": "c"}}), "'../out' cannot be used as a folder name"),
        ("grid.json", json.dumps({**GRID, "format_version": 2}), "format version 2"),
        ("grid.json", "{}", "field 'models' is missing"),
        ("grid.json", None, "no such file"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(asked, name, content, words):
    """A mapping changes a good result."""
    result = write_result(asked, FIRST, 0.5)
    path = asked / "runs" / name if name == "grid.json" else result.with_name(name)
    if isinstance(content, dict):
        content = json.dumps({**json.loads(result.read_text()), **content})
    if name == "failed.json":
        result.unlink()
    path.unlink() if content is None else path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=f"{re.escape(str(path))}:? {re.escape(words)}"):
        read_results(asked, GLUE)


def test_a_result_of_another_run_or_on_another_development_set_is_refused(asked):
    path = write_result(asked, FIRST, 0.5)
    write_result(asked, RunKey("lazy", "CoLA", 2e-5, 2), 0.5, baseline=0.1)
    with pytest.raises(UserError, match="used different CoLA dev sets"):
        read_results(asked, GLUE)
    path.parent.rename(path.parent.with_name("lr2e-05_seed3"))
    with pytest.raises(UserError, match=" is the result of lazy/CoLA/lr2e-05_seed1; move the file there or remove it"):
        read_results(asked, GLUE)
