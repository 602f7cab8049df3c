"""Command-line options as fields of settings dataclasses, so that each option is defined only once.

A field defines an option's name, type, default, bounds and help. :func:`with_options_from` derives the click option and
its ``--help`` from the field, and :func:`check` validates values from command lines, files and Python. All commands use
:class:`Command` and :class:`Group`.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.errors import UserError, nearest, whole_number
from lazyformer_fairseq.storage.atomic import refuse_unwritable

OUTPUTS = ("out", "output", "json")  # arguments and options that name an output path
COUNT_UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
MOST_GPUS = 10**6
LONGEST = 10**7
MOST = 10**9
TOO_LARGE = 2**32  # larger than any sensible whole number


@dataclass(frozen=True)
class Bounds:
    """The range of finite numbers that an option accepts: from `low` to `high` inclusive, and less than `below`.

    Attributes:
        low: lower bound.
        high: inclusive upper bound.
        is_open: whether `low` itself is excluded.
        below: exclusive upper bound.
        is_whole: whether only whole numbers are accepted.
    """

    low: float = -math.inf
    high: float = math.inf
    is_open: bool = False
    below: float = math.inf
    is_whole: bool = False

    def refusal(self, value: float) -> str:
        """Describe the accepted values if `value` is out of bounds; otherwise return an empty string."""
        is_number = not math.isnan(value) and not (self.is_whole and value % 1)
        if is_number and value >= self.below > 1 and self.high == math.inf:
            return f"below {self.below:,}"
        is_above = value > self.low or (value == self.low and not self.is_open)
        if is_number and is_above and value <= self.high and value < self.below:
            return ""

        least = f"{self.low:g} or more"
        if self.high < math.inf:
            least = f"from {self.low:g} to {self.high:g}"
        elif self.below <= 1:
            least = f"at least {self.low:g} and below {self.below:g}"
        if self.is_open:
            least = f"more than {self.low:g}"
            if self.high < math.inf:
                least += f" and at most {self.high:g}"

        if is_number:
            return least
        number = "a whole number" if self.is_whole else "a number"
        return f"{number}, {least}" if math.isfinite(self.low) else number


LENGTH = Bounds(1, below=LONGEST, is_whole=True)
COUNT = Bounds(1, below=MOST, is_whole=True)
COUNT_OR_NONE = Bounds(0, below=MOST, is_whole=True)
COUNT_OR_UNLIMITED = Bounds(-1, below=MOST, is_whole=True)
AMOUNT = Bounds(0)
PROPORTION = Bounds(0, below=1)
PROPORTION_OR_ALL = Bounds(0, high=1)


@dataclass(frozen=True)
class Option:
    """The description of an option, in addition to its field's name, type and default.

    Attributes:
        help: help text, to which the default is appended.
        flags: flags that replace ``--name-of-the-field``; ``--yes/--no`` for a switch with two names.
        bounds: bounds of a number; fields of type int also reject fractions.
        choices: accepted values.
        parse: function that converts the text to a value or raises a UserError, instead of the type's own parser.
        metavar: placeholder for the value in ``--help``.
        section: heading under which ``--help`` lists the option.
        shown: description of the default, if the default is only determined when the command runs.
    """

    help: str
    flags: tuple[str, ...] = ()
    bounds: Bounds = Bounds()
    choices: Sequence[str] = ()
    parse: Optional[Callable[[str], Any]] = None
    metavar: Optional[str] = None
    section: str = "Options"
    shown: str = ""


def option(default: Any, help: str, *flags: str, **more: Any) -> Any:
    """Return a settings dataclass field that defines an option; the default MISSING makes the option required.

    Args:
        default: the field's default.
        help: the help text.
        flags: see :class:`Option`.
        more: other attributes of :class:`Option`; `low`, `high` and `is_open` may be passed instead of `bounds`.
    """
    ends = {name: more.pop(name) for name in ("low", "high", "is_open") if name in more}
    described = Option(help, flags, **{"bounds": Bounds(**ends), **more})
    metadata = {"option": described}
    if isinstance(default, (list, dict, set)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# Options shared by several commands: `device: Optional[str] = DEVICE()` or, with changes, `DEVICE(help="...")`.
DEVICE = partial(option, default=None, help="Device to run on.", choices=("cpu", "cuda"), shown="cuda if available")
PRECISION = partial(
    option,
    default=None,
    help="Numeric precision of training and inference.",
    choices=("fp32", "bf16", "fp16"),
    shown="bf16 if all GPUs support it, else fp16; fp32 on a CPU",
)


@dataclass(frozen=True)
class Gpus:
    """A number of GPUs and, optionally, the memory of each in bytes, as in ``--gpus 8`` and ``--gpus 8x16GB``."""

    count: int
    memory: Optional[int] = None

    def __str__(self) -> str:
        if self.memory:
            return f"{self.count}x{self.memory // 10**6}MB"
        return str(self.count)


def read_gpus(text: str) -> Gpus:
    """Parse a number of GPUs such as ``8`` or ``8x16GB``; raise a UserError for any other text."""
    count, has_size, size = text.partition("x")
    number = whole_number(count)
    if number is None or not 1 <= number <= MOST_GPUS:
        raise UserError(f"{text!r} is not a number of GPUs; use, for example, 8 or 8x16GB")
    memory = None
    if has_size:
        memory = read_size(size)
    return Gpus(number, memory)


def read_size(text: str) -> int:
    """Parse a size such as ``16GB`` or ``16GiB`` into bytes; raise a UserError for any other text."""
    found = re.fullmatch(r"(\d*\.?\d+)(m|g)(i?)b", text.lower())
    size = 0.0
    if found:
        number, prefix, is_binary = found.groups()
        thousand = 2**10 if is_binary else 10**3
        power = {"m": 2, "g": 3}[prefix]
        size = float(number) * thousand**power
    if not 0 < size < 2**60:
        raise UserError(f"{text!r} is not a size; use, for example, 16GB, 16GiB or 800MB")
    return int(size)


def read_count(text: str) -> int:
    """Parse a count with an optional suffix k, M or B: ``10M`` is 10,000,000.

    Raises:
        UserError: the text is not such a count.
    """
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kMB]?)", text.strip())
    if found is None or float(found[1]) == 0:
        raise UserError(f"{text}: must be a number such as 500k, 10M or 1B")
    return round(float(found[1]) * COUNT_UNITS[found[2]])


def duration(text: str) -> float:
    """Parse a duration such as ``90s``, ``10min`` or ``1.5h`` into seconds; raise a UserError for any other text."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if not found or found[2] not in SECONDS or not float(found[1]):
        raise UserError(f"{text!r} is not a duration; use, for example, 90s, 10min or 1.5h")
    return float(found[1]) * SECONDS[found[2]]


