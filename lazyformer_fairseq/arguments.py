"""What commands take: paths that must be there, and options of several values, as in ``--seeds 1 2 3`` or ``1,2,3``."""

import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.errors import UserError

PACKAGE_FOLDER = Path(__file__).absolute().parent
CONFIGS = next(path / "configs" for path in (PACKAGE_FOLDER, PACKAGE_FOLDER.parent) if (path / "configs").is_dir())


class ExistingPath(click.Path):
    """A file or a folder that is there, looked for before a command imports what it works with.

    Args:
        missing: what the error says after the path.
        holds: a file that must be in the folder.
        is_file: a folder does not do.
    """

    def __init__(self, missing: str = "no such file or folder", holds: str = "", is_file: bool = False):
        super().__init__(path_type=Path)
        self.missing = missing
        self.holds = holds
        self.is_file = is_file

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Path:
        """Raises a UserError where it is missing."""
        given = super().convert(value, param, ctx)
        path = given / self.holds
        if not (path.is_file() if self.holds or self.is_file else path.exists()):
            raise UserError(f"{path}: {self.missing}")
        return given


# Names of a folder's checkpoint, the first that is there.
CHECKPOINTS = ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt", "model.safetensors")


def checkpoint_at(path: Path, name: Optional[str] = None) -> Path:
    """A checkpoint, given itself or the folder that holds it (and perhaps its name there); UserError for none."""
    if path.is_file():
        if name is not None:
            raise UserError(f"{path}: is a file; {name} can be chosen in a folder of checkpoints alone")
        return path
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; give a checkpoint, or a folder of checkpoints")
    if name:
        names = [name]
    else:
        names = CHECKPOINTS
    found = [path / name for name in names if (path / name).is_file()]
    if not found:
        raise UserError(f"{path}: holds no {' or '.join(names)}")
    return found[0]


def named_path(text: str) -> tuple[Optional[str], Path]:
    """Name and path of ``NAME=PATH``; None and all of it where that is there: folders are called ``lr=1e-4`` too."""
    name, _, path = text.partition("=")
    if path and not Path(text).exists():
        return (name, Path(path))
    return (None, Path(text))


def refuse_missing(*paths: Optional[Path]) -> None:
    """Raises a UserError for a path that is given and not there."""
    for path in paths:
        if path is not None and not path.exists():
            raise UserError(f"{path}: no such file or folder")


def refuse_missing_folders(data: str) -> None:
    """Raises a UserError unless each of the folders in fairseq's ``FOLDER:FOLDER...`` is there."""
    for folder in data.split(":"):
        if not folder or not Path(folder).is_dir():
            if folder == data:
                where = ""
            else:
                where = f"{data}: "
            raise UserError(f"{where}{folder or 'an empty name'} is no folder")


def options_by_name(words: Sequence[str]) -> dict[str, str]:
    """Options of a command line, by name with underscores: ``--name value``, ``--name=value`` or ``part.name=value``.

    The last one of a name counts. ``--name`` alone has the value ``""``.
    """
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--") or ("=" in word and not name):
            name, _, value = word.lstrip("-").partition("=")
            name = name.rpartition(".")[2].replace("-", "_")
            found[name] = value.strip("'\"")
            if value:
                name = ""
        elif name:
            found[name], name = word, ""
    return found


def as_words(options: Mapping[str, Any]) -> list[str]:
    """Options by name with underscores, as words of fairseq-train's command line; False is no word."""
    flags = ((f"--{name.replace('_', '-')}", getattr(value, "value", value)) for name, value in options.items())
    given = ((flag,) if value is True else (flag, str(value)) for flag, value in flags if value is not False)
    return list(itertools.chain.from_iterable(given))


def words_of(text: str, option: str) -> list[str]:
    """The words in the value of an option that holds others. Raises a UserError where a quote is not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


def divided(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Callback: values that hold commas are several."""
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def some_of(names: Sequence[str]) -> Callable[..., tuple[str, ...]]:
    """A callback: values, divided by commas, that are among these names; one at least."""

    def callback(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
        given = divided(ctx, option, values)
        if wrong := [each for each in given or ("",) if each not in names]:
            raise UserError(f"{option.opts[0]} {wrong[0]}: give one or more of {', '.join(names)}")
        return given

    return callback


def named(example: str) -> Callable[..., dict[str, str]]:
    """A callback: NAME=VALUE, each name once; the example stands in an error."""

    def callback(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
        found = {}
        for value in values:
            name, _, content = (part.strip() for part in value.partition("="))
            if not content or not re.fullmatch(r"[\w.+ -]+", name):
                raise click.BadParameter(f"{value!r} is no {option.metavar}, such as {example}")
            if name in found:
                raise click.BadParameter(f"{name} is there twice")
            found[name] = content
        return found

    return callback
