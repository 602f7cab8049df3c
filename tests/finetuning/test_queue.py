"""The queue: order, retries, what is kept, what is left alone; and runs in processes of their own."""

import json
import os
from unittest.mock import Mock

import fairseq_cli.train
import pytest
import torch
from glue_grids import glue_grid
from squad_grids import START

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.grid import Grid
from lazyformer_fairseq.finetuning.one_run import fine_tune
from lazyformer_fairseq.finetuning.queue import Cluster, RunQueue, Workers, epochs_done
from lazyformer_fairseq.storage.run_lock import run_lock


@pytest.fixture
def grid(prepared, tmp_path):
    def build(*tasks: str, output="out", lrs=(1e-3,), seeds=(1, 2), epochs=1, **more) -> Grid:
        return glue_grid(tmp_path / output, START, prepared, tasks, epochs, lrs=lrs, seeds=seeds, **more)

    return build


def over(message: str | None) -> Mock:
    """A job that has ended, badly where there is a message."""
    return Mock(is_over=lambda: True, failure=lambda: message)


class FakeExecutor:
    """Runs are over at once. Their score is their seed's, or `scores` says; a run whose folder is in `broken` fails."""

    look_every = 0.01

    def __init__(self, broken=(), times=99, places=2):
        self.broken, self.times, self.free = set(broken), times, places
        self.scores: dict[str, float] = {}
        self.started: list[str] = []

    def start(self, runs):
        assert len(runs) <= self.free
        return [self._start(run) for (run,) in runs]

    def _start(self, run):
        name = f"{run.task.name}/{run.folder.name}"
        before = self.started.count(name)
        self.started.append(name)
        run.folder.mkdir(parents=True, exist_ok=True)
        if name in self.broken and before < self.times:
            (run.folder / "train.log").write_text("ValueError: no luck\n")
            return over("exit code 1")
        (run.folder / "checkpoint_best.pt").touch()
        metrics = {"dev": {run.task.selecting_metric: self.scores.get(name, run.seed / 10)}}
        result = {"settings": run.settings, "selected_by": run.task.selecting_metric, "best_epoch": 1, "seconds": 1}
        (run.folder / "result.json").write_text(json.dumps({**result, "metrics": metrics, "baseline": metrics}))
        return over(None)

    def release(self, job=None):
        pass

    stop = release


def kept(grid: Grid) -> list[str]:
    return sorted(f"{run.task.name} {run.seed}" for run in grid.runs if (run.folder / "checkpoint_best.pt").exists())


@pytest.mark.parametrize(("keep", "expected"), [("none", ""), ("best", "3"), ("all", "123")])
def test_every_run_once_and_the_checkpoints_asked_for(grid, keep, expected):
    one, executor = grid("CoLA", "RTE", seeds=(1, 2, 3)), FakeExecutor()
    RunQueue(one, executor, keep).run()
    assert len(set(executor.started)) == len(executor.started) == 6
    assert kept(one) == [f"{task} {seed}" for task in ("CoLA", "RTE") for seed in expected]
    again = FakeExecutor()
    queue = RunQueue(grid("CoLA", "RTE", seeds=(1, 2, 3, 4)), again, keep)
    queue.run()
    assert sorted(again.started) == ["CoLA/lr0.001_seed4", "RTE/lr0.001_seed4"]
    assert len(queue.results) == 8


def test_most_work_first_and_a_failed_run_is_tried_twice(grid):
    executor = FakeExecutor(broken=["CoLA/lr0.001_seed1", "RTE/lr0.001_seed2"], times=1, places=1)
    queue = RunQueue(grid("CoLA", "RTE"), executor)
    queue.run()
    assert not queue.failed and len(executor.started) == 6
    assert list(dict.fromkeys(name.split("/")[0] for name in executor.started)) == ["RTE", "CoLA"]

    other = grid("CoLA", "RTE", output="other")
    executor = FakeExecutor(broken=["CoLA/lr0.001_seed1"])
    queue = RunQueue(other, executor)
    queue.run()
    assert len(executor.started) == 5, "the others go on"
    ((run, message),) = queue.failed.items()
    assert message == "exit code 1: ValueError: no luck"
    failed = json.loads((run.folder / "failed.json").read_text())
    assert failed == {"attempts": 2, "message": message, "log": str(run.folder / "train.log")}
    RunQueue(other, FakeExecutor()).run()
    assert not (run.folder / "failed.json").exists() and (run.folder / "result.json").exists()


def test_a_score_that_is_no_number_is_never_the_best(grid):
    one, executor = grid("CoLA", seeds=(1, 2)), FakeExecutor(places=1)
    executor.scores["CoLA/lr0.001_seed2"] = float("nan")
    RunQueue(one, executor).run()
    assert kept(one) == ["CoLA 1"]


