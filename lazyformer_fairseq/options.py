"""An option is written once, as a field of a settings dataclass.

The field has the option's name, type, default, bounds and help. From it come the click option with its ``--help``
(:func:`takes`) and the check of values from files and from Python (:func:`check`). :class:`Command` and :class:`Group`
are the one way to dispatch commands.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import click

from lazyformer_fairseq.errors import UserError, nearest, whole_number
from lazyformer_fairseq.storage.atomic import refuse_unwritable

OUTPUTS = ("out", "output", "json")  # arguments and options of commands that name what is made
SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
MOST_GPUS = 10**6
# Options of fairseq-train, by name: the least value, and the one that is too much. Every command that passes them on
# looks here, and so does fairseq-train itself for our tasks.
SIZES = ("embed_dim", "ffn_embed_dim", "attention_heads")
LENGTHS = (
    *("tokens_per_sample", "tgt_len", "valid_tgt_len", "max_positions", "relative_position_max_distance"),
    *(f"{side}_{size}" for side in ("encoder", "decoder") for size in SIZES),
)
COUNTS = (
    *("batch_size", "batch_size_valid", "max_sentences", "max_tokens", "max_tokens_valid", "update_freq"),
    *("sequences_per_update", "log_interval", "save_interval", "validate_interval", "required_batch_size_multiple"),
    *("max_skipped_updates", "fp16_init_scale", "adaptive_softmax_factor"),
)
MAYBE_NONE = (
    *("max_rollbacks", "num_workers", "mem_len", "relative_position_buckets", "token_types", "max_epoch", "max_update"),
    *("warmup_updates", "total_num_update", "save_interval_updates", "validate_interval_updates", "data_buffer_size"),
)
AMOUNTS = (
    *("lr", "min_lr", "end_learning_rate", "weight_decay", "clip_norm", "max_weight_norm", "loss_spike", "init_std"),
    *("stop_time_hours", "log_seconds", "adam_eps", "lamb_eps", "layer_norm_eps", "power", "adam_lr"),
    *("distill_words_weight", "distill_attention_weight", "distill_temperature", "min_loss_scale", "experts_loss"),
)
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "pooler_dropout")
SHARES = (*DROPOUTS, "adam_betas", "lamb_betas", "muon_momentum")
WHOLE_SHARES = ("mask_prob", "leave_unmasked_prob", "random_token_prob", "warmup_ratio", "decay_share")
LONGEST = 10**7
MOST = 10**9
ONE_ITSELF = math.nextafter(1, 2)
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(LENGTHS, (1, LONGEST)),
    **dict.fromkeys(COUNTS, (1, MOST)),
    **dict.fromkeys(MAYBE_NONE, (0, MOST)),
    **dict.fromkeys(("clamp_len", "keep_interval_updates", "keep_last_epochs", "patience"), (-1, MOST)),
    **dict.fromkeys(AMOUNTS, (0, math.inf)),
    **dict.fromkeys(SHARES, (0, 1)),
    **dict.fromkeys(WHOLE_SHARES, (0, ONE_ITSELF)),
    **{"seed": (0, 2**32), "warmup_init_lr": (-1, math.inf), "lr_period_updates": (-1, math.inf)},
}


@dataclass(frozen=True)
class Option:
    """What a field of settings says of itself beside its name, type and default.

    Attributes:
        help: for ``--help``; the default is added.
        flags: in place of ``--name-of-the-field``; ``--yes/--no`` for a switch with two names.
        low, high: inclusive bounds of a number; with `is_open` the lower one is exclusive.
        choices: of a word.
        parse: turns the text into the value, and raises a UserError; in place of the type's own way.
        metavar: of the value, in ``--help``.
        section: of ``--help``.
        shown: the default in words, where it is worked out later.
    """

    help: str
    flags: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    is_open: bool = False
    choices: Sequence[str] = ()
    parse: Optional[Callable[[str], Any]] = None
    metavar: Optional[str] = None
    section: str = "Options"
    shown: str = ""


def option(default: Any, help: str, *flags: str, **more: Any) -> Any:
    """A field of a settings dataclass that is an option; MISSING as the default makes it required.

    Args:
        more: see :class:`Option`.
    """
    metadata = {"option": Option(help, flags, **more)}
    if isinstance(default, (list, dict, set)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# Options of several commands, as in `device: Optional[str] = DEVICE()`; more may be given, as DEVICE(help="...").
DEVICE = partial(option, default=None, help="Where it runs.", choices=("cpu", "cuda"), shown="cuda where there is one")
PRECISION = partial(
    option,
    default=None,
    help="Of all numbers.",
    choices=("fp32", "bf16", "fp16"),
    shown="on GPUs bf16 where all have it, else fp16; on a CPU fp32",
)


class Gpus(NamedTuple):
    """How many, and bytes of each where somebody said so; what ``--gpus 8`` and ``--gpus 8x16GB`` mean."""

    count: int
    memory: Optional[int] = None

    def __str__(self) -> str:
        return f"{self.count}" + (f"x{self.memory // 10**6}MB" if self.memory else "")


def read_gpus(text: str) -> Gpus:
    """``8`` or ``8x16GB``. Raises a UserError for what is neither."""
    count, _, size = text.partition("x")
    number = whole_number(count)
    if number is None or not 1 <= number <= MOST_GPUS:
        raise UserError(f"{text!r} is no number of GPUs; write for example 8, or 8x16GB")
    return Gpus(number, read_size(size) if "x" in text else None)


def read_size(text: str) -> int:
    """Bytes of ``16GB`` or ``16GiB``. Raises a UserError for what is none of these."""
    found = re.fullmatch(r"(\d*\.?\d+)(m|g)(i?)b", text.lower())
    size = found and float(found[1]) * (2**10 if found[3] else 10**3) ** {"m": 2, "g": 3}[found[2]]
    if not size or size >= 2**60:
        raise UserError(f"{text!r} is no size; write for example 16GB, 16GiB or 800MB")
    return int(size)


def takes(settings: type, into: str = "settings") -> Callable:
    """A decorator: the command takes the options of a settings dataclass.

    Args:
        into: the argument that gets the settings; "" for an argument a field, where the command still works some out.
    """
    fields = [one for one in dataclasses.fields(settings) if "option" in one.metadata]
    hints = typing.get_type_hints(settings)

    def decorate(command: Callable) -> Callable:
        def run(**given: Any) -> Any:
            if into:
                given[into] = settings(**{one.name: given.pop(one.name) for one in fields})
            return command(**given)

        run.__doc__ = command.__doc__
        run.__name__ = command.__name__
        run.__click_params__ = list(getattr(command, "__click_params__", ()))
        for one in reversed(fields):
            _click_option(one, hints[one.name])(run)
        return run

    return decorate


def read_words(words: Sequence[str], *settings: type) -> dict[str, Any]:
    """What the words of a command line, such as ``--dropout 0.1``, give of the options of these dataclasses, by name.

    Raises a UserError for any other word, and a value that an option cannot have.
    """
    known = click.Command("options", params=[])
    for each in settings:
        known.params += takes(each, into="")(lambda **_: None).__click_params__
    try:
        context = known.make_context("options", list(words))
    except click.NoSuchOption as error:
        flags = [flag for one in known.params for flag in one.opts]
        said = f"{error.option_name}: no such option here{nearest(error.option_name, flags)}"
        raise UserError(said) from None
    except click.UsageError as error:
        raise UserError(error.format_message()) from None
    source = click.core.ParameterSource.COMMANDLINE
    given = {name: value for name, value in context.params.items() if context.get_parameter_source(name) is source}
    refuse_out_of_bounds(given)
    return given


def chosen(settings: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options, by name, that a settings dataclass has."""
    return {one.name: options[one.name] for one in dataclasses.fields(settings) if one.name in options}


