"""Argument types and helpers for commands: path checks, checkpoint lookup, and parsing of fairseq-train options."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.options import flag_named, split_at_commas

PACKAGE_FOLDER = Path(__file__).absolute().parent
# A wheel contains the configs inside the package; in a checkout, they are next to the package's folder.
_CONFIG_FOLDERS = (PACKAGE_FOLDER / "configs", PACKAGE_FOLDER.parent / "configs")
CONFIGS = next(folder for folder in _CONFIG_FOLDERS if folder.is_dir())


class ExistingPath(click.Path):
    """A path that must exist, checked before the command imports its dependencies.

    Args:
        missing: the error message, which is printed after the path.
        holds: if set, the path must be a folder that contains a file with this name.
        is_file: whether to accept only files.
    """

    def __init__(self, missing: str = "no such file or folder", holds: str = "", is_file: bool = False):
        super().__init__(path_type=Path)
        self.missing = missing
        self.required_file = holds
        self.is_file = is_file

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Path:
        """Return the path; raise a UserError if it does not exist."""
        given = super().convert(value, param, ctx)
        path = given / self.required_file
        must_be_file = self.is_file or self.required_file
        if not path.exists() or (must_be_file and not path.is_file()):
            raise UserError(f"{path}: {self.missing}")
        return given


def find_config(name: str) -> Path:
    """Find a YAML config by name: the user's own file, or else one that ships with this package.

    Raises:
        UserError: there is no such file; the message suggests similar names.
    """
    folders = [CONFIGS / folder for folder in ("pretraining", "language_modeling")]
    paths = (Path(folder, name) for folder in ("", *folders))
    if path := next(filter(Path.is_file, paths), None):
        return path
    shipped = [path.name for folder in folders for path in folder.glob("*.yaml")]
    suggestion = nearest(Path(name).name, shipped)
    places = " or ".join(map(str, folders))
    raise UserError(f"{name}: no such file here or in {places}{suggestion}")


# Checkpoint file names to look for in a folder; the first one that exists is used.
CHECKPOINTS = ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt", "model.safetensors")


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint at a path, which is either a file or a folder; raise a UserError if there is none."""
    if path.is_file():
        if path.suffix not in (".pt", ".safetensors"):
            raise UserError(f"{path} is not a checkpoint; pass a .pt or .safetensors file, or the file's folder")
        return path
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; pass a checkpoint or a folder of checkpoints")
    found = [path / name for name in CHECKPOINTS if (path / name).is_file()]
    if not found:
        raise UserError(f"{path} contains no {' or '.join(CHECKPOINTS)}; pass a checkpoint or a folder of checkpoints")
    return found[0]


def named_path(text: str) -> tuple[Optional[str], Path]:
    """Split ``NAME=PATH`` into name and path.

    The name is None if there is no ``=``, or if the whole text is an existing path, such as a folder called
    ``lr=1e-4``.
    """
    name, _, path = text.partition("=")
    if path and not Path(text).exists():
        return (name, Path(path))
    return (None, Path(text))


def refuse_missing(*paths: Optional[Path]) -> None:
    """Raise a UserError if any of the paths does not exist; None is skipped."""
    for path in paths:
        if path is not None and not path.exists():
            raise UserError(f"{path}: no such file or folder")


def refuse_missing_folders(data: str) -> None:
    """Raise a UserError unless all folders of ``FOLDER:FOLDER...`` exist and the first contains binarized data."""
    folders = data.split(":")
    for folder in folders:
        if not folder or not Path(folder).is_dir():
            where = "" if folder == data else f"{data}: "
            remedy = ""
            if Path(folder).is_file():
                remedy = f"; {_if_raw_text(folder)}"
            raise UserError(f"{where}{folder or 'an empty name'} is not a folder{remedy}")
    first = folders[0]
    dictionaries = (Path(first) / "dict.txt", Path(first) / "shard0/dict.txt")
    if not any(path.is_file() for path in dictionaries):
        raise UserError(f"{first} contains no dict.txt, so it is not binarized data; {_if_raw_text(first)}")


def _if_raw_text(path: str) -> str:
    return (
        f"if it is raw text, run `lazyformer corpus {shlex.quote(path)} data` first (for a causal model, `lazyformer "
        "lm prepare`), and then pass the folder data"
    )


def options_by_name(words: Sequence[str]) -> dict[str, str]:
    """Parse the options on a command line into a dictionary, keyed by name with underscores.

    Options may be written as ``--name value``, ``--name=value`` or ``part.name=value``. If a name occurs several times,
    its last value is used. A bare ``--name`` has the value ``""``.
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


def to_arguments(options: Mapping[str, Any]) -> list[str]:
    """Convert options, keyed by name with underscores, to fairseq-train arguments; options set to False are omitted."""
    words = []
    for name, option in options.items():
        value = getattr(option, "value", option)  # unwraps fairseq's enums
        if value is False:
            continue
        words.append(flag_named(name))
        if value is not True:
            words.append(str(value))
    return words


def split_arguments(text: str, option: str) -> list[str]:
    """Split an option's value into arguments; the value itself consists of command-line options.

    Raises:
        UserError: a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


def separated(_ctx: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Split an option's values at commas (a click callback)."""
    return tuple(part for value in values for part in split_at_commas(value))


def subset_of(names: Sequence[str]) -> Callable[..., tuple[str, ...]]:
    """Return a click callback that splits values at commas and requires one or more of these names."""

    def callback(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
        given = separated(ctx, option, values)
        if wrong := [each for each in given or ("",) if each not in names]:
            raise UserError(f"{option.opts[0]} {wrong[0]}: choose one or more of {', '.join(names)}")
        return given

    return callback


def named(example: str) -> Callable[..., dict[str, str]]:
    """Return a click callback that parses ``NAME=VALUE`` options into a dictionary and rejects duplicate names.

    Args:
        example: a valid value, quoted in the error message.
    """

    def callback(_ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
        found = {}
        for value in values:
            name, _, content = (part.strip() for part in value.partition("="))
            if not content or not re.fullmatch(r"[\w.+ -]+", name):
                raise click.BadParameter(f"{value!r} is not of the form {option.metavar}, such as {example}")
            if name in found:
                raise click.BadParameter(f"{name} is specified twice")
            found[name] = content
        return found

    return callback
