"""SIGKILL at random moments of a run that saves all the time: what is there afterwards can always be gone on from."""

import collections
import ctypes
import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from fairseq import checkpoint_utils
from fairseq_cli.train import cli_main
from fairseq_plugin.reliability.damage import TINY, options
from helpers import train_words, updates_of

from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import choose
from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer
from lazyformer_fairseq.storage.atomic import UNFINISHED
from lazyformer_fairseq.storage.checkpoint_file import look_into

PHASES = ["before the first update", "training", "writing a file", "renaming", "between two names", "writing a copy"]
PHASES += ["after the last rename"]
WITHIN_A_SAVE = PHASES[2:6]  # between the opening of the first file and the last rename
PROCESSES = multiprocessing.get_context("spawn")  # a python of its own: a forkserver may have died among other tests


class Watch(ctypes.Structure):
    """What a run shares with the test at every moment, and what remains of it when it is killed.

    The number of its phase; saves that it began; updates made, with those of the runs before; updates of the checkpoint
    that the log last called saved; milliseconds from the opening of the first file to the last rename of the last save.
    """

    _fields_ = [(name, ctypes.c_int64) for name in ("phase", "saves", "updates", "reported", "milliseconds")]


@pytest.mark.parametrize(
    ("kills", "within"),
    [
        (2, 1),
        pytest.param(100, 60, marks=[pytest.mark.slow, pytest.mark.reliability, pytest.mark.timeout(3600)]),
    ],
)
def test_killed_at_random_moments(data_folder, tmp_path, record_counts, kills, within):
    folder, log, watch = tmp_path / "run", tmp_path / "log", PROCESSES.Value(Watch, lock=False)
    chance = random.Random(1)
    phases = collections.Counter()
    leftovers = 0
    words = train_words(
        data_folder,
        f"{TINY} --encoder-embed-dim 256 --batch-size 2 --lr 1e-4 --max-update 1000000 --save-interval-updates 2 "
        "--keep-interval-updates 2 --keep-last-epochs 1 --max-valid-steps 1 --log-interval 1000",
        folder,
    )
    words.remove("--no-epoch-checkpoints")

    def enough() -> bool:
        """How many kills that takes is up to the machine: where a kill falls nobody knows before."""
        seen = phases.total() >= kills and sum(phases[phase] for phase in WITHIN_A_SAVE) >= within
        return bool(seen and watch.reported and (phases["writing a file"] or phases["writing a copy"]))

    while not enough():
        with started(words, watch, log) as run:
            if chance.random() < 0.8:
                wait_for_saves(run, watch, chance.randrange(3) if watch.milliseconds else 1)
                time.sleep(chance.random() * watch.milliseconds / 1000)
            else:
                time.sleep(chance.random() * 2)
        assert run.exitcode == -signal.SIGKILL, log.read_text()[-3000:]
        phases[PHASES[watch.phase]] += 1
        leftovers += len(list(folder.glob(f"*{UNFINISHED}")))
        assert_good(folder, watch)

    unfinished = list(folder.glob(f"*{UNFINISHED}"))
    with started(words, watch, log) as run:
        wait_for_saves(run, watch, 0)
        assert not any(path.exists() for path in unfinished)
    record_counts(
        "checkpoint kills",
        kills=phases.total(),
        within_a_save=sum(phases[phase] for phase in WITHIN_A_SAVE),
        phases={phase: phases[phase] for phase in PHASES},
        unfinished_files_left=leftovers,
        lost=0,
        updates=watch.updates,
    )


@contextmanager
def started(words: list[str], watch: Watch, log: Path):
    """A process that has begun to train, killed at the end of the block."""
    process = PROCESSES.Process(target=train, args=(words, watch, log))
    watch.phase = watch.saves = 0
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def wait_for_saves(run, watch: Watch, finished: int) -> None:
    """Until the run begins to save, having saved so many times already."""
    while watch.saves <= finished:
        assert run.is_alive()
        time.sleep(0.0005)


def assert_good(folder: Path, watch: Watch) -> None:
    """Every file that has its name is intact and of the update that its name says; a run goes on from what it told."""
    found = choose(options(folder))
    for path in folder.glob("checkpoint*.pt"):
        updates = look_into(path).updates
        claimed = re.fullmatch(r"checkpoint_\d+_(\d+)\.pt", path.name)
        assert claimed is None or updates == int(claimed[1])
        assert updates <= watch.updates
    if found is None:
        assert watch.reported == 0, "a checkpoint was reported, and there is none"
    else:
        state = checkpoint_utils.load_checkpoint_to_cpu(str(found))
        assert watch.reported <= updates_of(state) <= watch.updates


def train(words: list[str], watch: Watch, log: Path) -> None:
    """Runs fairseq-train. To be the target of a process that nobody needs afterwards."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    began, is_last, train_step = 0.0, False, SafeTrainer.train_step

    def hear(event: str, arguments: tuple) -> None:
        """Python's audit events come before what they tell of; the code under test knows nothing of it."""
        nonlocal began, is_last
        # "x": it is made. What a killed process left is opened too, to be removed.
        if event == "open" and str(arguments[0]).endswith(UNFINISHED) and "x" in (arguments[1] or ""):
            if watch.phase <= PHASES.index("training"):
                began = time.monotonic()
                watch.saves += 1
                watch.phase = PHASES.index("writing a file")
            else:
                watch.phase = PHASES.index("writing a copy")
        elif event == "os.rename" and str(arguments[0]).endswith(UNFINISHED):
            watch.phase = PHASES.index("renaming")
            is_last = Path(arguments[1]).name == "checkpoint_last.pt"
        elif event == "open" and PHASES[watch.phase] == "renaming":  # the folder, to be synced
            watch.phase = PHASES.index("after the last rename" if is_last else "between two names")
            if is_last:
                watch.milliseconds = int(1000 * (time.monotonic() - began))

    def step(trainer, *args, **kwargs):
        watch.phase = PHASES.index("training")
        output = train_step(trainer, *args, **kwargs)
        # A run may start from checkpoint_last.pt although a file of a later update is complete beside it.
        watch.updates = max(watch.updates, trainer.get_num_updates())
        return output

    def report(record: logging.LogRecord) -> bool:
        if saved := re.match(r"Saved checkpoint .* @ (\d+) updates", record.getMessage()):
            watch.reported = int(saved[1])
        return True

    sys.addaudithook(hear)
    SafeTrainer.train_step = step
    logging.getLogger("fairseq.checkpoint_utils").addFilter(report)
    sys.argv = ["fairseq-train", *words]
    cli_main()
