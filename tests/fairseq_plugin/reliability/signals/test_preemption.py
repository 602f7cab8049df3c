"""SIGTERM and SIGUSR1 at all kinds of moments: the run saves, ends with exit code 75, and goes on from there."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fairseq_plugin.reliability.damage import TINY
from helpers import ROOT, train_words, updates_of

from lazyformer_fairseq.fairseq_plugin.reliability import checkpoints
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import EXIT_CODE, INTERRUPTED
from lazyformer_fairseq.fairseq_plugin.reliability.preemption import Preemption
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer


@pytest.fixture
def before(monkeypatch) -> Callable[..., None]:
    """``before(owner, name, action, times=1)``: what happens before a function does as ever, at its first calls."""

    def patch(owner, name: str, action: Callable[[], object], times: int = 1) -> None:
        function, calls = getattr(owner, name), []

        def replacement(*args, **kwargs):
            calls.append(None)
            if len(calls) <= times:
                action()
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, replacement)

    return patch


@pytest.fixture
def stopped_run(data_folder, tmp_path, fairseq_train) -> Callable[[str], Path]:
    """``stopped_run(options)``: the folder of a run that ends with the exit code of one that is to be resumed."""

    def run(options: str) -> Path:
        with pytest.raises(SystemExit) as ended:
            # It ends within the loop, so a checkpoint that the fixture looks for is not missed.
            fairseq_train(data_folder, f"{TINY} --max-update 9 {options}", tmp_path / "run")
        assert ended.value.code == EXIT_CODE
        return tmp_path / "run"

    return run


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_within_validation_the_checkpoint_comes_first_and_its_score_after(stopped_run, before):
    events = []
    before(SafeTrainer, "valid_step", lambda: signal.raise_signal(signal.SIGUSR1))
    before(SafeTrainer, "valid_step", lambda: events.append("batch"), times=1000)
    before(checkpoints, "save", lambda: events.append("save"), times=1000)
    folder = stopped_run("--save-interval-updates 4")
    assert events[:3] == ["batch", "save", "batch"]  # saved after the batch under way
    assert events[-1] == "save" and events.count("save") == 2  # all of the validation, then its checkpoint
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        assert updates_of(folder / name) == 4


@pytest.mark.slow
def test_while_a_checkpoint_is_written_it_is_written_and_one_update_later_the_run_ends(stopped_run, before):
    before(checkpoints, "save", terminate)
    folder = stopped_run("--save-interval-updates 4 --disable-validation")
    assert updates_of(folder / "checkpoint_1_4.pt") == 4 and updates_of(folder / "checkpoint_last.pt") == 5


def test_before_the_first_update_that_is_made_and_saved(stopped_run, before):
    before(SafeTrainer, "load_checkpoint", terminate)
    assert updates_of(stopped_run("") / "checkpoint_last.pt") == 1


@pytest.mark.parametrize("option", ["--no-save", "--no-last-checkpoints"])
def test_without_saving_it_ends_as_well_and_afterwards_signals_mean_what_they_did(stopped_run, before, caplog, option):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    before(SafeTrainer, "train_step", terminate)
    folder = stopped_run(option)
    assert "nothing is saved (--no-save or --no-last-checkpoints) at 1 updates" in caplog.text
    assert not list(folder.glob("*.pt"))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == handlers


def test_when_training_is_over_a_signal_means_what_it_did():
    class Finished:
        pass

    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("as before"))
    term = signal.getsignal(signal.SIGTERM)
    try:
        for _ in range(2):  # the second run in this process has the first one's handler before it
            trainer = Finished()
            trainer.itself = trainer
            Preemption(trainer).listen()
            del trainer
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.signal(signal.SIGTERM, term)
    assert heard == ["as before"]


@pytest.mark.slow
def test_a_disk_that_is_full_is_no_reason_to_say_75(data_folder, tmp_path, fairseq_train, before, monkeypatch):
    def full(state, path):
        raise OSError(28, "No space left on device")

    before(SafeTrainer, "train_step", terminate)
    monkeypatch.setattr(checkpoints, "save", full)
    with pytest.raises(Exception, match="No space left on device") as ended:
        fairseq_train(data_folder, f"{TINY} --max-update 9", tmp_path / "run")
    assert not isinstance(ended.value, SystemExit)


def words_of(data: Path, folder: Path) -> list[str]:
    """Of a run of two data workers, without an end."""
    return train_words(data, f"{TINY} --num-workers 2 --max-update 100000 --log-interval 1", folder / "run")


def command_of(entry: str, data: Path, folder: Path) -> list[str]:
    """The same run, as a way to start fairseq's training has it."""
    if entry == "python -m":
        return [sys.executable, "-m", "fairseq_cli.train", *words_of(data, folder)]
    program = str(Path(sys.executable).parent / entry)
    if entry == "fairseq-train":
        return [program, *words_of(data, folder)]
    return [
        *(program, "--config-dir", str(ROOT / "configs" / "pretraining"), "--config-name", "lazyformer_m2x6_s"),
        *(f"task.data={data}", f"checkpoint.save_dir={folder / 'run'}"),
        *"common.cpu=true common.fp16=false distributed_training.distributed_world_size=1".split(),
        *"dataset.num_workers=2 dataset.batch_size=4 optimization.update_freq=[1]".split(),
        *"task.tokens_per_sample=32 model.encoder_embed_dim=32 model.encoder_attention_heads=2".split(),
        *"model.encoder_ffn_embed_dim=64 common.log_interval=1 common.log_format=simple hydra.run.dir=.".split(),
        f"common.user_dir={ROOT / 'lazyformer_fairseq'}",
    ]


