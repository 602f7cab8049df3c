"""Files and folders that are written whole, in place of what a run that was stopped left under their names."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lazyformer_fairseq.errors import UserError


@contextmanager
def rewritten_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty sibling of ``folder`` to write into; it takes the name ``folder`` when the block ends well.

    A process that is killed at any moment leaves the old folder, the new one or none, and perhaps a sibling
    ``.NAME.unfinished`` or ``.NAME.old``, which the next run removes. One process writes a folder at a time.
    """
    unfinished, old = (folder.with_name(f".{folder.name}.{state}") for state in ("unfinished", "old"))
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with _full_disk_named(folder):
            yield unfinished
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.replace(folder, old)  # emptying it under its own name could be stopped halfway
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def rewritten_file(path: Path) -> Iterator[Path]:
    """Yields a path beside ``path`` to write to; it takes the name ``path`` when the block ends well."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _full_disk_named(path):
            yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _full_disk_named(path: Path) -> Iterator[None]:
    """numpy reports a full disk as "1000 requested and 10 written", without an error number or a file's name."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yields an empty sibling of ``folder`` to write into; it takes the name ``folder`` when the block ends well.

    Whatever raises inside the block (an interrupt too) leaves no trace. ``folder`` may exist only while it is empty.

    Raises:
        UserError: ``folder`` exists already, or cannot be made.
    """
    folder = Path(folder).absolute()
    refuse_filled_folder(folder)
    unfinished = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    try:
        yield unfinished
        refuse_filled_folder(folder)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def refuse_filled_folder(folder: Path) -> None:
    """Raises UserError where ``folder`` is a file, or a folder that holds something."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; remove it or choose another folder")
