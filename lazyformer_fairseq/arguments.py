"""What commands take: paths that must be there, and options of several values, as in ``--seeds 1 2 3`` or ``1,2,3``."""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.errors import UserError


class ExistingPath(click.Path):
    """A file or a folder that is there, looked for before a command imports what it works with.

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


def precision_option(command: Callable) -> Callable:
    """The option --precision, None where it is not given."""
    default = "[default: on GPUs bf16 where all have it, else fp16; on a CPU fp32]"
    return click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help=default)(command)


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
    names = [name] if name else CHECKPOINTS
    found = [path / name for name in names if (path / name).is_file()]
    if not found:
        raise UserError(f"{path}: holds no {' or '.join(names)}")
    return found[0]


def refuse_missing_folders(data: str) -> None:
    """Raises a UserError unless each of the folders in fairseq's ``FOLDER:FOLDER...`` is there."""
    for folder in data.split(":"):
        if not folder or not Path(folder).is_dir():
            where = "" if folder == data else f"{data}: "
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
            name = "" if value else name
        elif name:
            found[name], name = word, ""
    return found


def words_of(text: str, option: str) -> list[str]:
    """The words in the value of an option that holds others. Raises a UserError where a quote is not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None


class GroupOfCommands(click.Group):
    """A group that lists its commands with the whole first sentence of each, where click cuts it to one line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, self.commands[name].get_short_help_str(limit=1000).removesuffix(".") + ".")
            for name in self.list_commands(ctx)
            if not self.commands[name].hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class CommandWithSeveralValues(click.Command):
    """A command without positional arguments, whose options with ``multiple=True`` take all values that follow."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        several = {name for option in self.params if getattr(option, "multiple", False) for name in (*option.opts,)}
        expanded: list[str] = []
        current = None
        for arg in args:
            if arg.startswith("--"):
                current = arg if arg in several else None
                if current is None:
                    expanded.append(arg)
            elif current is None:
                expanded.append(arg)
            else:
                expanded += [current, arg]
        return super().parse_args(ctx, expanded)


def patterns_apart(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Callback: as :func:`divided`, but commas in square brackets divide nothing."""
    return tuple(part.strip() for value in values for part in re.split(r",(?![^\[]*\])", value) if part.strip())


def divided(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Callback: values that hold commas are several."""
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def numbers(kind: type) -> Any:
    """Callback: as :func:`divided`, then numbers of a kind, each once."""

    def convert(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple:
        found = []
        for word in divided(ctx, option, values):
            try:
                number = kind(word)
            except ValueError:
                raise click.BadParameter(f"{word!r} is no {'whole ' * (kind is int)}number") from None
            if number < 0 or (kind is float and not 0 < number < 1):
                raise click.BadParameter(f"{word} is out of range")
            if number in found:
                raise click.BadParameter(f"{word} is there twice")
            found.append(number)
        return tuple(found)

    return convert


def products(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Callback: as :func:`divided`, then pairs of numbers, as in 12x64."""
    found = []
    for word in divided(ctx, option, values):
        left, _, right = word.partition("x")
        if not (left.isdecimal() and right.isdecimal() and int(left) and int(right)):
            raise click.BadParameter(f"{word!r} is no product of two whole numbers, such as 12x64")
        found.append((int(left), int(right)))
    return tuple(found)


def named_patterns(ctx: click.Context, option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Callback: NAME=PATTERN."""
    found = {}
    for value in values:
        name, equals, pattern = value.partition("=")
        if not equals or not name or not pattern or "/" in name:
            raise click.BadParameter(f"{value!r} is no NAME=PATTERN, such as 'mine=(sff)x4 (f)x4'")
        if name in found:
            raise click.BadParameter(f"{name} is there twice")
        found[name] = pattern
    return found
