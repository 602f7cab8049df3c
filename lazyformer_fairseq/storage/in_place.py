"""Safely opens files that are written in place, such as locks and logs, in folders chosen by the user.

All other files are written under a hidden name and renamed (:mod:`.atomic`), which never modifies an existing file.
Opening a file for writing is less safe: its path may be a link to one of the user's files, which would be truncated or
appended to, or a pipe, in which case opening it would block.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Union

from lazyformer_fairseq.errors import UserError

TAIL = 16384  # bytes to read from the end of a log


def own_file(path: Union[str, Path], flags: int) -> int:
    """Open a file in place and return its descriptor; Python's ``open`` accepts this function as its `opener`.

    Raises:
        UserError: the path is a link, a pipe, a device, a folder, or a file with several hard links.
        OSError: the file cannot be opened.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no effect on regular files
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            refuse_foreign(path)
        raise
    try:
        _refuse(path, os.fstat(descriptor))
    except UserError:
        os.close(descriptor)
        raise
    return descriptor


def refuse_foreign(path: Union[str, Path]) -> None:
    """Raise the UserError that :func:`own_file` would raise, without opening the file."""
    try:
        _refuse(path, os.lstat(path))
    except OSError:  # the file does not exist, or opening it reports the problem
        return


def _refuse(path: Union[str, Path], found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise UserError(f"{path} is a link, and writing would change its target; remove the link")
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is not a regular file, but a file must be written there; remove or rename it")
    if found.st_nlink > 1:
        raise UserError(f"{path} has another hard link, and writing would change both; replace the file with a copy")


def tail(log: Path) -> str:
    """Return the end of a log, which may say why a run stopped, or an empty string if the log cannot be read."""
    if not log.is_file():
        return ""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(log: Path) -> str:
    """Return the last line of a log, truncated to 500 characters."""
    lines = tail(log).strip().splitlines()
    if lines:
        return lines[-1][:500]
    return "its log is empty"
