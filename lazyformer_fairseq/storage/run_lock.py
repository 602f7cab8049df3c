"""Locks for exclusive access to a run's folder, and checks that a resumed run has the same settings."""

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
    """Create a folder and lock it against other processes until the block or the process ends.

    Unfinished files of killed processes are removed. A hidden file in the folder identifies the running process.

    Raises:
        UserError: the folder cannot be written, another process uses it, or the lock file is a link.
    """
    with _locked(folder / LOCK, fcntl.flock):
        remove_leftovers(folder)
        yield


def lock_for_process(folder: Path, lock: str) -> None:
    """Lock a folder until the process ends, using a file named `lock` in it; repeated calls have no effect.

    Child processes do not inherit the lock, because data workers may outlive a killed process by seconds.
    """
    path = (folder / lock).absolute()
    if (path, os.getpid()) not in _locks:
        _locks[path, os.getpid()] = _locked(path, fcntl.lockf)


def _locked(path: Path, lock: Callable[[TextIO, int], None]) -> TextIO:
    """Open and lock a lock file, and write the name of this process to it.

    Raises:
        UserError: another process holds the lock, or the file cannot be written safely.
    """
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", opener=own_file)  # noqa: SIM115  for writing, because NFS only locks writable files
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
                f"{folder}: another run is using this folder ({file.read().strip() or 'unknown'}); wait for that "
                "run to end, or choose another folder"
            ) from None
    except OSError as error:
        logger.warning(
            "%s: the file system does not support locks (%s); do not start several runs in this folder",
            folder,
            error,
        )

    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    file.flush()
    return file


@contextmanager
def file_lock(path: Path, shared: bool = False) -> Iterator[None]:
    """Hold an exclusive or shared lock on a file during the block, after waiting for other processes.

    The lock is released when the block or the process ends.

    Args:
        path: the file, which is created if it does not exist.
        shared: whether to acquire a shared lock, which other processes can hold at the same time.
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
    stale_files: Iterable[Path] = (),
) -> None:
    """Store a folder's settings in a file, or check that the stored settings match; they may change until work starts.

    Args:
        file: the settings file.
        settings: settings of this run.
        of_what: noun for the work, such as "a search", for messages.
        begun: whether work with the stored settings has started.
        stale_files: files to remove if the settings differ.

    Raises:
        UserError: work has started with different settings; the message lists the differences.
    """
    settings = json.loads(json.dumps(settings))  # as read from the file: tuples become lists
    if file.exists():
        odd = differences(read_checked_json(file), settings)
        if not odd:
            return
        if begun:
            raise UserError(
                f"{file.parent} contains {of_what} with different settings ({odd}); use the same settings or "
                "another folder"
            )
    for path in stale_files:
        path.unlink(missing_ok=True)
    write_checked_json(file, settings)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Describe the differences between two sets of settings; return an empty string if there are none."""
    return "; ".join(
        f"{name} is {there.get(name)!r} there, {here.get(name)!r} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    )
