"""Paths on a command line that must be there, looked for before a command imports what it works with."""

from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.errors import UserError


class ExistingPath(click.Path):
    """A file or a folder that is there.

    Args:
        missing: what the error says after the path.
        holds: a file that must be in the folder.
        is_file: a folder does not do.
    """

    def __init__(self, missing: str = "no such file or folder", holds: str = "", is_file: bool = False):
        super().__init__(path_type=Path)
        self.missing, self.holds, self.is_file = missing, holds, is_file

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Path:
        """Raises a UserError where it is missing."""
        given = super().convert(value, param, ctx)
        path = given / self.holds
        if not (path.is_file() if self.holds or self.is_file else path.exists()):
            raise UserError(f"{path}: {self.missing}")
        return given


# Names of a folder's checkpoint, the first that is there.
CHECKPOINTS = ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt", "model.safetensors")


def checkpoint_at(path: Path) -> Path:
    """A checkpoint, given itself or the folder that holds it; UserError where there is none."""
    if path.is_dir():
        found = [path / name for name in CHECKPOINTS if (path / name).is_file()]
        if not found:
            raise UserError(f"{path}: holds no {' or '.join(CHECKPOINTS)}")
        return found[0]
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; give a file such as checkpoint_last.pt, or its folder")
    return path


def refuse_missing_folders(data: str) -> None:
    """Raises a UserError unless each of the folders in fairseq's ``FOLDER:FOLDER...`` is there."""
    for folder in data.split(":"):
        if not folder or not Path(folder).is_dir():
            raise UserError(f"{data}: {folder or 'an empty name'} is no folder")
