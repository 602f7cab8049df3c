"""``train.log`` in ``--save-dir``: what a run logs, beside wherever else it goes, over all its starts.

``lazyformer curves`` reads it.
"""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Optional

LOG = "train.log"
FORMAT = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
TIME = "%Y-%m-%d %H:%M:%S"  # both as fairseq prints them
_handler: Optional[logging.FileHandler] = None


def log_to(folder: Path) -> None:
    """From here on this process appends what it logs to the folder's log; the folder of an earlier run is let go.

    Nothing is done where the output goes to that file already.
    """
    global _handler
    path = (folder / LOG).absolute()
    if _handler is not None:
        if _handler.baseFilename == str(path):
            return
        logging.getLogger().removeHandler(_handler)
        _handler.close()
        _handler = None
    if _is_output(path):
        return
    _handler = _LogFile(path, encoding="utf-8")
    _handler.setFormatter(logging.Formatter(FORMAT, TIME))
    logging.getLogger().addHandler(_handler)


class _LogFile(logging.FileHandler):
    """A full disk does not disturb the run: what it logs goes to its output too."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()


def _is_output(path: Path) -> bool:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                return True
    return False
