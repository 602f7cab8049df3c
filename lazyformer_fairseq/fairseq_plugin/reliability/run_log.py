"""The run log, ``train.log`` in ``--save-dir``, which every start of the run appends to."""

import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.replacements import PACKAGE
from lazyformer_fairseq.storage.atomic import OUT_OF_SPACE
from lazyformer_fairseq.storage.in_place import own_file

LOG = "train.log"
SCREEN = f"{PACKAGE}.fairseq_plugin.screen"  # the logger whose messages always appear on the screen
# The formats of fairseq's own output.
FORMAT = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
TIME = "%Y-%m-%d %H:%M:%S"


def log_to(folder: Path, log_seconds: float = 0) -> None:
    """Log this process's messages to the log file in a folder from now on, and close an earlier run's log.

    Nothing is appended if the process's output already goes to that file.

    Args:
        folder: the run's folder.
        log_seconds: unless this is 0, the screen now shows only warnings, metrics and the lines of ``screen.py``.

    Raises:
        UserError: the log cannot be written, or it is not a regular file.
    """
    path = (folder / LOG).absolute()
    root = logging.getLogger()
    _leave_to_log(log_seconds)
    for handler in [handler for handler in root.handlers if isinstance(handler, _LogFile)]:
        if handler.baseFilename == str(path):
            return
        root.removeHandler(handler)
        handler.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                return
    try:
        log = _LogFile(path, encoding="utf-8")
    except OSError as error:
        if error.errno in OUT_OF_SPACE:
            raise
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error
    log.setFormatter(logging.Formatter(FORMAT, TIME))
    root.addHandler(log)


def _leave_to_log(seconds: float) -> None:
    for handler in logging.getLogger().handlers:
        handler.removeFilter(_is_shown)  # may have been added by an earlier run in this process
        if seconds and not isinstance(handler, logging.FileHandler):
            handler.addFilter(_is_shown)
            handler.setFormatter(_Plain())


def _is_shown(record: logging.LogRecord) -> bool:
    is_validation = record.module == "progress_bar" and record.name not in ("train", "train_inner")
    is_end = record.getMessage().startswith("done training")
    return record.levelno >= logging.WARNING or record.name == SCREEN or is_validation or is_end


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        if record.levelno >= logging.WARNING:
            return f"{record.levelname.lower()}: {message}"
        return message


class _LogFile(logging.FileHandler):
    """A log file that ignores errors such as a full disk, because the same messages also go to the output."""

    def _open(self) -> TextIO:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=own_file)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Ignore the error."""

    def close(self) -> None:
        """Close the file, ignoring errors such as a full disk."""
        with suppress(OSError):
            super().close()