def split_at_commas(text: str) -> list[str]:
    """Split a text at commas outside square brackets: ``a,b[c,d]`` has two parts."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def parse_masking_rates(given: Any) -> tuple[float, float]:
    """Parse ``--mask-prob`` into the masking rates of the first and the last update.

    ``0.3:0.15`` sets both rates; a single number is used for both.

    Raises:
        UserError: the text has neither form.
    """
    first, colon, last = str(given).partition(":")
    try:
        return float(first), float(last if colon else first)
    except ValueError:
        raise UserError(
            f"--mask-prob {given}: must be a masking rate such as 0.15, or the rates of the first and the last update, "
            "such as 0.3:0.15"
        ) from None


def num_processed_tokens(task: Mapping[str, Any], tokens: int, predicted: int) -> int:
    """Return the number of tokens that an encoder processes per text, including those that ``masked_permuted_lm`` adds.

    Args:
        task: fairseq's task settings, by name.
        tokens: number of tokens in the text.
        predicted: number of tokens to predict.
    """
    if task.get("_name") != "masked_permuted_lm":
        return tokens
    if str(task.get("permuted_only")) == "True":
        return tokens + predicted
    return tokens + 2 * predicted


def flag_of(one: dataclasses.Field) -> str:
    """Return the command-line flag of a field: the first of its own flags, or ``--name-of-the-field``."""
    flags = one.metadata["option"].flags
    if flags:
        return flags[0]
    return flag_named(one.name)


def flag_named(name: str) -> str:
    """Return the flag ``--name-of-the-field`` for a field name."""
    return f"--{name.replace('_', '-')}"


# Checks ---------------------------------------------------------------------------------------------------------------


def options_of(settings: type) -> list[dataclasses.Field]:
    """Return the fields of a settings dataclass that are options."""
    return [one for one in dataclasses.fields(settings) if "option" in one.metadata]


def bounds_of(*settings: type) -> dict[str, Bounds]:
    """Return the bounds of all numeric options in these dataclasses, by name."""
    found: dict[str, Bounds] = {}
    for each in settings:
        hints = typing.get_type_hints(each)
        for one in options_of(each):
            described: Option = one.metadata["option"]
            bounds = described.bounds
            value_type = _type_of(hints[one.name])[0]
            if value_type is int and described.parse is None:
                found[one.name] = replace(bounds, is_whole=True, below=min(bounds.below, TOO_LARGE))
            elif value_type is float or bounds != Bounds():
                found[one.name] = bounds
    return found


def check(settings: Any, settings_class: Optional[type] = None) -> None:
    """Raise a UserError that names the option if a value is out of bounds or not among the choices.

    Args:
        settings: an object with the fields of `settings_class`.
        settings_class: a settings dataclass; the class of `settings` by default.
    """
    settings_class = settings_class or type(settings)
    values = {one.name: getattr(settings, one.name) for one in options_of(settings_class)}
    check_values(settings_class, values)


def check_values(settings_class: type, values: Mapping[str, Any]) -> None:
    """Check values, keyed by name, as :func:`check` does; names that are not options are ignored."""
    bounds = bounds_of(settings_class)
    for one in options_of(settings_class):
        value = values.get(one.name)
        if value == () and one.default:
            raise UserError(f"{flag_of(one)}: specify at least one value")
        choices = one.metadata["option"].choices
        if choices and value is not None:
            for each in value if isinstance(value, (tuple, list)) else (value,):
                if each not in choices:
                    near = nearest(str(each), choices)
                    raise UserError(f"{flag_of(one)} {each}: must be one of {', '.join(choices)}{near}")
        if one.name in bounds:
            _refuse_outside(flag_of(one), value, bounds[one.name])


def refuse_out_of_bounds(options: Mapping[str, Any], bounds: Mapping[str, Bounds]) -> None:
    """Raise a UserError for the first option that is out of bounds.

    Args:
        options: values by option name; a value is a number, several numbers, or either of these as text.
        bounds: bounds by option name.
    """
    for name, allowed in bounds.items():
        _refuse_outside(flag_named(name), options.get(name), allowed)


def _refuse_outside(flag: str, given: Any, bounds: Bounds) -> None:
    if isinstance(given, str) and not given.strip():
        raise UserError(f"{flag} {given!r}: must be a number")
    if isinstance(given, (tuple, list)):
        given = " ".join(map(str, given))
    for text in re.findall(r"[^][(),:\s]+", str(given)):
        if text in ("None", "null") or "$" in text:
            continue
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if must := bounds.refusal(number):
            raise UserError(f"{flag} {text}: must be {must}")


def reject_non_defaults(settings: Any, names: Iterable[str], why: str) -> None:
    """Raise a UserError with the reason `why` for the first of these options that differs from its default."""
    for name in names:
        if getattr(settings, name) != getattr(type(settings), name):
            raise UserError(f"{flag_named(name)}: {why}")


# Command lines --------------------------------------------------------------------------------------------------------


def with_options_from(settings: type, into: str = "settings") -> Callable:
    """Return a decorator that adds the options of a settings dataclass to a command.

    Args:
        settings: the dataclass.
        into: name of the argument that receives the settings; if empty, the command receives one argument per field and
            can determine some of the values itself.
    """
    fields = options_of(settings)
    hints = typing.get_type_hints(settings)

    def decorate(command: Callable) -> Callable:
        def run(**given: Any) -> Any:
            check_values(settings, given)
            if into:
                own = {one.name: given.pop(one.name) for one in fields}
                given[into] = settings(**own)
            return command(**given)

        run.__doc__ = command.__doc__
        run.__name__ = command.__name__
        run.__click_params__ = list(getattr(command, "__click_params__", ()))
        for one in reversed(fields):
            _click_option(one, hints[one.name])(run)
        return run

    return decorate


def parse_arguments(words: Sequence[str], *settings: type) -> dict[str, Any]:
    """Parse arguments such as ``--dropout 0.1``; return the values of these dataclasses' options, by name.

    Raises:
        UserError: an argument is not one of their options, or a value is invalid.
    """
    known = click.Command("options", params=[])
    for each in settings:
        known.params += with_options_from(each, into="")(lambda **_: None).__click_params__
    try:
        context = known.make_context("options", list(words))
    except click.NoSuchOption as error:
        flags = [flag for one in known.params for flag in one.opts]
        raise UserError(f"unknown option {error.option_name}{nearest(error.option_name, flags)}") from None
    except click.UsageError as error:
        raise UserError(error.format_message()) from None
    source = click.core.ParameterSource.COMMANDLINE
    given = {name: value for name, value in context.params.items() if context.get_parameter_source(name) is source}
    refuse_out_of_bounds(given, bounds_of(*settings))
    return given


def select_options(settings: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options, keyed by name, that are fields of a settings dataclass."""
    return {one.name: options[one.name] for one in dataclasses.fields(settings) if one.name in options}