def check(settings: Any) -> None:
    """Raises a UserError, which names the option, where a value is out of its bounds or none of its choices."""
    for one in dataclasses.fields(settings):
        said = one.metadata.get("option")
        value = getattr(settings, one.name)
        if said is None or value is None:
            continue
        if value == () and one.default:
            raise UserError(f"{flag_of(one)}: give one at least")
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if said.choices and each not in said.choices:
                raise UserError(f"{flag_of(one)} {each}: is one of {', '.join(said.choices)}")
            if isinstance(each, (int, float)) and not isinstance(each, bool) and not _within(said, each):
                raise UserError(f"{flag_of(one)} {each}: must be {_bounds(said)}")


def refuse_given(settings: Any, names: Iterable[str], why: str) -> None:
    """Raises a UserError for the first of these options that is not as it is by default."""
    for name in names:
        if getattr(settings, name) != getattr(type(settings), name):
            raise UserError(f"--{name.replace('_', '-')}: {why}")


def refuse_out_of_bounds(options: Mapping[str, Any]) -> None:
    """Raises a UserError for one of fairseq's options or ours, by name, that is not within :data:`BOUNDS`.

    A value may be a number, several, or the text of either.
    """
    for name, (least, end) in BOUNDS.items():
        given = str(options.get(name, None))
        if not given.strip():
            raise UserError(f"--{name.replace('_', '-')} {given!r}: must be a number")
        if name == "mask_prob":
            given = given.replace(":", " ", 1)
        for text in re.findall(r"[^][(),\s]+", given):
            if text in ("None", "null") or "$" in text:
                continue
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            kind = "whole number" if end in (LONGEST, MOST) else "number"
            is_none = math.isnan(value) or (kind != "number" and value % 1)
            if is_none or not least <= value < end:
                low = f"from {least} to {'below ' * (end == 1)}1" if end < 2 else f"{least} or more"
                must = f"a {kind}, {low}" if is_none else f"below {end:,}" if value >= end > 2 else low
                raise UserError(f"--{name.replace('_', '-')} {text}: must be {must}")


