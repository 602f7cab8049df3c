"""A training run in a process of its own that says at every moment what it is doing, so that a kill knows its phase."""

import logging
import mmap
import os
import re
import struct
import sys
import time
from pathlib import Path

from fairseq_cli.train import cli_main

from lazyformer_fairseq.fairseq_plugin.trainer import SafeTrainer
from lazyformer_fairseq.storage.atomic import UNFINISHED

PHASES = (
    "before the first update",
    "training",
    "writing a file",
    "renaming",
    "between two names",
    "writing a copy",
    "after the last rename",
)
WITHIN_A_SAVE = PHASES[2:6]  # between the opening of the first file and the last rename
LAST_NAME = "checkpoint_last.pt"


class Watch:
    """What a process shares by a file, and what remains when it is killed.

    Attributes (all read and written at once, each a number):
        phase: into PHASES.
        saves: that were begun.
        updates: made, with those of the runs before.
        reported: updates of the checkpoint that the log last called saved.
        milliseconds: from the opening of the first file to the last rename, of the last save.
    """

    FIELDS = ("phase", "saves", "updates", "reported", "milliseconds")

    def __init__(self, path: Path):
        if not path.exists():
            path.write_bytes(bytes(8 * len(self.FIELDS)))
        with path.open("r+b") as file:
            super().__setattr__("memory", mmap.mmap(file.fileno(), 8 * len(self.FIELDS)))

    def __getattr__(self, name: str) -> int:
        return struct.unpack_from("<q", self.memory, 8 * self.FIELDS.index(name))[0]

    def __setattr__(self, name: str, value: int) -> None:
        struct.pack_into("<q", self.memory, 8 * self.FIELDS.index(name), value)


def train(command: list[str], watched: Path, log: Path) -> None:
    """Runs fairseq-train. To be the target of a process that nobody needs afterwards."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    watch = Watch(watched)
    _tell_of_files(watch)
    _tell_of_updates(watch)
    sys.argv = command
    cli_main()


def _tell_of_files(watch: Watch) -> None:
    """By Python's audit events, which come before what they tell of; the code under test knows nothing of it."""
    began = 0.0
    is_last = False

    def hear(event: str, arguments: tuple) -> None:
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
            is_last = Path(arguments[1]).name == LAST_NAME
        elif event == "open" and PHASES[watch.phase] == "renaming":  # the folder, to be synced
            watch.phase = PHASES.index("after the last rename" if is_last else "between two names")
            if is_last:
                watch.milliseconds = int(1000 * (time.monotonic() - began))

    sys.addaudithook(hear)


def _tell_of_updates(watch: Watch) -> None:
    train_step = SafeTrainer.train_step

    def step(trainer, *args, **kwargs):
        watch.phase = PHASES.index("training")
        output = train_step(trainer, *args, **kwargs)
        watch.updates = trainer.get_num_updates()
        return output

    SafeTrainer.train_step = step

    class Reports(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if saved := re.match(r"Saved checkpoint .* @ (\d+) updates", record.getMessage()):
                watch.reported = int(saved[1])

    logging.getLogger("fairseq.checkpoint_utils").addHandler(Reports())