def _click_option(one: dataclasses.Field, hint: Any) -> Callable:
    described: Option = one.metadata["option"]
    value_type, is_optional, is_several = _type_of(hint)
    flag = flag_of(one)
    other_flags = described.flags[1:]
    default = None
    if one.default is not MISSING:
        default = one.default
    is_empty = default is False or default in (None, (), "")
    how: dict[str, Any] = {
        "cls": OptionInSection,
        "section": described.section,
        "help": described.help,
        "default": default,
        "required": one.default is MISSING and one.default_factory is MISSING,
        "show_default": described.shown or not is_empty,
    }

    if value_type is bool:
        is_plain = "/" in flag or (default is False and not is_optional)
        if not is_plain:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
        return click.option(flag, *other_flags, one.name, is_flag=True, **how)

    how["metavar"] = described.metavar
    if is_several:
        words = ",".join(map(str, default or ()))
        how["multiple"] = True
        how["default"] = (words,) if words else ()
        how["show_default"] = described.shown or bool(words)
        how["callback"] = _list_callback(described, value_type, is_optional)
    elif described.parse is not None:
        how["callback"] = lambda _ctx, _param, given: _read(given, described, value_type)
    else:
        how["type"] = _click_type(described, value_type)
    if how["required"]:
        del how["default"]  # click would treat a default of None as a value
    return click.option(flag, *other_flags, one.name, **how)


