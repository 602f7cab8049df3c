"""Which runs a grid has, the command of each, what is refused before anything trains; and the queue that runs them."""

import errno
import functools
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Optional
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from glue_results import write_result
from helpers import ROOT, load_script, toy_texts, train_tokenizer
from hydra import compose, initialize_config_dir
from toy_squad import START

from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.interface import Call, Executor, JobResult
from lazyformer_fairseq.executors.local import Local
from lazyformer_fairseq.executors.options import ExecutorOptions, choose_executor, choose_gpus
from lazyformer_fairseq.executors.slurm import Slurm
from lazyformer_fairseq.finetuning import commands, training
from lazyformer_fairseq.finetuning.benchmark import head_settings
from lazyformer_fairseq.finetuning.grid import Grid, Run, load_start_models, name_checkpoints
from lazyformer_fairseq.finetuning.launch import choose_epochs, grid_and_executor
from lazyformer_fairseq.finetuning.paper_numbers import PAPER_TASKS, PROTOCOLS
from lazyformer_fairseq.finetuning.queue import RunQueue
from lazyformer_fairseq.finetuning.results import RunKey, development_splits
from lazyformer_fairseq.finetuning.settings import GridSettings
from lazyformer_fairseq.finetuning.tasks.glue import BENCHMARK as GLUE
from lazyformer_fairseq.finetuning.training import fine_tune, optimization_of
from lazyformer_fairseq.storage.in_place import last_line
from lazyformer_fairseq.storage.run_lock import run_lock
from lazyformer_fairseq.training.loop import TrainingLoop
from lazyformer_fairseq.training.run_record import read_metrics, read_run


@pytest.fixture
def grid(prepared, tmp_path):
    """``grid("CoLA", "RTE", lrs=...)``: a grid of one model."""

    def build(*tasks: str, output="out", lrs=(2e-5, 3e-5), seeds=(1, 2), epochs=10, **more) -> Grid:
        models = load_start_models({"m": START}, prepared[tasks[0]].tokenizer_folder)
        given = {"batch_size": 32, "warmup_ratio": 0.06, "lrs": lrs, "seeds": seeds, "models": models, **more}
        given |= {"extra": head_settings(given.pop("head", None)), "tasks": {name: prepared[name] for name in tasks}}
        return Grid(benchmark=GLUE, output=tmp_path / output, epochs=dict.fromkeys(tasks, epochs), **given)

    return build


def test_every_combination_is_a_run_and_the_grid_on_disk_grows(grid, tmp_path):
    runs = grid("CoLA", "RTE").runs
    assert len({run.folder for run in runs}) == len(runs) == 8
    assert runs[0].folder.parts[-4:] == ("runs", "m", "CoLA", "lr2e-05_seed1")
    assert len({json.dumps(run.settings) for run in runs}) == 8
    grid("CoLA", lrs=(2e-5,)).write()
    grid("RTE", lrs=(3e-5,), seeds=(2, 3), epochs=5).write()
    found = json.loads((tmp_path / "out" / "runs" / "grid.json").read_text())
    assert (list(found["models"]), found["tasks"]) == (["m"], ["CoLA", "RTE"])
    assert (found["lrs"], found["seeds"], found["epochs"]) == ([2e-5, 3e-5], [1, 2, 3], {"CoLA": 10, "RTE": 5})


