"""SIGTERM and SIGUSR1 at all kinds of moments: the run saves, ends with exit code 75, and goes on from there."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import ROOT

from lazyformer_fairseq.fairseq_plugin.reliability import checkpoints
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import EXIT_CODE, INTERRUPTED
from lazyformer_fairseq.fairseq_plugin.reliability.preemption import Preemption
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4"
SHARED = (
    "--task full_sentences_masked_lm --tokens-per-sample 32 --cpu --optimizer fused_adam --lr-scheduler linear_warmup "
    "--lr 1e-3 --log-format simple --log-interval 1 --no-epoch-checkpoints"
)


def updates_in(checkpoint: Path) -> int:
    return torch.load(checkpoint)["optimizer_history"][-1]["num_updates"]


def calls(function, action, when=lambda trainer: True):
    """A function that does as `function`, and before that `action`, once, where it applies."""
    done = []

    def replacement(first, *args, **kwargs):
        if not done and when(first):
            done.append(True)
            action()
        return function(first, *args, **kwargs)

    return replacement


def test_within_validation_the_checkpoint_comes_first_and_its_score_after(data_folder, tmp_path, fairseq_train):
    events = []

    def noting(name, function):
        def replacement(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        return replacement

    stopped = calls(SafeTrainer.valid_step, lambda: signal.raise_signal(signal.SIGUSR1))
    with (
        mock.patch.object(SafeTrainer, "valid_step", noting("batch", stopped)),
        mock.patch.object(checkpoints, "save", noting("save", checkpoints.save)),
        pytest.raises(SystemExit) as ended,
    ):
        fairseq_train(data_folder, f"{TINY} --max-update 9 --save-interval-updates 4", tmp_path / "run")
    assert ended.value.code == EXIT_CODE
    assert events[:3] == ["batch", "save", "batch"]  # saved after the batch under way
    assert events[-1] == "save" and events.count("save") == 2  # all of the validation, then its checkpoint
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        assert updates_in(tmp_path / "run" / name) == 4


@pytest.mark.slow
def test_while_a_checkpoint_is_written_it_is_written_and_one_update_later_the_run_ends(
    data_folder, tmp_path, fairseq_train
):
    stop = calls(checkpoints.save, lambda: signal.raise_signal(signal.SIGTERM))
    with mock.patch.object(checkpoints, "save", stop), pytest.raises(SystemExit) as ended:
        fairseq_train(
            data_folder, f"{TINY} --max-update 9 --save-interval-updates 4 --disable-validation", tmp_path / "run"
        )
    assert ended.value.code == EXIT_CODE
    assert updates_in(tmp_path / "run" / "checkpoint_1_4.pt") == 4
    assert updates_in(tmp_path / "run" / "checkpoint_last.pt") == 5


def test_before_the_first_update_that_is_made_and_saved(data_folder, tmp_path, fairseq_train):
    stop = calls(SafeTrainer.load_checkpoint, lambda: signal.raise_signal(signal.SIGTERM))
    with mock.patch.object(SafeTrainer, "load_checkpoint", stop), pytest.raises(SystemExit):
        fairseq_train(data_folder, f"{TINY} --max-update 9", tmp_path / "run")
    assert updates_in(tmp_path / "run" / "checkpoint_last.pt") == 1


@pytest.mark.parametrize("option", ["--no-save", "--no-last-checkpoints"])
def test_without_saving_it_ends_as_well_and_afterwards_signals_mean_what_they_did(
    data_folder, tmp_path, fairseq_train, caplog, option
):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    stop = calls(SafeTrainer.train_step, lambda: signal.raise_signal(signal.SIGTERM))
    with mock.patch.object(SafeTrainer, "train_step", stop), pytest.raises(SystemExit) as ended:
        # It ends within the loop, so the checkpoint that the fixture looks for is not missed.
        fairseq_train(data_folder, f"{TINY} --max-update 9 {option}", tmp_path / "run")
    assert ended.value.code == EXIT_CODE
    assert "nothing is saved (--no-save or --no-last-checkpoints) at 1 updates" in caplog.text
    assert not list((tmp_path / "run").glob("*.pt"))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before


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
def test_a_disk_that_is_full_is_no_reason_to_say_75(data_folder, tmp_path, fairseq_train):
    def full(state, path):
        raise OSError(28, "No space left on device")

    stop = calls(SafeTrainer.train_step, lambda: signal.raise_signal(signal.SIGTERM))
    with (
        mock.patch.object(SafeTrainer, "train_step", stop),
        mock.patch.object(checkpoints, "save", full),
        pytest.raises(Exception, match="No space left on device") as ended,
    ):
        fairseq_train(data_folder, f"{TINY} --max-update 9", tmp_path / "run")
    assert not isinstance(ended.value, SystemExit)


def commands(data: Path, folder: Path) -> dict[str, list[str]]:
    """The ways to start fairseq's training, of two data workers, without an end."""
    options = f"{SHARED} {TINY} --num-workers 2 --max-update 100000 --save-dir {folder}"
    arguments = [str(data), "--user-dir", str(ROOT / "lazyformer_fairseq"), *options.split()]
    bin_folder = Path(sys.executable).parent
    return {
        "python -m": [sys.executable, "-m", "fairseq_cli.train", *arguments],
        "fairseq-train": [str(bin_folder / "fairseq-train"), *arguments],
        "fairseq-hydra-train": [
            *(str(bin_folder / "fairseq-hydra-train"), "--config-dir", str(ROOT / "configs" / "pretraining")),
            *("--config-name", "lazyformer_m2x6_s", f"task.data={data}", f"checkpoint.save_dir={folder}"),
            *"common.cpu=true common.fp16=false distributed_training.distributed_world_size=1".split(),
            *"dataset.num_workers=2 dataset.batch_size=4 optimization.update_freq=[1]".split(),
            *"task.tokens_per_sample=32 model.encoder_embed_dim=32 model.encoder_attention_heads=2".split(),
            *"model.encoder_ffn_embed_dim=64 common.log_interval=1 common.log_format=simple hydra.run.dir=.".split(),
            f"common.user_dir={ROOT / 'lazyformer_fairseq'}",
        ],
    }