def stop_after_five(command: list[str], folder: Path, number: int, stop) -> tuple[str, int]:
    """Runs; calls `stop(process)` when five updates are in the log. Returns the output, and updates that were saved."""
    output = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, start_new_session=True
    ) as run:
        for line in run.stdout:
            output.append(line)
            if stop and re.search(r"num_updates['\"]?[=:] ?['\"]?5\b", line):
                stop(run)
                stop = None
    output = "".join(output)
    assert run.returncode == (INTERRUPTED if number == signal.SIGINT else EXIT_CODE), output[-3000:]
    assert "Traceback" not in output and f"{number.name}: saved at" in output
    return output, updates_of(folder / "run" / "checkpoint_last.pt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "number"),
    [
        ("python -m", signal.SIGTERM),
        ("python -m", signal.SIGUSR1),
        ("fairseq-train", signal.SIGTERM),
        ("fairseq-hydra-train", signal.SIGUSR1),
        ("fairseq-train", signal.SIGINT),
    ],
)
def test_a_signal_to_every_process_and_another_one(data_folder, tmp_path, entry, number, interruptible):
    def stop(run):
        for _ in range(1 if number == signal.SIGINT else 2):
            os.killpg(run.pid, number)  # the data workers get it too

    (tmp_path / "run").mkdir()
    output, saved = stop_after_five(command_of(entry, data_folder, tmp_path), tmp_path, number, stop)
    logged = [int(updates) for updates in re.findall(r"num_updates['\"]?[=:] ?['\"]?(\d+)", output)]
    assert saved == max(logged)  # no update came after it


TWO_GPUS = """
import torch
from fairseq_cli.train import cli_main

torch.cuda.device_count = lambda: 2  # for the process that starts the others; these see what is there
if __name__ == "__main__":
    cli_main()
"""
STUCK = """
import time

from fairseq.trainer import Trainer
from fairseq_cli.train import cli_main

def train_step(self, samples, raise_oom=False):
    print("an update without an end", flush=True)
    while True:
        time.sleep(0.1)

if __name__ == "__main__":
    Trainer.train_step = train_step
    cli_main()
"""


@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_at_once(data_folder, tmp_path, interruptible, warm_python):
    (tmp_path / "stuck.py").write_text(STUCK)
    command = [warm_python / "python", str(tmp_path / "stuck.py"), *words_of(data_folder, tmp_path)]
    output = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        for line in run.stdout:
            output.append(line)
            if "an update without an end" in line or "once more ends it at once" in line:
                run.send_signal(signal.SIGINT)
    assert run.returncode == -signal.SIGINT, "".join(output)[-3000:]  # shells call it 130
    assert not list((tmp_path / "run").glob("*.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_where_fairseq_starts_the_processes_a_signal_reaches_them(data_folder, tmp_path, number, interruptible):
    (tmp_path / "two_gpus.py").write_text(TWO_GPUS)
    world = "--distributed-world-size 2 --distributed-backend gloo --ddp-backend legacy_ddp".split()
    command = [sys.executable, str(tmp_path / "two_gpus.py"), *words_of(data_folder, tmp_path), *world]
    # A terminal's Ctrl-C goes to all of them.
    send = os.killpg if number == signal.SIGINT else os.kill
    output, saved = stop_after_five(command, tmp_path, number, lambda run: send(run.pid, number))
    assert output.count("saved at") == 1 and saved >= 5