@pytest.mark.filterwarnings(r"ignore:\s*'\S+' is validated against ConfigStore schema")
def test_a_run_is_table_5_as_the_yaml_has_it(grid):
    run = grid("MNLI", lrs=(4e-5,), max_train_rows=50).runs[0]
    optimization = optimization_of(run, "cpu")
    objective = GLUE.objective(run)
    with initialize_config_dir(str(ROOT / "configs" / "finetuning"), version_base="1.1"):
        yaml = compose("mnli")
    assert (optimization.rate, run.epochs, run.updates) == (4e-5, yaml.optimization.max_epoch, 20)
    assert optimization.clip_norm == yaml.optimization.clip_norm
    assert optimization.optimizer == yaml.optimizer._name
    for name, value in optimization.optimizer_options.items():
        assert value == yaml.optimizer[name] or eval(value) == eval(yaml.optimizer[name]), name
    assert optimization.schedule == yaml.lr_scheduler._name
    assert optimization.schedule_options == {"warmup_ratio": yaml.lr_scheduler.warmup_ratio}
    assert objective.batch_size == yaml.dataset.batch_size
    assert development_splits(run.task) == yaml.dataset.valid_subset.split(",")
    assert run.task.selecting_metric == yaml.checkpoint.best_checkpoint_metric
    model = objective.network.options
    assert (model.dropout, model.sublayer_pattern, model.max_positions) == (0.1, "M2x2", 64)
    assert (objective.max_train_rows, objective.begins_with, objective.longest) == (50, START, 64)
    short, long = (grid("CoLA", epochs=epochs).runs[0].is_worth_resuming for epochs in (10, 10_000))
    assert long and not short


def test_a_head_is_what_was_asked_for(grid):
    def settings_of(head) -> tuple[str, float]:
        objective = GLUE.objective(grid("CoLA", head=head).runs[0])
        return objective.head_type, objective.network.options.pooler_dropout

    assert settings_of(None) == settings_of("dense") == ("dense", 0.0)
    assert settings_of("dense:0.1") == ("dense", 0.1)
    assert settings_of("linear") == ("linear", 0.1)
    assert settings_of("linear:0") == ("linear", 0.0)
    for text in ("lineal", "dense:1.0", "dense:x"):
        with pytest.raises(UserError, match=f"--glue-head {text}: must be dense or linear"):
            settings_of(text)