def _type_of(hint: Any) -> tuple[type, bool, bool]:
    """Return the type of a single value, whether the option may be None, and whether it may have several values."""
    is_optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
        is_optional = True
    if typing.get_origin(hint) in (tuple, list, Sequence):
        return typing.get_args(hint)[0], is_optional, True
    return hint, is_optional, False


def _click_type(described: Option, value_type: type) -> Any:
    if described.choices:
        return Choice(list(described.choices))
    if value_type is Path:
        return click.Path(path_type=Path)
    if value_type is Any:
        return str
    bounds = described.bounds
    if value_type not in (int, float) or bounds == Bounds():
        return value_type
    low = None if math.isinf(bounds.low) else value_type(bounds.low)
    upper = min(bounds.high, bounds.below)
    high = None if math.isinf(upper) else value_type(upper)
    ranges = {int: click.IntRange, float: click.FloatRange}
    return ranges[value_type](low, high, min_open=bounds.is_open, max_open=bounds.below < math.inf)


def _list_callback(described: Option, value_type: type, is_optional: bool) -> Callable:
    """Return a click callback that splits values at commas and rejects duplicates; ``''`` means no values."""

    def convert(_ctx: click.Context, _param: click.Parameter, given: Sequence[str]) -> Optional[tuple]:
        words = [word for text in given for word in split_at_commas(text)]
        found = tuple(_read(word, described, value_type) for word in words)
        if twice := [value for value in found if found.count(value) > 1]:
            raise click.BadParameter(f"{twice[0]} is specified twice")
        if given or not is_optional:
            return found
        return None

    return convert


