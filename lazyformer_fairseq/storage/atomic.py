"""Files and folders that are there whole or not at all.

Each is written under a hidden name beside its own, ``.NAME.0123abcd.unfinished``, locked, synced to disk, renamed.
Whoever reads NAME sees the old contents or the new. The next process removes what a killed one left under such a name:
nobody holds its lock any more.
"""

import errno
import fcntl
import glob
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Union

from lazyformer_fairseq.errors import UserError

logger = logging.getLogger(__name__)

UNFINISHED = ".unfinished"
OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_file(path: Union[str, Path], durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a file to write; it takes the name `path` when the block ends well. Makes missing folders.

    Args:
        path: name that the file takes.
        durable: from then on it survives a power cut, and what killed processes left of it before is removed. That
            takes some milliseconds, too long for thousands of files that can be made again.

    Raises:
        OSError: it cannot be written; what stood under the name before is unchanged.
        UserError: a folder has the name.
    """
    path = Path(path).absolute()
    if path.is_dir():
        raise UserError(f"{path}: is a folder, and a file is to be written; remove it, or give another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    if durable:
        remove_leftovers(path.parent, path.name)
    with _full_disk_named(path):
        file, unfinished = _new_locked_file(path)
    try:
        with _full_disk_named(path), file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        if durable:
            _sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _new_locked_file(path: Path) -> tuple[BinaryIO, Path]:
    """Open a new file under an unfinished name of `path`, locked so that no other process takes it for a leftover."""
    while True:
        unfinished = unfinished_name(path)
        file = unfinished.open("xb")
        _lock(file.fileno())
        if unfinished.exists():
            return file, unfinished
        # Another process removed it between the two calls, when it was not locked yet.
        file.close()


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, whole and durable."""
    with atomic_file(path) as file:
        file.write(text.encode())


def copy_file(source: Union[str, Path], target: Union[str, Path]) -> None:
    """Copy the content of a file, whole and durable."""
    with open(source, "rb") as original, atomic_file(target) as file:
        shutil.copyfileobj(original, file)


@contextmanager
def atomic_folder(folder: Union[str, Path], replace: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yield an empty folder to write into; it takes the name `folder` when the block ends well.

    Args:
        folder: name that the folder takes.
        replace: whether it may take the place of a folder that holds something.
        durable: see :func:`atomic_file`; all files in it are synced.

    Raises:
        UserError: `folder` cannot be made, or holds something already.
    """
    if not replace:
        refuse_filled_folder(folder)
    folder = Path(folder).resolve()  # a link cannot take the name of a folder
    old = unfinished_name(folder)
    try:
        descriptor, unfinished = _new_locked_folder(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    try:
        remove_leftovers(folder.parent, folder.name)
        with _full_disk_named(folder):
            yield unfinished
        _give_usual_modes(unfinished)
        if durable:
            sync_content(unfinished)
        if replace and folder.exists():
            os.replace(folder, old)  # emptying it under its own name could be stopped halfway
        elif not replace:
            refuse_filled_folder(folder)
        os.replace(unfinished, folder)
        if durable:
            _sync(folder.parent)
    finally:
        os.close(descriptor)
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _new_locked_folder(folder: Path) -> tuple[int, Path]:
    """Make a folder under an unfinished name of `folder`; its descriptor is locked as in :func:`_new_locked_file`."""
    while True:
        unfinished = unfinished_name(folder)
        unfinished.mkdir(parents=True)
        with suppress(FileNotFoundError):  # removed by another process before it could be opened
            descriptor = os.open(unfinished, os.O_RDONLY)
            _lock(descriptor)
            if unfinished.exists():
                return descriptor, unfinished
            os.close(descriptor)


def refuse_filled_folder(folder: Union[str, Path]) -> None:
    """Raise UserError where `folder` is a file, a link to nothing, or a folder that holds something or is mounted."""
    folder = Path(folder)
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"{folder}: is a link to nothing; remove it or choose another folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir()) or folder.is_mount()):
        raise UserError(f"{folder}: exists already; remove it or choose another folder")


def refuse_unwritable(path: Path) -> None:
    """Raise a UserError unless a file or a folder of this name can be written, whose folders need not be there yet.

    Tries it by a file that has no name, in the nearest folder that is there.
    """
    path = path.absolute()
    place = path.parent
    try:
        if path.is_dir():
            place = path
        with suppress(FileNotFoundError):
            os.lstat(unfinished_name(path))  # which is longer than the name
        while not os.path.lexists(place):
            place = place.parent
        if place.is_symlink() and not place.exists():
            raise UserError(f"{path}: cannot be written ({place} is a link that leads nowhere); choose another place")
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({place}: {error.strerror}); choose another place") from None


def unfinished_name(path: Path) -> Path:
    """Return a hidden sibling that no other process has, and that :func:`remove_leftovers` recognizes."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")


def remove_leftovers(folder: Union[str, Path], name: str = "*", deep: bool = False) -> None:
    """Remove what killed processes left unfinished in a folder; what a process still holds stays.

    Args:
        folder: folder to look in.
        name: name of the file or folder that was being written; by default all.
        deep: whether to look into all its subfolders too.
    """
    pattern = f".{name if name == '*' else glob.escape(name)}.{'[0-9a-f]' * 8}{UNFINISHED}"
    for path in Path(folder).rglob(pattern) if deep else Path(folder).glob(pattern):
        is_folder = path.is_dir()
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # NFS locks only what can be written
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path) if is_folder else path.unlink()
                logger.info("%s: removed, a killed process left it unfinished", path)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # not every file system has locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _give_usual_modes(folder: Path) -> None:
    """Return those that umask leaves: safetensors writes files that their owner alone may read."""
    usual = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o111 | usual)


def sync_content(folder: Path) -> None:
    """Make all files in a folder and its subfolders survive a power cut from now on."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    """Sync a file, or the names in a folder: without this a power cut can undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # some network file systems sync no folders
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    """Name a full disk as Python does where a library does not.

    numpy reports one as "1000 requested and 10 written", without an error number or a file's name; safetensors by an
    error of its own, which ends in Rust's "(os error 28)".
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        if error.errno in OUT_OF_SPACE and error.filename is None:
            error.filename = str(path)
        raise
    except Exception as error:
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise
