"""A task that tests alone have, `tests/repeats_task.py`, is fine-tuned and reported as any other: it costs one file."""

import pytest
from repeats_task import make_repeats
from toy_squad import START

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.benchmark import benchmark_of_grid, find_benchmark
from lazyformer_fairseq.finetuning.launch import grid_and_executor
from lazyformer_fairseq.finetuning.one_run import fine_tune
from lazyformer_fairseq.finetuning.report import write_report
from lazyformer_fairseq.finetuning.settings import MODULES, GridSettings


def test_it_is_fine_tuned_and_reported_and_has_its_own_words_where_something_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setitem(MODULES, "repeats", "repeats_task")
    make_repeats(tmp_path / "repeats", START.parent / "tokenizer", rows=24)
    repeats = find_benchmark("repeats")
    settings = GridSettings(
        checkpoints=(f"m={START}",), output=tmp_path / "out", data=tmp_path / "repeats", gpus="none",
        lrs=(1e-3,), seeds=(1,), epochs=("1",),
    )  # fmt: skip
    grid, _ = grid_and_executor(repeats, settings)
    grid.write()
    (run,) = grid.runs
    fine_tune(run)
    assert set(run.result()["metrics"]["valid"]) == {"accuracy"}
    assert benchmark_of_grid(tmp_path / "out") is repeats
    page = write_report(tmp_path / "out", tmp_path / "report")
    assert "## Repeats, development set, percent" in page and "| majority class or constant |" in page
    assert (tmp_path / "report" / "repeats_seeds.png").stat().st_size > 5_000
    with pytest.raises(UserError, match="--data: Repeats is made by `lazyformer diagnostics repeats`"):
        repeats.prepare(None)
    with pytest.raises(UserError, match="Repeats has no data without labels to predict"):
        repeats.predict({}, tmp_path, None)
