"""Argument types and helpers for commands: existing paths, checkpoints and fairseq-train options as words."""

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
    """A path that must exist, checked before the command imports its dependencies.

    Args:
        missing: the text of the error after the path.
        holds: the name of a file that the folder must contain.
        is_file: accept only a file.
    """

    def __init__(self, missing: str = "no such file or folder", holds: str = "", is_file: bool = False):
        super().__init__(path_type=Path)
        self.missing = missing
        self.holds = holds
        self.is_file = is_file

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Path:
        """Return the path; raise a UserError if it does not exist."""
        given = super().convert(value, param, ctx)
        path = given / self.holds
        must_be_file = self.is_file or self.holds
        if not path.exists() or (must_be_file and not path.is_file()):
            raise UserError(f"{path}: {self.missing}")
        return given


# File names of a folder's checkpoint; the first that exists is used.
CHECKPOINTS = ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt", "model.safetensors")


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint at a path, which may be its folder; raise a UserError if there is none."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; give a checkpoint, or a folder of checkpoints")
    found = [path / name for name in CHECKPOINTS if (path / name).is_file()]
    if not found:
        raise UserError(f"{path}: contains no {' or '.join(CHECKPOINTS)}")
    return found[0]


def named_path(text: str) -> tuple[Optional[str], Path]:
    """Split ``NAME=PATH`` into name and path.

    If the whole text is an existing path, as a folder ``lr=1e-4`` may be, the name is None.
    """
    name, _, path = text.partition("=")
    if path and not Path(text).exists():
        return (name, Path(path))
    return (None, Path(text))


def refuse_missing(*paths: Optional[Path]) -> None:
    """Raise a UserError if one of the given paths does not exist; None is skipped."""
    for path in paths:
        if path is not None and not path.exists():
            raise UserError(f"{path}: no such file or folder")


def refuse_missing_folders(data: str) -> None:
    """Raise a UserError unless every folder in fairseq's ``FOLDER:FOLDER...`` exists."""
    for folder in data.split(":"):
        if not folder or not Path(folder).is_dir():
            where = "" if folder == data else f"{data}: "
            raise UserError(f"{where}{folder or 'an empty name'} is not a folder")


def options_by_name(words: Sequence[str]) -> dict[str, str]:
    """Return the options on a command line, keyed by name with underscores.

    ``--name value``, ``--name=value`` and ``part.name=value`` are understood. The last occurrence of a name counts.
    ``--name`` alone has the value ``""``.
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
    """Return options, keyed by name with underscores, as words for fairseq-train, omitting those that are False."""
    words = []
    for name, option in options.items():
        value = getattr(option, "value", option)  # fairseq's enumerations
        if value is False:
            continue
        words.append(flag_named(name))
        if value is not True:
            words.append(str(value))
    return words


def words_of(text: str, option: str) -> list[str]:
    """Split the value of an option that contains further options into words.

    Raises:
        UserError: a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


def separated(_ctx: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Split the values of an option at commas; a click callback."""
    return tuple(part for value in values for part in divided(value))


def some_of(names: Sequence[str]) -> Callable[..., tuple[str, ...]]:
    """Return a click callback that splits values at commas and requires one or more of these names."""

    def callback(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
        given = separated(ctx, option, values)
        if wrong := [each for each in given or ("",) if each not in names]:
            raise UserError(f"{option.opts[0]} {wrong[0]}: give one or more of {', '.join(names)}")
        return given

    return callback


def named(example: str) -> Callable[..., dict[str, str]]:
    """Return a click callback that reads ``NAME=VALUE`` options into a dictionary and rejects a name given twice.

    Args:
        example: a valid value, quoted in the error message.
    """

    def callback(_ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
        found = {}
        for value in values:
            name, _, content = (part.strip() for part in value.partition("="))
            if not content or not re.fullmatch(r"[\w.+ -]+", name):
                raise click.BadParameter(f"{value!r} is not a {option.metavar}, such as {example}")
            if name in found:
                raise click.BadParameter(f"{name} is given twice")
            found[name] = content
        return found

    return callback
