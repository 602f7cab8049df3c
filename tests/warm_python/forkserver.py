"""multiprocessing's forkserver as a fork of this process, which has imported what is heavy, not as a new python."""

import gc
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, util

START = "from multiprocessing.forkserver import main"
spawn = util.spawnv_passfds


def fork_the_forkserver() -> None:
    """Have the server of this process forked once it is needed."""
    util.spawnv_passfds = start


def start(path: str, arguments: Sequence[str], files: Sequence[int]) -> int:
    """Start a python that multiprocessing asks for, with these open files beside the standard ones. Return its id."""
    code = arguments[-1]
    if not code.startswith(START):
        return spawn(path, arguments, files)
    if (pid := os.fork()) != 0:
        return pid
    try:
        # Garbage of the parent is never collected here: it may own file descriptors that are closed below, and closing
        # these once more would close what the server has opened under the same numbers since.
        gc.freeze()
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in {0, 1, 2, *files}:
                with suppress(OSError):  # the listing's own
                    os.close(int(name))
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        forkserver._forkserver._lock = threading.Lock()  # the parent holds its own
        exec(code, {})
    finally:
        os._exit(0)