def test_batches_in_a_row_have_no_padding_to_time(prepared, monkeypatch, capsys):
    words = ["time", prepared["CoLA"].folder, START, "--updates", "1"]
    monkeypatch.setattr("sys.argv", list(map(str, words)))
    load_script(ROOT / "scripts" / "time_glue_batches.py").main()
    rows = [line.split()[-4:] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [padding == "0.0%" for _, padding, _, _ in rows] == [False, True, False, True]
    assert [float(share) for *_, share in rows[::2]] == [1, 1]


def test_pars_protocol_is_that_of_its_table_4(prepared, tmp_path, monkeypatch):
    """Of `lazyformer finetune --protocol par`: NVIDIA's run_glue.sh, five runs. Toy tasks stand for SST-2 and MRPC."""

    def settings_of(*words: str) -> tuple:
        command = [str(START), "--output", str(tmp_path / "out"), "--gpus", "none"]
        command += ["--data", str(prepared["CoLA"].folder.parent), "--tasks", "CoLA", *words]
        monkeypatch.setattr(commands, "run_grid", lambda task, settings: seen.append(settings))
        seen: list[GridSettings] = []
        commands.finetune(command, standalone_mode=False)
        runs = grid_and_executor(GLUE, *seen)[0].runs
        assert runs[0].grid.no_padding == ("--no-padding" in words)
        return len(runs), runs[0].lr, runs[0].epochs, runs[0].grid.batch_size, runs[0].grid.warmup_ratio

    assert settings_of("--protocol", "par") == (5, 2.4e-5, 3, 128, 0.1)
    assert settings_of("--protocol", "par", "--batch-size", "16", "--warmup-ratio", "0") == (5, 2.4e-5, 3, 16, 0.0)
    assert settings_of("--epochs", "2", "--no-padding") == (20, 2e-5, 2, 32, 0.06)
    assert PROTOCOLS["par"].tasks == ("SST-2", "MRPC")


def test_what_decides_a_result_must_match_it(grid):
    run = grid("CoLA").runs[0]
    run.folder.mkdir(parents=True)
    write_run(run, 0.5, run.settings)
    assert run.result().settings == run.settings
    with pytest.raises(UserError, match="result of a different run \\(epochs is 10 there, 3 here\\)"):
        grid("CoLA", epochs=3).runs[0].result()
    older = {name: value for name, value in run.settings.items() if not name.startswith("head")}
    write_run(run, 0.5, older)
    assert run.result().settings == older
    with pytest.raises(UserError, match="result of a different run \\(head is None there, 'linear' here"):
        grid("CoLA", head="linear:0.1").runs[0].result()
    with pytest.raises(UserError, match="result of a different run .*no_padding is None there, True here"):
        grid("CoLA", no_padding=True).runs[0].result()
    run.refuse_other_settings()
    grid("CoLA", lrs=(5e-5,), seeds=(7,)).runs[0].refuse_other_settings()
    with pytest.raises(UserError, match=" has different settings from the grid .precision is 'fp32' there, 'bf16'"):
        grid("CoLA", lrs=(5e-5,), seeds=(7,), precision="bf16").runs[0].refuse_other_settings()
    (run.folder / "result.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        run.result()


def test_a_model_is_described_and_options_younger_than_it_have_their_defaults(tmp_path):
    checkpoints = name_checkpoints([str(START)])
    assert checkpoints == name_checkpoints([str(START.parent)]) == {"m2x2": START}
    folder = tmp_path / "lr=1e-4" / "m"
    folder.mkdir(parents=True)
    shutil.copy(START, folder)
    of_folder = {"m": folder / START.name}
    assert name_checkpoints([str(folder)]) == name_checkpoints([f"m={folder}"]) == of_folder, "= stands in the path"
    (model,) = load_start_models(checkpoints, START.parent / "tokenizer")
    assert (model.name, model.updates, model.options.max_positions) == ("m2x2", 30, 64)
    assert model.parameters > 10_000
    assert model.options.attention_backend == "auto"
    assert model.options.dropout == 0.1


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    def message(*given) -> str:
        with pytest.raises(UserError) as caught:
            load_start_models(name_checkpoints(map(str, given)), START.parent / "tokenizer")
        return str(caught.value)

    assert "no such file or folder; pass a checkpoint" in message(tmp_path / "nowhere.pt")
    assert f"{tmp_path} contains no checkpoint_best.pt or checkpoint_last.pt" in message(f"m={tmp_path}")
    assert "is also called m2x2" in message(START, START)
    assert "cannot be used as a folder name" in message(f"../m={START}")
    (tmp_path / "lr=1e-4").mkdir()
    shutil.copy(START, tmp_path / "lr=1e-4")
    assert f"'lr=1e-4' cannot be used as a folder name; name the model, as in m2x6={tmp_path}" in message(
        tmp_path / "lr=1e-4"
    )
    broken = tmp_path / "broken.pt"
    broken.write_bytes(START.read_bytes()[:1000])
    assert f"{broken}: truncated, damaged or not a checkpoint" in message(f"m={broken}")
    state = torch.load(START)
    torch.save({**state, "model": {}}, broken)
    assert "not a checkpoint from this package, because it contains no hash" in message(f"m={broken}")
    state["model"]["dictionary_sha256"] += 1
    torch.save(state, broken)
    assert "trained with a different dictionary than" in message(f"m={broken}")
    shutil.copy(START, broken)
    train_tokenizer(tmp_path / "tokenizer", toy_texts(60), 120, TextSettings())
    assert "the tokenizer beside this checkpoint has different settings" in message(f"m={broken}")


def test_tasks_epochs_and_executors(tmp_path, monkeypatch):
    assert GLUE.choose_tasks(()) == list(PAPER_TASKS)
    tasks = GLUE.choose_tasks(("mnli", "RTE"))
    assert choose_epochs(GLUE, tasks, 2, ()) == {"MNLI": 2, "RTE": 2}
    assert choose_epochs(GLUE, tasks, 10, ("MNLI=3",)) == {"MNLI": 3, "RTE": 10}
    assert choose_epochs(GLUE, tasks, 10, ("MNLI=3", "5")) == {"MNLI": 3, "RTE": 5}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_executor(ExecutorOptions(workers=3), tmp_path, "jobs").free == 3
    for make, words in (
        (lambda: GLUE.choose_tasks(("RTE", "rte")), "twice"),
        (lambda: GLUE.choose_tasks(("RTEE",)), "not a GLUE task"),
        (lambda: choose_epochs(GLUE, tasks, 10, ("MNLI",)), "--epochs"),
        (lambda: choose_epochs(GLUE, tasks, 10, ("MNLI=0",)), "--epochs"),
        (lambda: choose_gpus("0"), "nvidia-smi reports no GPU"),
        (lambda: ExecutorOptions(executor="slurm", slurm=("partition",)).slurm_parameters(), "must be NAME=VALUE"),
        (lambda: ExecutorOptions(slurm=("timeout_min=1",)).slurm_parameters(), "only to --executor slurm"),
        (lambda: choose_executor(ExecutorOptions(executor="slurm"), tmp_path, "jobs"), "no sbatch on this machine"),
    ):
        with pytest.raises(UserError, match=words):
            make()


def test_what_is_not_prepared_is_told(prepared, tmp_path):
    folder = prepared["CoLA"].folder.parent
    assert list(GLUE.load(folder, ["RTE", "CoLA"])) == ["RTE", "CoLA"]
    copy = shutil.copytree(folder, tmp_path / "tasks")
    (copy / "RTE" / "valid.bin").unlink()
    manifest = json.loads((copy / "CoLA" / "manifest.json").read_text())
    manifest["tokenizer"]["dict.txt"] = "0"
    (copy / "CoLA" / "manifest.json").write_text(json.dumps(manifest))
    for tasks, words in (
        ("QQP CoLA WNLI", "no prepared data for QQP, WNLI"),
        ("RTE", r"RTE/valid.\*: the data is damaged"),
        ("MNLI CoLA", "CoLA and MNLI were prepared with different tokenizers"),
    ):
        with pytest.raises(UserError, match=words):
            GLUE.load(copy, tasks.split())


# --- The queue: order, retries, what is kept, what is left alone; and runs in processes of their own


@pytest.fixture
def small(grid):
    """Grids of one rate, two seeds and one epoch where nothing else is said."""
    return functools.partial(grid, lrs=(1e-3,), epochs=1)


def write_run(run: Run, score: float, settings: Mapping[str, Any]) -> None:
    """Writes a result.json whose settings are these."""
    key = RunKey(run.model.name, run.task.name, run.lr, run.seed)
    write_result(run.grid.output, key, score, best_epoch=1, settings=settings)


class FakeExecutor(Executor):
    """Runs are over at once. Their score is their seed's, or `scores` says; a run whose folder is in `broken` fails."""

    def __init__(self, broken=(), times=99, places=2):
        self.broken, self.times, self.places = set(broken), times, places
        self.scores: dict[str, float] = {}
        self.started: list[str] = []
        self.ended: list[JobResult] = []

    @property
    def free(self) -> int:
        return self.places

    def start(self, calls: Sequence[Call]) -> None:
        assert len(calls) <= self.free
        self.ended += [JobResult(call, self._start(call.arguments[0])) for call in calls]

    def wait(self) -> list[JobResult]:
        ended, self.ended = self.ended, []
        return ended

    def stop(self) -> None:
        pass

    def _start(self, run: Run) -> Optional[Exception]:
        name = f"{run.task.name}/{run.folder.name}"
        before = self.started.count(name)
        self.started.append(name)
        run.folder.mkdir(parents=True, exist_ok=True)
        if name in self.broken and before < self.times:
            (run.folder / "train.log").write_text("ValueError: no luck\n")
            return RuntimeError("no luck")
        (run.folder / "checkpoint_best.pt").touch()
        write_run(run, self.scores.get(name, run.seed / 10), run.settings)
        return None


def kept(grid: Grid) -> list[str]:
    return sorted(f"{run.task.name} {run.seed}" for run in grid.runs if (run.folder / "checkpoint_best.pt").exists())


@pytest.mark.parametrize(("keep", "expected"), [("none", ""), ("best", "3"), ("all", "123")])
def test_every_run_once_and_the_checkpoints_asked_for(small, keep, expected):
    one, executor = small("CoLA", "RTE", seeds=(1, 2, 3)), FakeExecutor()
    RunQueue(one, executor, keep).run()
    assert len(set(executor.started)) == len(executor.started) == 6
    assert kept(one) == [f"{task} {seed}" for task in ("CoLA", "RTE") for seed in expected]
    again = FakeExecutor()
    queue = RunQueue(small("CoLA", "RTE", seeds=(1, 2, 3, 4)), again, keep)
    queue.run()
    assert sorted(again.started) == ["CoLA/lr0.001_seed4", "RTE/lr0.001_seed4"]
    assert len(queue.results) == 8


def test_most_work_first_and_a_failed_run_is_tried_twice(small):
    executor = FakeExecutor(broken=["CoLA/lr0.001_seed1", "RTE/lr0.001_seed2"], times=1, places=1)
    queue = RunQueue(small("CoLA", "RTE"), executor)
    queue.run()
    assert not queue.failed and len(executor.started) == 6
    assert list(dict.fromkeys(name.split("/")[0] for name in executor.started)) == ["RTE", "CoLA"]

    other = small("CoLA", "RTE", output="other")
    executor = FakeExecutor(broken=["CoLA/lr0.001_seed1"])
    queue = RunQueue(other, executor)
    queue.run()
    assert len(executor.started) == 5, "the others go on"
    ((run, message),) = queue.failed.items()
    assert message == "no luck"
    failed = json.loads((run.folder / "failed.json").read_text())
    assert failed == {"attempts": 2, "message": message, "log": str(run.folder / "train.log")}
    RunQueue(other, FakeExecutor()).run()
    assert not (run.folder / "failed.json").exists() and (run.folder / "result.json").exists()


def test_a_score_that_is_no_number_is_never_the_best(small):
    one, executor = small("CoLA", seeds=(1, 2)), FakeExecutor(places=1)
    executor.scores["CoLA/lr0.001_seed2"] = float("nan")
    RunQueue(one, executor).run()
    assert kept(one) == ["CoLA 1"]


def test_two_queues_on_a_folder_are_refused(small):
    at_work = pytest.raises(UserError, match=rf"another run is using this folder \(process {os.getpid()} on")
    with run_lock(small("CoLA").output / "runs"), at_work:
        RunQueue(small("CoLA"), FakeExecutor()).run()
    RunQueue(small("CoLA"), FakeExecutor()).run()


def results(grid: Grid) -> list[dict]:
    return [json.loads((run.folder / "result.json").read_text()) for run in grid.runs]


def test_a_process_gives_what_a_run_in_this_one_gives(small):
    """Equal seeds give equal results, and a result has all that was asked for."""
    given = {"seeds": (1,), "max_train_rows": 32, "head": "linear"}
    one, here = small("MNLI", "STS-B", **given), small("STS-B", output="here", **given)
    queue = RunQueue(one, Local(2))
    queue.run()
    assert not queue.failed, queue.failed
    fine_tune(here.runs[0])
    mnli, sts = results(one)
    (same,) = results(here)
    assert (sts["metrics"], sts["best_epoch"]) == (same["metrics"], same["best_epoch"])
    assert set(mnli["metrics"]) == set(mnli["baseline"]) == {"dev_matched", "dev_mismatched"}
    assert (mnli["train_rows"], mnli["settings"]["max_train_rows"], mnli["updates"]) == (32, 32, 30)
    assert (mnli["settings"]["head"], mnli["settings"]["head_dropout"]) == ("linear", 0.1)
    assert sts["baseline"]["dev"]["pearson"] == 0 and sts["seconds"] > 0
    for run, result in zip(one.runs, (mnli, sts), strict=True):
        state = torch.load(run.folder / "checkpoint_best.pt")
        first = next(iter(result["metrics"].values()))
        best = state["extra_state"]["history"]["epochs"][result["best_epoch"] - 1]
        assert next(iter(best["metrics"].values())) == first
        assert read_run(run.folder).trainer == run.settings
        assert read_metrics(run.folder)[-1].updates == run.updates
        assert "last_optimizer_state" not in state and state["cfg"]["model"]["pooler_dropout"] == 0.1
        heads = [name for name in state["model"] if name.startswith("classification_heads")]
        assert heads == [f"classification_heads.{run.task.head_name}.out_proj.{part}" for part in ("weight", "bias")]
    assert (one.runs[0].folder / "tokenizer").is_dir()


def test_a_long_run_goes_on_from_its_last_epoch(small, monkeypatch):
    """What a kill leaves: the last epoch's checkpoint, and maybe half of one."""
    monkeypatch.setattr("lazyformer_fairseq.finetuning.tasks.glue.Glue.rows_worth_resuming", 1)
    (one,) = small("CoLA", seeds=(1,), epochs=3).runs
    (whole,) = small("CoLA", output="whole", seeds=(1,), epochs=3).runs
    fine_tune(whole)

    original = TrainingLoop.evaluate

    def killed_in_the_third_epoch(loop, split):
        if loop.updates == 3 * one.updates // 3:
            raise KeyboardInterrupt
        return original(loop, split)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(TrainingLoop, "evaluate", killed_in_the_third_epoch)
        fine_tune(one)
    before = (one.folder / "checkpoint_last.pt").read_bytes()
    assert one.result() is None
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(training, "write_json", Mock(side_effect=KeyboardInterrupt))
        fine_tune(one)

    def epochs_trained() -> list[str]:
        return re.findall(r"epoch (\d) of 3", (one.folder / "train.log").read_text())

    assert epochs_trained() == ["1", "2", "3"]
    fine_tune(one)  # nothing is left to train, or all is trained again
    assert one.result().metrics == whole.result().metrics
    lines = read_metrics(one.folder, "valid")
    assert [line.epoch for line in lines] == [1, 2, 3]
    assert not (one.folder / "checkpoint_last.pt").exists()

    (one.folder / "result.json").unlink()
    (one.folder / "checkpoint_last.pt").write_bytes(before[:1000])
    fine_tune(one)
    assert epochs_trained()[-3:] == ["1", "2", "3"]
    assert one.result().metrics == whole.result().metrics


def test_a_full_disk_is_said_in_a_sentence_and_leaves_no_half_file(small):
    (run,) = small("CoLA", seeds=(1,)).runs
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = f"{run.folder}/checkpoint_best.pt: cannot be written (No space left on device); free up disk space and"
    with mock.patch("torch.save", side_effect=full), pytest.raises(UserError, match=re.escape(said)):
        fine_tune(run)
    assert said in last_line(run.folder / "train.log")
    assert not [path for path in run.folder.iterdir() if path.suffix == ".pt" or "unfinished" in path.name]
    assert run.result() is None
    fine_tune(run)
    assert run.result() is not None


@pytest.mark.slow
def test_submitit(small, tmp_path):
    pytest.importorskip("submitit")
    one = small("CoLA", seeds=(1,), max_train_rows=32)
    queue = RunQueue(one, Slurm("local", tmp_path / "jobs", {"timeout_min": "3"}, at_once=2))
    queue.run()
    assert not queue.failed, queue.failed
    assert results(one)[0]["train_rows"] == 32