def mask_shares(given: Any) -> tuple[float, float]:
    """The first update's share of ``--mask-prob``, and the last one's: of ``0.3:0.15``, or of one number.

    Raises a UserError for what is neither.
    """
    first, colon, last = str(given).partition(":")
    try:
        return float(first), float(last if colon else first)
    except ValueError:
        raise UserError(
            f"--mask-prob {given}: give a share, as 0.15, or those of the first and the last update, as 0.3:0.15"
        ) from None


def computed_tokens(task: Mapping[str, Any], tokens: int, predicted: int) -> int:
    """Of a text of so many tokens, those that an encoder computes: of ``masked_permuted_lm`` predicted ones come again.

    Args:
        task: fairseq's settings of it, by name.
    """
    if task.get("_name") != "masked_permuted_lm":
        return tokens
    return tokens + predicted * (1 if str(task.get("permuted_only")) == "True" else 2)


def flag_of(one: dataclasses.Field) -> str:
    """``--name-of-the-field``, or the flag that the field gives."""
    return (one.metadata["option"].flags or (f"--{one.name.replace('_', '-')}",))[0]


def duration(text: str) -> float:
    """Seconds of ``90s``, ``10min`` or ``1.5h``. Raises a UserError for what is none of these."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if not found or found[2] not in SECONDS or not float(found[1]):
        raise UserError(f"{text!r} is no time; write for example 90s, 10min or 1.5h")
    return float(found[1]) * SECONDS[found[2]]


def _click_option(one: dataclasses.Field, hint: Any) -> Callable:
    said: Option = one.metadata["option"]
    kind, is_optional, is_several = _kind_of(hint)
    flag = flag_of(one)
    default = None if one.default is MISSING else one.default
    how: dict[str, Any] = {"cls": OptionInSection, "section": said.section, "help": said.help, "default": default}
    how["required"] = one.default is MISSING and one.default_factory is MISSING
    how["show_default"] = said.shown or not (default is False or default in (None, (), ""))
    if kind is bool:
        is_pair = "/" in flag or (default is False and not is_optional)
        if is_pair:
            names = flag
        else:
            names = f"{flag}/--no-{flag.removeprefix('--')}"
        return click.option(names, *said.flags[1:], one.name, is_flag=True, **how)
    how["metavar"] = said.metavar
    if is_several:
        shown = ",".join(map(str, default or ()))
        how |= {"multiple": True, "default": (shown,) if shown else (), "show_default": said.shown or bool(shown)}
        how |= {"type": str, "callback": _several(said, kind, is_optional)}
    elif said.parse is not None:
        convert = lambda ctx, param, given: _read(given, said, kind) if isinstance(given, str) else given  # noqa: E731
        how |= {"type": str, "callback": convert}
    else:
        how["type"] = _click_type(said, kind)
    if how["required"]:
        del how["default"]  # a None that is given counts as a value
    return click.option(flag, *said.flags[1:], one.name, **how)


def _kind_of(hint: Any) -> tuple[type, bool, bool]:
    """The type of one value, whether None stands for none, whether there may be several."""
    is_optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
        is_optional = True
    if typing.get_origin(hint) in (tuple, list, Sequence):
        return typing.get_args(hint)[0], is_optional, True
    return hint, is_optional, False


class _Finite(click.FloatRange):
    """Neither NaN, which is within all bounds for click, nor infinite."""

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> float:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no finite number.", param, ctx)
        return found


class _Whole(click.IntRange):
    """No number that nothing here can have so many of."""

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> int:
        if abs(found := super().convert(value, param, ctx)) >= 2**32:
            self.fail(f"{value} is too large a number.", param, ctx)
        return found


def _click_type(said: Option, kind: type) -> Any:
    if said.choices:
        return click.Choice(list(said.choices))
    if kind in (int, float):
        low, high = (None if math.isinf(bound) else kind(bound) for bound in (said.low, said.high))
        if kind is float:
            return _Finite(low, high, min_open=said.is_open)
        return kind if low is high is None else _Whole(low, high)
    return click.Path(path_type=Path) if kind is Path else str if kind is Any else kind


def _several(said: Option, kind: type, is_optional: bool) -> Callable:
    """Commas, but for those in square brackets, divide values; none twice. ``''`` stands for no value at all."""

    def convert(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> Optional[tuple]:
        found = tuple(_read(word, said, kind) for text in given for word in divided(text))
        if twice := [value for value in found if found.count(value) > 1]:
            raise click.BadParameter(f"{twice[0]} is there twice")
        if given or not is_optional:
            return found
        return None

    return convert


def _read(text: str, said: Option, kind: type) -> Any:
    try:
        return (said.parse or click.types.convert_type(_click_type(said, kind)))(text)
    except UserError as error:
        raise click.BadParameter(str(error)) from None


def divided(text: str) -> list[str]:
    """``"a,b[c,d]"`` as a and b[c,d]: commas divide, but not in square brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def _within(said: Option, value: float) -> bool:
    return said.low <= value <= said.high and not (said.is_open and value == said.low) and not math.isnan(value)


