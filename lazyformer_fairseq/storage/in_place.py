"""Files of ours that are written in place: locks and logs, under fixed names in folders that a user gives.

All other files are written under a hidden name and renamed (:mod:`.atomic`), which leaves alone whatever has their
name. A file that is opened for writing is not safe in that way: under its name may stand a link to a file of the
user's, which would be emptied or appended to, or a pipe, which would never open.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Union

from lazyformer_fairseq.errors import UserError

TAIL = 16384  # bytes of a log


def own_file(path: Union[str, Path], flags: int) -> int:
    """Open a file in place and return its descriptor: an `opener` for Python's ``open``.

    Raises:
        UserError: something else has the name: a link, a pipe, a device, a folder, or a file that has other names.
        OSError: the file cannot be opened.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # which change nothing for a plain file
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
    """Raise the UserError of :func:`own_file`, if there is one, without opening the file."""
    try:
        _refuse(path, os.lstat(path))
    except OSError:  # nothing is there, or opening says what is wrong
        return


def _refuse(path: Union[str, Path], found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise UserError(f"{path}: is a link, and what it points to would be written to; remove the link")
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: is no regular file, and a file of this name is to be written; remove or rename it")
    if found.st_nlink > 1:
        raise UserError(
            f"{path}: has another name, too (a hard link), whose content would change with it; put a copy in its place"
        )


def tail(log: Path) -> str:
    """Return the end of a log, in which whatever stopped its run is; "" where it cannot be read, as of a pipe."""
    if not log.is_file():
        return ""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(log: Path) -> str:
    """Return the last line of a log, up to 500 characters."""
    lines = tail(log).strip().splitlines()
    if lines:
        return lines[-1][:500]
    return "its log is empty"
