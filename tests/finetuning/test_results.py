"""Reading a grid's folder: what is chosen, what is missing, what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from glue_results import write_failure, write_grid, write_result

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.report import own_row
from lazyformer_fairseq.finetuning.results import RunKey, mean_bounds, read_results
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK as GLUE

FIRST = RunKey("lazy", "CoLA", 2e-5, 1)


@pytest.fixture
def grid(tmp_path) -> Path:
    """A grid of one model, two tasks, two rates, three seeds, without any run."""
    return write_grid(tmp_path, {"lazy": "lazy/checkpoint_last.pt"}, ["CoLA", "MNLI"], [2e-5, 5e-5], [1, 2, 3])


def fill(folder: Path, task: str, scores: dict[float, list], **more) -> None:
    for rate, values in scores.items():
        for seed, value in enumerate(values, start=1):
            write_result(folder, RunKey("lazy", task, rate, seed), value, **more)


def test_the_best_median_wins_not_the_best_run(grid):
    fill(grid, "CoLA", {2e-5: [0.1, 0.9, 0.2], 5e-5: [0.3, 0.4, 0.3]})
    cola = read_results(grid, GLUE).of("lazy", "CoLA")
    assert cola.rate == 5e-5 and cola.is_complete
    assert cola.values("valid", "matthews").tolist() == pytest.approx([30, 40, 30])
    assert [run.key for run in cola.best] == [RunKey("lazy", "CoLA", 2e-5, 2)]  # that is for predictions
    fill(grid, "CoLA", {2e-5: [0.1, 0.2, 0.3], 5e-5: [0.2, 0.2, 0.2]})
    assert read_results(grid, GLUE).of("lazy", "CoLA").rate == 2e-5, "of equal ones the first"


def test_the_matched_set_chooses_the_rate_for_the_mismatched_one(grid):
    fill(grid, "MNLI", {2e-5: [(0.5, 0.9)] * 3, 5e-5: [(0.6, 0.1)] * 3})
    results = read_results(grid, GLUE)
    assert results.of("lazy", "MNLI").values("valid1", "accuracy").tolist() == pytest.approx([10] * 3)
    row = own_row(results, GLUE, "lazy")
    assert row.scores == pytest.approx({"MNLI-m": 60, "MNLI-mm": 10}) and row.incomplete == {"CoLA"}


def test_missing_failed_and_broken_runs_are_told_apart_and_those_of_another_grid_left_out(grid):
    fill(grid, "CoLA", {2e-5: [0.1, float("nan")]})
    write_failure(grid, RunKey("lazy", "CoLA", 5e-5, 1), "out of memory")
    write_result(grid, RunKey("lazy", "CoLA", 2e-5, 4), 0.9)
    write_result(grid, RunKey("other", "CoLA", 2e-5, 1), 0.9)
    write_failure(grid, RunKey("lazy", "RTE", 2e-5, 1), "no")
    results = read_results(grid, GLUE)
    cola = results.of("lazy", "CoLA")
    assert list(results.runs) == [FIRST] == [run.key for run in cola.runs]
    assert cola.failed == [RunKey("lazy", "CoLA", 2e-5, 2), RunKey("lazy", "CoLA", 5e-5, 1)]
    assert len(cola.missing) == 3 and not cola.is_complete
    said = [said.partition(": ")[2] for said in results.failures.values()]
    assert said == ["matthews of dev is not a number", "out of memory"]


def test_bounds_are_student_s():
    assert mean_bounds(np.array([1.0, 2.0, 3.0])) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    assert mean_bounds(np.array([2.0, 2.0])) == (2.0, 2.0)
    assert mean_bounds(np.array([2.0])) is None


GRID = {"models": {}, "tasks": ["CoLA"], "lrs": [2e-5], "seeds": [1]}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        *(
            ("result.json", change, words)
            for change, words in (
                ({"format_version": 2}, "format version 2, but this program reads 1"),
                ({"format_version": None}, "format version None"),
                ({"lr": "2e-5"}, "field 'lr' is '2e-5', must be int or float"),
                ({"seed": True}, "field 'seed' is True, must be int"),
                ({"task": "COCA"}, "'COCA' is no GLUE task"),
                ({"metrics": [0.5]}, "field 'metrics' is [0.5], must be dict"),
                ({"metrics": {}}, "field 'metrics.dev' is None, must be dict"),
                ({"metrics": {"dev": {"accuracy": 1.0}}}, "field 'metrics.dev.matthews' is None"),
                ({"baseline": {"dev": {"accuracy": 1.0}}}, "field 'baseline.dev.matthews' is None"),
            )
        ),
        *(
            (name, content, words)
            for name in ("result.json", "failed.json", "grid.json")
            for content, words in (
                ('{"model": "lazy"', "cannot be read as JSON"),
                ("[]", "holds list, not an object"),
                ("\xff", "cannot be read as JSON"),
            )
        ),
        ("grid.json", json.dumps({**GRID, "lrs": ["a"]}), "field 'lrs' is 'a'"),
        ("grid.json", json.dumps({**GRID, "format_version": 2}), "format version 2"),
        ("grid.json", "{}", "has no field 'models'"),
        ("grid.json", None, "no such file"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(grid, name, content, words):
    """A mapping changes a good result."""
    result = write_result(grid, FIRST, 0.5)
    path = grid / "runs" / name if name == "grid.json" else result.with_name(name)
    if isinstance(content, dict):
        content = json.dumps({**json.loads(result.read_text()), **content})
    if name == "failed.json":
        result.unlink()
    path.unlink() if content is None else path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=re.escape(f"{path}: {words}")):
        read_results(grid, GLUE)


def test_a_result_of_another_run_or_on_another_development_set_is_refused(grid):
    path = write_result(grid, FIRST, 0.5)
    write_result(grid, RunKey("lazy", "CoLA", 2e-5, 2), 0.5, baseline=0.1)
    with pytest.raises(UserError, match="dev set is another than that of"):
        read_results(grid, GLUE)
    path.parent.rename(path.parent.with_name("lr2e-05_seed3"))
    with pytest.raises(UserError, match="is the result of lazy/CoLA/lr2e-05_seed1; move it there, or remove it"):
        read_results(grid, GLUE)
