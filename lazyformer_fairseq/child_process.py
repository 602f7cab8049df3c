"""Signals and the end of processes that work for another one."""

import ctypes
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import NamedTuple, Optional

from lazyformer_fairseq.storage.in_place import own_file

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # of Linux's prctl
STOPPED = 128 + signal.SIGINT  # exit code, as shells have it of a command that Ctrl-C ended


@contextmanager
def stoppable(said: str = "stopped; rerun to resume") -> Iterator[None]:
    """End the process at Ctrl-C and SIGTERM in these words, with exit code 130; both are a KeyboardInterrupt within.

    A second SIGTERM does not disturb what follows.
    """

    def stop(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        print(said, file=sys.stderr)
        sys.exit(STOPPED)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Let a Ctrl-C meanwhile reach this process afterwards, and processes started meanwhile not at all."""
    resource_tracker.ensure_running()  # else started below, and that lifts the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Leave Ctrl-C to the parent, in a new process, which ends when the parent says so, or is no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Ended(NamedTuple):
    """The end of a command: its exit code, and the signals by which this process was told to stop meanwhile."""

    code: int
    signals: tuple[int, ...] = ()


def run_to_its_end(command: Sequence[str]) -> Ended:
    """Run a command, and hand Ctrl-C, SIGTERM and SIGUSR1 on to it: a training then saves and ends.

    Where this process is killed, the command gets SIGTERM (on Linux; elsewhere it goes on by itself). It has a process
    group of its own: from a terminal it would hear Ctrl-C twice.
    """
    end_too = None
    if sys.platform == "linux":
        end_too = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    process: Optional[subprocess.Popen] = None
    heard: list[int] = []

    def hear(number: int, _frame: object) -> None:
        heard.append(number)
        if process is not None:
            process.send_signal(number)

    before = {number: signal.signal(number, hear) for number in HANDED_ON}
    try:
        process = subprocess.Popen(command, process_group=0, preexec_fn=end_too)  # noqa: PLW1509  (one system call)
        with process:
            for number in heard:  # before it was there
                process.send_signal(number)
            process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return Ended(process.returncode, tuple(heard))


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Append to the file all that this process logs or prints meanwhile, exceptions and code outside Python too."""
    root = logging.getLogger()
    handlers = root.handlers
    level = root.level
    kept = (os.dup(1), os.dup(2))
    with open(path, "a", buffering=1, encoding="utf-8", opener=own_file) as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s"))
        root.handlers = [handler]
        root.setLevel(logging.INFO)
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            with redirect_stdout(file), redirect_stderr(file):
                try:
                    yield
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    raise
        finally:
            root.handlers = handlers
            root.setLevel(level)
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