def stop_after(updates: int, command: list[str], folder: Path, stop) -> tuple[int, str]:
    """Runs; calls `stop(process)` when so many updates are in the log. Returns the exit code and the whole output."""
    output = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, start_new_session=True
    ) as run:
        for line in run.stdout:
            output.append(line)
            if stop and re.search(rf"num_updates['\"]?[=:] ?['\"]?{updates}\b", line):
                stop(run)
                stop = None
    return run.returncode, "".join(output)


@pytest.mark.parametrize(
    ("entry", "number"),
    [
        pytest.param("python -m", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("python -m", signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("fairseq-train", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("fairseq-hydra-train", signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("fairseq-train", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_every_process_and_another_one(data_folder, tmp_path, entry, number, interruptible):
    def stop(run):
        os.killpg(run.pid, number)  # the data workers get it too
        if number != signal.SIGINT:
            os.killpg(run.pid, number)

    command = commands(data_folder, tmp_path / "run")[entry]
    (tmp_path / "run").mkdir()
    code, output = stop_after(5, command, tmp_path, stop)
    assert code == (INTERRUPTED if number == signal.SIGINT else EXIT_CODE), output[-3000:]
    assert "Traceback" not in output and f"{number.name}: saved at" in output
    saved = updates_in(tmp_path / "run" / "checkpoint_last.pt")
    logged = [int(updates) for updates in re.findall(r"num_updates['\"]?[=:] ?['\"]?(\d+)", output)]
    assert saved == max(logged)  # no update came after it


TWO_GPUS = """
import sys
import torch

torch.cuda.device_count = lambda: 2  # for the process that starts the others; these see what is there

if __name__ == "__main__":
    from fairseq_cli.train import cli_main

    cli_main()
"""


STUCK = """
import time

from fairseq.trainer import Trainer
from fairseq_cli.train import cli_main

if __name__ == "__main__":
    def train_step(self, samples, raise_oom=False):
        print("an update without an end", flush=True)
        while True:
            time.sleep(0.1)

    Trainer.train_step = train_step
    cli_main()
"""


@pytest.mark.slow
def test_a_second_ctrl_c_ends_it_at_once(data_folder, tmp_path, interruptible, warm_python):
    (tmp_path / "stuck.py").write_text(STUCK)
    _, _, _, *arguments = commands(data_folder, tmp_path / "run")["python -m"]
    with subprocess.Popen(
        [warm_python / "python", str(tmp_path / "stuck.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        output = []
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
    _, _, _, *arguments = commands(data_folder, tmp_path / "run")["python -m"]
    world = "--distributed-world-size 2 --distributed-backend gloo --ddp-backend legacy_ddp".split()
    command = [sys.executable, str(tmp_path / "two_gpus.py"), *arguments, *world]
    # A terminal's Ctrl-C goes to all of them.
    send = os.killpg if number == signal.SIGINT else os.kill
    code, output = stop_after(5, command, tmp_path, lambda run: send(run.pid, number))
    assert code == (INTERRUPTED if number == signal.SIGINT else EXIT_CODE), output[-3000:]
    assert "Traceback" not in output and output.count("saved at") == 1
    assert updates_in(tmp_path / "run" / "checkpoint_last.pt") >= 5
