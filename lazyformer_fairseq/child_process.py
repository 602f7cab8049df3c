"""Signal handling and clean shutdown for parent and child processes."""

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

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # from Linux's prctl.h
STOPPED = 128 + signal.SIGINT  # the exit code that shells report for a command ended by Ctrl-C


@contextmanager
def exit_on_interrupt(said: str = "stopped; rerun to resume") -> Iterator[None]:
    """Exit with code 130 and a message on Ctrl-C or SIGTERM, both of which raise KeyboardInterrupt in the body.

    A second SIGTERM is ignored so that it cannot interrupt the cleanup.

    Args:
        said: the message to print to standard error.
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
    """Defer Ctrl-C until the end of the body, and block it in processes started there."""
    resource_tracker.ensure_running()  # starting the tracker later would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Make this child process ignore Ctrl-C, and exit when its parent dies or terminates it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class CommandResult(NamedTuple):
    """The result of a command: its exit code, and the stop signals that this process received while it ran."""

    code: int
    signals: tuple[int, ...] = ()


def run_forwarding_signals(command: Sequence[str]) -> CommandResult:
    """Run a command and forward Ctrl-C, SIGTERM and SIGUSR1 to it, so that a training run can save before it exits.

    If this process is killed, the command receives SIGTERM (on Linux; elsewhere it keeps running). The command runs in
    its own process group; otherwise it would receive a Ctrl-C from the terminal twice.
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

    before = {number: signal.signal(number, hear) for number in FORWARDED_SIGNALS}
    try:
        process = subprocess.Popen(command, process_group=0, preexec_fn=end_too)  # noqa: PLW1509  (one system call)
        with process:
            for number in heard:  # signals received before the process existed
                process.send_signal(number)
            process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return CommandResult(process.returncode, tuple(heard))


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Append everything that this process logs or prints in the body to a file.

    This includes tracebacks and the output of native code.
    """
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
