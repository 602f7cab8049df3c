"""How processes that work for another one end."""

import multiprocessing
import os
import signal
import threading
from multiprocessing import connection


def end_with_parent() -> None:
    """In a new process: Ctrl-C is for the parent, which ends this process; and so does the parent's own death."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
