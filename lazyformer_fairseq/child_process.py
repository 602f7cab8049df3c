"""How processes that work for another one end, and hear of signals."""

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
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import NamedTuple, Optional

from lazyformer_fairseq.storage.in_place import own_file

HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # of Linux's prctl
STOPPED = 128 + signal.SIGINT  # exit code, as shells have it of a command that Ctrl-C ended


@contextmanager
def stoppable(said: str = "stopped; rerun to resume") -> Iterator[None]:
    """Ctrl-C and SIGTERM end the process in these words, with exit code 130; both are a KeyboardInterrupt within.

    A second SIGTERM does not disturb what follows.
    """

    def stop(number: int, frame: object) -> None:
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
    """A Ctrl-C meanwhile reaches this process afterwards, and processes started meanwhile not at all."""
    resource_tracker.ensure_running()  # else started below, and that lifts the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """In a new process: Ctrl-C is for the parent, which ends this process; and so does the parent's own death."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def watch() -> None:
        connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Ended(NamedTuple):
    """How a command ended: its exit code, and the signals by which this process was told to stop meanwhile."""

    code: int
    signals: tuple[int, ...] = ()


def run_to_its_end(command: Sequence[str]) -> Ended:
    """Runs a command, to which it hands Ctrl-C, SIGTERM and SIGUSR1 on: a training then saves and ends.

    Where this process is killed, the command gets SIGTERM (on Linux; elsewhere it goes on by itself).
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
    else:
        libc = None
    end_too = libc and (lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM))
    with (
        _Signals() as signals,
        subprocess.Popen(command, process_group=0, preexec_fn=end_too) as process,
    ):
        signals.hand_on_to(process)
        process.wait()
    return Ended(process.returncode, tuple(signals.heard))


class _Signals:
    """Hands signals on to a process of a group of its own: from a terminal it would hear Ctrl-C twice."""

    def __enter__(self) -> "_Signals":
        self.heard: list[int] = []
        self._process: Optional[subprocess.Popen] = None
        self._before = {number: signal.signal(number, self._hear) for number in HANDED_ON}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hand_on_to(self, process: subprocess.Popen) -> None:
        self._process = process
        for number in self.heard:
            process.send_signal(number)

    def _hear(self, number: int, frame: object) -> None:
        self.heard.append(number)
        if self._process is not None:
            self._process.send_signal(number)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Appends to the file all that this process logs or prints meanwhile, exceptions and code outside Python too."""
    root = logging.getLogger()
    before = (root.handlers, root.level)
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
            root.handlers, root.level = before
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
