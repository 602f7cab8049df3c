"""The jobs of tests of executors: other processes import them from here."""

import os
import signal
import time
from pathlib import Path

from lazyformer_fairseq.errors import UserError


def write(path: Path) -> None:
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")


def wrong(path: Path) -> None:
    raise UserError(f"{path}, line 3: is not text")


def full(path: Path) -> None:
    raise OSError(28, os.strerror(28), str(path))


def odd(path: Path) -> None:
    raise StopIteration(path)


def die(path: Path, times: int) -> None:
    """Kill this process as often as asked, then write."""
    write(path)
    if len(path.read_text().splitlines()) <= times:
        os.kill(os.getpid(), signal.SIGKILL)


def linger(path: Path) -> None:
    write(path)
    time.sleep(600)
