"""A task that tests alone have (does a text say its first word again?) is fine-tuned and reported as any other."""

from pathlib import Path

import numpy as np
import pytest
from toy_squad import START

from lazyformer_fairseq.data.glue import DIAGNOSTICS, TaskDescription, made_splits
from lazyformer_fairseq.data.prepared_folder import EncodedExamples
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.benchmark import benchmark_of_grid, find_benchmark
from lazyformer_fairseq.finetuning.launch import grid_and_executor
from lazyformer_fairseq.finetuning.made import CONSTANT, Draws, MadeBenchmark, constant_answer, write_prepared
from lazyformer_fairseq.finetuning.one_run import fine_tune
from lazyformer_fairseq.finetuning.report import write_report
from lazyformer_fairseq.finetuning.settings import MODULES, GridSettings

WORDS = ("anna", "ben", "garden", "mirror", "river", "house")
DIAGNOSTICS["Repeats"] = TaskDescription("Repeats", made_splits(("text",)), ("accuracy",), ("no", "yes"))


def make_repeats(folder: Path, tokenizer_folder: Path, rows: int) -> None:
    """Writes a folder of `rows` texts of four words for each split."""
    tokenizer, draws, splits = load_tokenizer(tokenizer_folder), Draws(1), {}
    for split in ("train", "valid", "test"):
        words = draws.below(len(WORDS), 4 * rows).reshape(rows, 4)
        inputs = [np.array(tokenizer.build_input(" ".join(WORDS[word] for word in row)), np.int32) for row in words]
        splits[split] = EncodedExamples(inputs, (words[:, 1:] == words[:, :1]).any(1).astype(np.int64))
    rules = {CONSTANT: constant_answer(splits["train"].targets, splits["test"].targets)}
    folder.mkdir()
    write_prepared(folder, "Repeats", {"rows": rows}, tokenizer, splits, rules)


class Repeats(MadeBenchmark):
    name, key = "Repeats", "repeats"


BENCHMARK = Repeats()


def test_it_is_fine_tuned_and_reported_and_has_its_own_words_where_something_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setitem(MODULES, "repeats", __name__)
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