def _bounds(said: Option) -> str:
    if math.isfinite(said.low):
        words = [f"{'more than' if said.is_open else 'at least'} {said.low:g}"]
    else:
        words = []
    words += [f"at most {said.high:g}"] if math.isfinite(said.high) else []
    return " and ".join(words) or "a number"


class OptionInSection(click.Option):
    """An option that stands in a section of its command's help."""

    def __init__(self, *args: Any, section: str, **more: Any):
        super().__init__(*args, **more)
        self.section = section


class Command(click.Command):
    """A command whose help has sections.

    Args:
        takes_words: an option of several values takes all words up to the next option, as in ``--seeds 1 2 3``; for
            commands whose arguments stand before their options.
    """

    def __init__(self, *args: Any, takes_words: bool = False, **more: Any):
        super().__init__(*args, **more)
        self.takes_words = takes_words

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._one_value_an_option(args) if self.takes_words else args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, once it is known that what it makes can be written."""
        for name in OUTPUTS:
            if isinstance(place := ctx.params.get(name), Path):
                refuse_unwritable(place)
        return super().invoke(ctx)

    def _one_value_an_option(self, args: list[str]) -> list[str]:
        several = {flag for param in self.params if getattr(param, "multiple", False) for flag in param.opts}
        found: list[str] = []
        current = None
        for arg in args:
            if re.match(r"--?[A-Za-z]", arg):
                if arg in several:
                    current = arg
                else:
                    current = None
                found += [] if current else [arg]
            else:
                found += [current, arg] if current else [arg]
        return found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(click.Group):
    """A group that lists its commands with the whole first sentence of each.

    Args:
        default: the command that is meant where the first word is no name of a command: an argument of it.
    """

    command_class = Command
    group_class = type  # groups in it are of this class too

    def __init__(self, *args: Any, default: str = "", **more: Any):
        super().__init__(*args, **more)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.default and args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [
            (name, self.commands[name].get_short_help_str(limit=1000).removesuffix(".") + ".")
            for name in self.list_commands(ctx)
            if not self.commands[name].hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
