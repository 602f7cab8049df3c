"""Folders that belong to one run: to one process at a time, and to the same settings each time it resumes."""

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import remove_leftovers
from lazyformer_fairseq.storage.in_place import own_file
from lazyformer_fairseq.storage.json_files import read_checked_json, write_checked_json

logger = logging.getLogger(__name__)

LOCK = ".lock"
_locks: dict[tuple[Path, int], TextIO] = {}  # by file and process


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Make the folder, and keeps other processes out of it until the block or the process ends, however it ends.

    Removes what killed processes left unfinished in it. A hidden file in it names the process at work.

    Raises:
        UserError: the folder cannot be written, another process is at work in it, or a link has the lock's name.
    """
    with _locked(folder / LOCK, fcntl.flock):
        remove_leftovers(folder)
        yield


def lock_for_process(folder: Path, lock: str) -> None:
    """Lock a folder by a file `lock` to the end of the process, which may ask again; children lack the lock.

    A data worker may outlive a killed process by seconds, and would hold a lock that it inherits.
    """
    path = (folder / lock).absolute()
    if (path, os.getpid()) not in _locks:
        _locks[path, os.getpid()] = _locked(path, fcntl.lockf)


def _locked(path: Path, lock: Callable[[TextIO, int], None]) -> TextIO:
    """Return the file, open and locked, which names this process.

    Raises:
        UserError: another process holds it, it cannot be written, or something else than a file of ours has its name.
    """
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", opener=own_file)  # noqa: SIM115  for writing: NFS locks nothing else
    except OSError as error:
        problem = error.strerror
        if isinstance(error, FileExistsError):
            problem = "Not a directory"
        raise UserError(f"{folder}: cannot be written ({problem}); choose another folder") from None
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        with file:
            file.seek(0)
            raise UserError(
                f"{folder}: another run is at work there ({file.read().strip() or 'unknown'}); wait for it, or choose "
                "another folder"
            ) from None
    except OSError as error:
        logger.warning(
            "%s: its file system knows no locks (%s); start one run there at a time",
            folder,
            error,
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    file.flush()
    return file


@contextmanager
def file_lock(path: Path, shared: bool = False) -> Iterator[None]:
    """Wait until no other process holds the file; holds it until the block or the process ends, however it ends.

    Args:
        path: the file, which is made.
        shared: whether others may hold it too that ask for it in this way.
    """
    descriptor = own_file(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def keep_settings(
    file: Path,
    settings: Mapping[str, Any],
    of_what: str,
    begun: bool,
    made_by_them: Iterable[Path] = (),
) -> None:
    """Keep in a file the settings of everything in its folder; they may change until work has begun.

    Args:
        file: file of the settings.
        settings: settings of this run.
        of_what: "a search", say.
        begun: whether work was done with the settings in the file.
        made_by_them: files to remove where the settings differ.

    Raises:
        UserError: work has begun with other settings; names each of them.
    """
    settings = json.loads(json.dumps(settings))  # as they come back from the file: tuples become lists
    if file.exists():
        odd = differences(read_checked_json(file), settings)
        if not odd:
            return
        if begun:
            raise UserError(f"{file.parent}: holds {of_what} of other settings ({odd}); give those, or another folder")
    for path in made_by_them:
        path.unlink(missing_ok=True)
    write_checked_json(file, settings)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return the differences of two settings, in words; empty where there are none."""
    return "; ".join(
        f"{name} is {there.get(name)!r} there, {here.get(name)!r} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    )
