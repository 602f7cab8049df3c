"""Arguments of commands: paths that must be there, checkpoints, options of fairseq-train in words."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import divided, flag_named

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
        """Return the path; raise a UserError where nothing is there."""
        given = super().convert(value, param, ctx)
        path = given / self.holds
        must_be_file = self.is_file or self.holds
        if not path.exists() or (must_be_file and not path.is_file()):
            raise UserError(f"{path}: {self.missing}")
        return given


# Names of a folder's checkpoint, the first that is there.
CHECKPOINTS = ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt", "model.safetensors")


def checkpoint_at(path: Path) -> Path:
    """Return a checkpoint, given itself or its folder; UserError where there is none."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; give a checkpoint, or a folder of checkpoints")
    found = [path / name for name in CHECKPOINTS if (path / name).is_file()]
    if not found:
        raise UserError(f"{path}: holds no {' or '.join(CHECKPOINTS)}")
    return found[0]


def named_path(text: str) -> tuple[Optional[str], Path]:
    """Return name and path of ``NAME=PATH``; None and all of it where that is there: ``lr=1e-4`` may be a folder."""
    name, _, path = text.partition("=")
    if path and not Path(text).exists():
        return (name, Path(path))
    return (None, Path(text))


def refuse_missing(*paths: Optional[Path]) -> None:
    """Raise a UserError for a path that is given and not there."""
    for path in paths:
        if path is not None and not path.exists():
            raise UserError(f"{path}: no such file or folder")


def refuse_missing_folders(data: str) -> None:
    """Raise a UserError unless each of the folders in fairseq's ``FOLDER:FOLDER...`` is there."""
    for folder in data.split(":"):
        if not folder or not Path(folder).is_dir():
            where = "" if folder == data else f"{data}: "
            raise UserError(f"{where}{folder or 'an empty name'} is no folder")


def options_by_name(words: Sequence[str]) -> dict[str, str]:
    """Return options of a command line by name with underscores: ``--name value``, ``--name=value``, ``part.name=v``.

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
            found[name] = word
            name = ""
    return found


def as_words(options: Mapping[str, Any]) -> list[str]:
    """Return options by name with underscores as words of fairseq-train's command line; False is no word."""
    words = []
    for name, option in options.items():
        value = getattr(option, "value", option)  # of an enumeration of fairseq's
        if value is False:
            continue
        words.append(flag_named(name))
        if value is not True:
            words.append(str(value))
    return words


def words_of(text: str, option: str) -> list[str]:
    """Return the words in the value of an option that holds others; UserError where a quote is not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


def separated(_ctx: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of an option, a callback of click's: those that hold commas are several."""
    return tuple(part for value in values for part in divided(value))


def some_of(names: Sequence[str]) -> Callable[..., tuple[str, ...]]:
    """Return a callback: values, divided by commas, that are among these names; one at least."""

    def callback(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
        given = separated(ctx, option, values)
        if wrong := [each for each in given or ("",) if each not in names]:
            raise UserError(f"{option.opts[0]} {wrong[0]}: give one or more of {', '.join(names)}")
        return given

    return callback


def named(example: str) -> Callable[..., dict[str, str]]:
    """Return a callback: NAME=VALUE, each name once; the example stands in an error."""

    def callback(_ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
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