def _read(text: Any, described: Option, value_type: type) -> Any:
    if not isinstance(text, str):  # the default
        return text
    try:
        return (described.parse or click.types.convert_type(_click_type(described, value_type)))(text)
    except UserError as error:
        raise click.BadParameter(str(error)) from None


class Choice(click.Choice):
    """A click choice with an error message that also suggests the closest matches."""

    def get_invalid_choice_message(self, value: Any, ctx: Optional[click.Context]) -> str:
        """Return the error message for a value that is not among the choices."""
        return super().get_invalid_choice_message(value, ctx).removesuffix(".") + nearest(value, self.choices)


class OptionInSection(click.Option):
    """A click option that is listed under a section of the command's help."""

    def __init__(self, *args: Any, section: str, **more: Any):
        super().__init__(*args, **more)
        self.section = section


def with_kept_lines(text: Optional[str]) -> Optional[str]:
    r"""Replace ``\b`` in a raw docstring with click's marker, which preserves the line breaks of the next paragraph."""
    if text is None:
        return None
    return text.replace(r"\b", "\b")


class Command(click.Command):
    """A command that groups its help into sections and, before it starts, checks that its outputs can be written."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self.help = with_kept_lines(self.help)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command after checking that its output paths can be written."""
        for name in OUTPUTS:
            if isinstance(place := ctx.params.get(name), Path):
                refuse_unwritable(place)
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(click.Group):
    """A command group whose help lists each command with the full first sentence of the command's help.

    If there is a default command, the group's help includes all of that command's help.

    Args:
        default: name of the command to run if the first argument is not a command; this command then receives all
            arguments.
    """

    command_class = Command
    group_class = type  # nested groups are of this class too

    def __init__(self, *args: Any, default: str = "", **more: Any):
        super().__init__(*args, **more)
        self.help = with_kept_lines(self.help)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default command unless the arguments start with the name of a command, even a misspelled one."""
        name = args[0] if args else ""
        is_known = name in self.commands or name in ctx.help_option_names
        if self.default and args and not is_known:
            is_given = name.startswith("-") or Path(name).exists()  # an option, or the path of an argument
            if not is_given and get_close_matches(name, self.commands):
                raise click.NoSuchCommand(name, possibilities=self.commands, ctx=ctx)
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the group's options or, if it has a default command, that command's help; then list all commands."""
        if not self.default:
            super().format_options(ctx, formatter)
            return
        default = self.commands[self.default]
        inner = click.Context(default, info_name=self.default, parent=ctx, **default.context_settings)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(f"Without COMMAND, `{ctx.command_path}` runs `{inner.command_path}`:")
        formatter.write_paragraph()
        default.format_usage(inner, formatter)
        default.format_help_text(inner, formatter)
        default.format_options(inner, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands, each with the first sentence of its help."""
        rows = [
            (name, self.commands[name].get_short_help_str(limit=1000).removesuffix(".") + ".")
            for name in self.list_commands(ctx)
            if not self.commands[name].hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
