"""Atomic writes of files and folders.

A file is written under a hidden name, such as ``.NAME.0123abcd.unfinished``, in the same folder, where it is locked,
synced to disk and then renamed. Readers of NAME see either the old or the new contents. If the process is killed, the
file's lock is released, and the next process to write NAME removes the unfinished file.
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
    """Yield a file for writing that is renamed to `path` if the block succeeds. Missing parent folders are created.

    Args:
        path: path of the finished file.
        durable: whether the file must survive a power failure; leftovers of killed processes are then also removed.
            This takes a few milliseconds, which is too slow for thousands of files that can be recreated.

    Raises:
        OSError: the file cannot be written; an existing file is unchanged.
        UserError: a folder has this name.
    """
    path = Path(path).absolute()
    if path.is_dir():
        raise UserError(f"{path} is a folder, but a file must be written there; remove the folder or use another name")
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
    """Open a new file under an unfinished name of `path`, locked to keep other processes from removing it."""
    while True:
        unfinished = unfinished_name(path)
        file = unfinished.open("xb")
        _lock(file.fileno())
        if unfinished.exists():
            return file, unfinished
        # Another process removed the file before it was locked.
        file.close()


def write_text(path: Path, text: str) -> None:
    """Write text to a UTF-8 file, atomically and durably."""
    with atomic_file(path) as file:
        file.write(text.encode())


def copy_file(source: Union[str, Path], target: Union[str, Path]) -> None:
    """Copy a file's contents, atomically and durably."""
    with open(source, "rb") as original, atomic_file(target) as file:
        shutil.copyfileobj(original, file)


@contextmanager
def atomic_folder(folder: Union[str, Path], replace: bool = False, durable: bool = True) -> Iterator[Path]:
    """Yield an empty folder for writing that is renamed to `folder` if the block succeeds.

    Args:
        folder: path of the finished folder.
        replace: whether to replace an existing folder that is not empty.
        durable: see :func:`atomic_file`; all files in the folder are synced.

    Raises:
        UserError: `folder` cannot be created, or is not empty.
    """
    if not replace:
        refuse_filled_folder(folder)
    folder = Path(folder).resolve()  # a link cannot be replaced by a folder
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
            os.replace(folder, old)  # deleting it under its own name could be interrupted halfway
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
    """Create a folder under an unfinished name of `folder` and lock its descriptor; see :func:`_new_locked_file`."""
    while True:
        unfinished = unfinished_name(folder)
        unfinished.mkdir(parents=True)
        with suppress(FileNotFoundError):  # another process removed the folder before it was opened
            descriptor = os.open(unfinished, os.O_RDONLY)
            _lock(descriptor)
            if unfinished.exists():
                return descriptor, unfinished
            os.close(descriptor)


def refuse_filled_folder(folder: Union[str, Path]) -> None:
    """Raise a UserError if `folder` is a file, a broken symbolic link, a mount point, or a folder that is not empty."""
    folder = Path(folder)
    if folder.is_symlink() and not folder.exists():
        raise UserError(f"{folder} is a broken symbolic link; remove it or choose another folder")
    if not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()) or folder.is_mount():
        raise UserError(f"{folder} already exists; remove it or choose another folder")


def refuse_unwritable(path: Path) -> None:
    """Raise a UserError unless a file or folder with this path can be written; parent folders need not exist.

    This is tested by creating an unnamed file in the nearest existing folder.
    """
    path = path.absolute()
    place = path.parent
    try:
        if path.is_dir():
            place = path
        with suppress(FileNotFoundError):
            os.lstat(unfinished_name(path))  # raises an error if the name is too long
        while not os.path.lexists(place):
            place = place.parent
        if place.is_symlink() and not place.exists():
            raise UserError(f"{path}: cannot be written ({place} is a broken symbolic link); choose another path")
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({place}: {error.strerror}); choose another path") from None


def unfinished_name(path: Path) -> Path:
    """Return a unique hidden path in the same folder, in the format that :func:`remove_leftovers` recognizes."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")


def remove_leftovers(folder: Union[str, Path], name: str = "*", deep: bool = False) -> None:
    """Remove unfinished files and folders of killed processes, except those still locked by a process.

    Args:
        folder: the folder to search.
        name: name of the file or folder that was being written; by default any.
        deep: whether to search all subfolders as well.
    """
    escaped_name = name if name == "*" else glob.escape(name)
    random_part = "[0-9a-f]" * 8
    pattern = f".{escaped_name}.{random_part}{UNFINISHED}"
    paths = Path(folder).rglob(pattern) if deep else Path(folder).glob(pattern)
    for path in paths:
        is_folder = path.is_dir()
        flags = os.O_RDONLY if is_folder else os.O_RDWR  # NFS only locks files opened for writing
        with suppress(OSError):
            descriptor = os.open(path, flags)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_folder:
                    shutil.rmtree(path)
                else:
                    path.unlink()
                logger.info("%s: removed unfinished output of a killed process", path)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # not every file system supports locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _give_usual_modes(folder: Path) -> None:
    """Set files' permissions according to the umask, because safetensors creates files that only the owner can read."""
    usual = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o111 | usual)


def sync_content(folder: Path) -> None:
    """Sync all files in a folder and its subfolders to disk, so that they survive a power failure."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    """Sync a file, or a folder's entries; if the entries were not synced, a power failure could undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    """Convert libraries' errors about a full disk to Python's OSError.

    numpy reports a full disk as "1000 requested and 10 written", without an error number or file name. safetensors
    raises a custom error that ends in Rust's "(os error 28)".
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
