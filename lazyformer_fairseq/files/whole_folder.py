"""Folders that are written whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lazyformer_fairseq.errors import UserError


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