def test_two_queues_on_a_folder_are_refused(grid):
    at_work = pytest.raises(UserError, match=rf"at work there \(process {os.getpid()} on")
    with run_lock(grid("CoLA").output / "runs"), at_work:
        RunQueue(grid("CoLA"), FakeExecutor()).run()
    RunQueue(grid("CoLA"), FakeExecutor()).run()


def test_progress_is_read_from_the_log(tmp_path):
    log = tmp_path / "train.log"
    assert epochs_done(log) == 0
    log.write_text("=== fairseq-train x\nINFO | train_inner | epoch 003:    100 / 400 loss=1, ppl=2\n")
    assert epochs_done(log) == 2.25
    log.write_text(log.read_text() + "INFO | valid | epoch 003 | valid on 'valid' subset | loss 1\n")
    assert epochs_done(log) == 3
    log.write_text(log.read_text() + "=== fairseq-train x\n")
    assert epochs_done(log) == 0


def results(grid: Grid) -> list[dict]:
    return [json.loads((run.folder / "result.json").read_text()) for run in grid.runs]


def test_a_process_gives_what_a_run_in_this_one_gives(grid):
    """Equal seeds give equal results, and a result has all that was asked for."""
    given = {"seeds": (1,), "max_train_rows": 32, "head": "linear"}
    one, here = grid("MNLI", "STS-B", **given), grid("STS-B", output="here", **given)
    queue = RunQueue(one, Workers(2, []))
    queue.run()
    assert not queue.failed, queue.failed
    fine_tune(here.runs[0])
    mnli, sts = results(one)
    (same,) = results(here)
    assert (sts["metrics"], sts["best_epoch"]) == (same["metrics"], same["best_epoch"])
    assert set(mnli["metrics"]) == set(mnli["baseline"]) == {"dev_matched", "dev_mismatched"}
    assert (mnli["train_rows"], mnli["max_train_rows"], mnli["rows_in_file"], mnli["updates"]) == (32, 32, 64, 30)
    assert (mnli["started_from"], mnli["head"], mnli["head_dropout"]) == (None, "linear", 0.1)
    assert sts["baseline"]["dev"][sts["selected_by"]] == 0
    assert 0 < sts["train_seconds"] < sts["seconds"] and sts["tokens_per_second"] > 0
    for run, result in zip(one.runs, (mnli, sts), strict=True):
        state = torch.load(run.folder / "checkpoint_best.pt")
        first = next(iter(result["metrics"].values()))
        assert state["extra_state"]["best"] == pytest.approx(first[result["selected_by"]], abs=1e-6)
        assert "last_optimizer_state" not in state and state["cfg"]["model"]["pooler_dropout"] == 0.1
        heads = [name for name in state["model"] if name.startswith("classification_heads")]
        assert heads == [f"classification_heads.{run.task.head_name}.out_proj.{part}" for part in ("weight", "bias")]
    assert (one.runs[0].folder / "tokenizer").is_dir()


def test_a_long_run_goes_on_from_its_last_epoch(grid, monkeypatch):
    """What a kill leaves: the last epoch's checkpoint, and maybe half of one."""
    monkeypatch.setattr("lazyformer_fairseq.finetuning.tasks.glue.Glue.rows_worth_resuming", 1)
    (one,) = grid("CoLA", seeds=(1,), epochs=3).runs
    (whole,) = grid("CoLA", output="whole", seeds=(1,), epochs=3).runs
    fine_tune(whole)

    original = fairseq_cli.train.validate_and_save

    def killed_in_the_third_epoch(cfg, trainer, task, epoch_itr, *rest):
        if epoch_itr.epoch == 3:
            raise KeyboardInterrupt
        return original(cfg, trainer, task, epoch_itr, *rest)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fairseq_cli.train, "validate_and_save", killed_in_the_third_epoch)
        fine_tune(one)
    before = (one.folder / "checkpoint_last.pt").read_bytes()
    assert one.result() is None
    fine_tune(one)
    assert "epoch 002 | valid" not in (one.folder / "train.log").read_text().rpartition("=== fairseq-train")[2]
    assert one.result()["metrics"] == whole.result()["metrics"]
    assert not (one.folder / "checkpoint_last.pt").exists()

    (one.folder / "result.json").unlink()
    (one.folder / "checkpoint_last.pt").write_bytes(before[:1000])
    fine_tune(one)
    assert "epoch 001 | valid" in (one.folder / "train.log").read_text().rpartition("=== fairseq-train")[2]
    assert one.result()["metrics"] == whole.result()["metrics"]


@pytest.mark.slow
def test_submitit(grid, tmp_path):
    pytest.importorskip("submitit")
    one = grid("CoLA", seeds=(1,), max_train_rows=32)
    queue = RunQueue(one, Cluster("local", tmp_path / "jobs", {"timeout_min": "3"}, at_once=2))
    queue.run()
    assert not queue.failed, queue.failed
    assert (results(one)[0]["train_rows"], results(one)[0]["rows_in_file"]) == (32, 64)
