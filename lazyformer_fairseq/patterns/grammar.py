"""The pattern language, in which a string of sublayers defines an architecture.

Each letter represents one residual sublayer, from bottom to top; :mod:`~lazyformer_fairseq.patterns.kinds` contains the
table of letters. A letter may be followed by settings in square brackets, as in ``m[width=3]``. ``x`` repeats a letter
or a group: ``(sff)x5 (f)x9`` is PAR BERT (PAR Transformer, Table 4). ``Mb`` is LazyFormer's lazy block of b layers
(section 3.1), which is one ``sf`` followed by b - 1 copies of ``lf``. Thus, ``M2x6`` is ``(sflf)x6``, and ``M5M3M2M2``
has four blocks.
Whitespace is ignored. This module does not import torch, so patterns can be parsed, searched and counted anywhere.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.attention_variants import Value
from lazyformer_fairseq.patterns.kinds import (
    CAUSAL,
    KEYS_AND_VALUES,
    Kind,
    describe_letters,
    find_kind,
    kinds,
    lazy_block,
)

LINE = 100  # the maximum number of pattern characters shown in an error message
# Both limits are far beyond any trainable model. They prevent "((((s)x999)x999)x999)x999" from exhausting memory and
# "((((((..." from overflowing the stack.
MAX_SUBLAYERS = 2_000
MAX_DEPTH = 100
DIGITS = re.compile("[0-9]*")


@dataclass(frozen=True)
class PlannedSublayer:
    """A sublayer of a plan.

    Attributes:
        kind: The sublayer's row in the table of kinds.
        settings: The settings that differ from their defaults, as (name, value) in the order of the kind's settings.
        consumers: For each higher sublayer that reads from this one, the output that it reads, such as DISTRIBUTION.
        producer: The lower sublayer that this one reads from. None if it reads from no sublayer, or if the plan has not
            been connected yet.
    """

    kind: Kind
    settings: tuple[tuple[str, Value], ...] = ()
    consumers: tuple[str, ...] = ()
    producer: Optional["PlannedSublayer"] = None

    @property
    def values(self) -> dict[str, Any]:
        """The values of all settings by name, including defaults."""
        return {setting.name: setting.default for setting in self.kind.settings} | dict(self.settings)

    @property
    def shaper(self) -> "PlannedSublayer":
        """The sublayer that determines the scores through its settings: the producer of the keys, or this sublayer."""
        if self.kind.reads == KEYS_AND_VALUES and self.producer:
            return self.producer
        return self

    @property
    def text(self) -> str:
        """The sublayer as written in a pattern, such as ``m[width=3]``."""
        if not self.settings:
            return self.kind.letter
        inner = ",".join(name if value is True else f"{name}={value}" for name, value in self.settings)
        return f"{self.kind.letter}[{inner}]"


def expand(pattern: str) -> str:
    """Expand a pattern into individual sublayers: ``expand("M2x2 (f)x3")`` returns ``"sflfsflffff"``.

    Raises:
        UserError: If the pattern is invalid; see :func:`plan`.
    """
    return "".join(sublayer.text for sublayer in plan(pattern))


def plan(pattern: str, direction: Optional[str] = None) -> tuple[PlannedSublayer, ...]:
    """Parse a pattern into the sublayers to build, from bottom to top.

    Args:
        pattern: A string of sublayers.
        direction: ENCODER or CAUSAL, to reject kinds and settings that models of this direction do not support. None
            accepts all kinds and settings.

    Raises:
        UserError: If the pattern is empty or has too many sublayers; if it contains an unknown letter or setting, an
            out-of-bounds value, conflicting settings, unbalanced or empty brackets, or a missing or zero repeat count;
            or if a sublayer lacks a producer or does not support `direction`. The message points to the character.
    """
    parser = _Parser(pattern)
    elements, end = parser.sequence(0)
    assert end == len(pattern)
    if not elements:
        raise UserError(f"sublayer pattern {pattern!r} is empty; use, for example, M2x6, (sf)x12 or '(sff)x5 (f)x9'")
    for element in elements:
        if direction is not None and direction not in element.sublayer.kind.modules:
            kind = element.sublayer.kind
            others = " or ".join(element.sublayer.kind.modules)
            parser.fail(
                element.position,
                f"{kind.name} ({kind.letter}) is for {others} models, not for {direction} models",
            )
        if direction is not None:
            parser.check(element.sublayer, element.position, causal=direction == CAUSAL)
    connected = connect([element.sublayer for element in elements])
    for element, sublayer in zip(elements, connected, strict=True):
        if sublayer.producer is None:
            continue
        if why := sublayer.kind.check_producer(sublayer.producer.values):
            parser.fail(element.position, f"this {sublayer.kind.letter} cannot read {sublayer.producer.text}: {why}")
    return connected


def is_possible(pattern: str, direction: str) -> bool:
    """Return whether :func:`plan` accepts the pattern."""
    try:
        return bool(plan(pattern, direction))
    except UserError:
        return False


def count_kinds(pattern: str) -> dict[str, int]:
    """Count the sublayers of each kind, by letter, except identities."""
    found = [planned.kind for planned in plan(pattern)]
    return {kind.letter: found.count(kind) for kind in kinds() if not kind.is_identity}


def connect(sublayers: Sequence[PlannedSublayer]) -> tuple[PlannedSublayer, ...]:
    """Connect each sublayer to its producer, the nearest sublayer below that provides the output it reads."""
    connected = list(sublayers)
    consumers: list[list[str]] = [[] for _ in sublayers]
    producers = producer_indices(sublayers)
    for index, (sublayer, producer) in enumerate(zip(sublayers, producers, strict=True)):
        if producer is not None:
            consumers[producer].append(str(sublayer.kind.reads))
            connected[index] = replace(sublayer, producer=connected[producer])
    return tuple(
        replace(sublayer, consumers=tuple(found)) for sublayer, found in zip(connected, consumers, strict=True)
    )


def producer_indices(sublayers: Sequence[PlannedSublayer]) -> tuple[Optional[int], ...]:
    """Return the index of each sublayer's producer, or None for sublayers without a producer."""
    newest: dict[str, int] = {}
    places = []
    for index, sublayer in enumerate(sublayers):
        places.append(newest[sublayer.kind.reads] if sublayer.kind.reads else None)
        newest |= dict.fromkeys(sublayer.kind.hands_on, index)
    return tuple(places)


def split_sublayers(expanded: str) -> list[str]:
    """Split an expanded pattern into sublayers: ``"sm[width=3]-f"`` into s, m[width=3], - and f."""
    return re.findall(r"[^\s\[\]](?:\[[^\]]*\])?", expanded)


def read_sublayer(text: str) -> PlannedSublayer:
    """Parse a single sublayer from its letter or name, such as ``s``, ``m[width=3]`` or ``identity``.

    Raises:
        UserError: If the text does not describe exactly one sublayer.
    """
    kind = find_kind(text)
    if kind is not None:
        return PlannedSublayer(kind)
    parser = _Parser(text)
    first = find_kind(text[:1])
    if first is not None and text[0] == first.letter:
        sublayer, end = parser.sublayer(0)
        if end == len(text):
            return sublayer
    raise UserError(f"{text!r} is not a sublayer: use {describe_letters()}, optionally with settings in brackets")


def producers(what: str) -> str:
    """Return the letters of the kinds that provide the output `what`, joined by "or"."""
    return " or ".join(kind.letter for kind in kinds() if what in kind.hands_on)


class Element(NamedTuple):
    """A sublayer and its position in the pattern."""

    sublayer: PlannedSublayer
    position: int


class _Parser:
    """A recursive-descent parser for one pattern.

    Its parsing methods take a start position, and return the parsed object and the position after it.
    """

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.depth = 0

    def sequence(
        self,
        start: int,
        opened_at: Optional[int] = None,
        below: frozenset[str] = frozenset(),
    ) -> tuple[list[Element], int]:
        """Parse units up to the end of the pattern, or up to the bracket that closes the one at `opened_at`.

        `below` contains the outputs provided by the sublayers below this sequence. It is used to check that every
        consumer has a producer.
        """
        elements: list[Element] = []
        position = start
        while position < len(self.pattern):
            character = self.pattern[position]
            if character.isspace():
                position += 1
            elif character == ")":
                if opened_at is None:
                    self.fail(position, "this bracket has no matching opening bracket")
                if not elements:
                    self.fail(opened_at, "these brackets are empty")
                return elements, position + 1
            else:
                unit, end = self.unit(position, below)
                times, position = self.repeat(end)
                if len(elements) + len(unit) * times > MAX_SUBLAYERS:
                    self.fail(end, f"the pattern has more than {MAX_SUBLAYERS} sublayers")
                elements += unit * times
                below = below.union(*(element.sublayer.kind.hands_on for element in unit))
        if opened_at is not None:
            self.fail(opened_at, "this bracket is never closed")
        return elements, position

    def unit(self, position: int, below: frozenset[str]) -> tuple[list[Element], int]:
        """Parse one sublayer, one group in brackets or one lazy block ``Mb``."""
        character = self.pattern[position]
        if character == "(":
            self.depth += 1
            if self.depth > MAX_DEPTH:
                self.fail(position, f"brackets are nested more than {MAX_DEPTH} levels deep")
            elements, end = self.sequence(position + 1, opened_at=position, below=below)
            self.depth -= 1
            return elements, end
        if character == "M":
            layers, end = self.number(position + 1, "M needs the number of layers in the block, as in M2x6")
            letters = lazy_block(layers)
            return [Element(read_sublayer(letter), position) for letter in letters], end
        sublayer, end = self.sublayer(position)
        needed = sublayer.kind.reads
        if needed and needed not in below:
            self.fail(position, f"this {character} has no {producers(needed)} below it to reuse the {needed} from")
        return [Element(sublayer, position)], end

    def sublayer(self, position: int) -> tuple[PlannedSublayer, int]:
        """Parse a letter and its optional settings in square brackets."""
        letter = self.pattern[position]
        kind = find_kind(letter)
        if kind is None or kind.letter != letter:
            self.fail(
                position,
                f"unknown letter {letter!r}: use {describe_letters()}, or install the package that adds this letter",
            )
        end = position + 1
        if self.pattern[end : end + 1] != "[":
            return PlannedSublayer(kind), end
        given, end = self.settings(kind, end)
        names = [setting.name for setting in kind.settings if setting.name in given]
        in_order = tuple((name, given[name]) for name in names)
        sublayer = PlannedSublayer(kind, in_order)
        self.check(sublayer, position)
        return sublayer, end

    def check(self, sublayer: PlannedSublayer, position: int, causal: Optional[bool] = None) -> None:
        """Reject conflicting settings; the caret in the error message points to one of them."""
        wrong = sublayer.settings and sublayer.kind.check and sublayer.kind.check(sublayer.values, causal)
        if wrong:
            name, why = wrong
            found = re.compile(rf"[\[,\s]({name})\s*[=,\]]").search(self.pattern, position)
            self.fail(position if found is None else found.start(1), why)

    def settings(self, kind: Kind, opened_at: int) -> tuple[dict[str, Value], int]:
        """Parse ``[name=value, ...]`` and return the values that differ from their defaults."""
        closed_at = self.pattern.find("]", opened_at)
        if closed_at < 0:
            self.fail(opened_at, "this bracket is never closed")
        found: dict[str, Value] = {}
        start = opened_at + 1
        for part in self.pattern[start:closed_at].split(","):
            at = start + len(part) - len(part.lstrip())
            name, value = self.setting(kind, part, at)
            if name in found:
                self.fail(at, f"{name} is specified twice")
            found[name] = value
            start += len(part) + 1
        defaults = {setting.name: setting.default for setting in kind.settings}
        changed = {name: value for name, value in found.items() if value != defaults[name]}
        return changed, closed_at + 1

    def setting(self, kind: Kind, text: str, at: int) -> tuple[str, Value]:
        """Parse one ``name=value``, or the ``name`` of a switch, starting at position `at`."""
        name, equals, value = (part.strip() for part in text.partition("="))
        known = [setting.name for setting in kind.settings]
        setting = kind.setting(name)
        if setting is None:
            near = get_close_matches(name, known, n=1)
            if near:
                hint = f"did you mean {near[0]}?"
            else:
                hint = f"it has {', '.join(known) or 'no settings'}"
            self.fail(at, f"{kind.name} ({kind.letter}) has no setting {name!r}; {hint}")
        if setting.default is False:
            if equals:
                self.fail(at + text.strip().index("="), f"{name} takes no value: write {kind.letter}[{name}]")
            return name, True
        if not equals or not value:
            example = setting.default or (setting.choices or (f"{max(setting.low, 1):g}",))[0]
            self.fail(at, f"{name} needs a value, as in {kind.letter}[{name}={example}]")
        try:
            return name, setting.read(value)
        except ValueError as error:
            self.fail(at + text.strip().index("=") + 1, str(error))

    def repeat(self, position: int) -> tuple[int, int]:
        """Parse an optional ``xN`` after a unit."""
        if self.pattern[position : position + 1] != "x":
            return 1, position
        return self.number(position + 1, "x needs the number of repeats, as in (sf)x12")

    def number(self, position: int, needed: str) -> tuple[int, int]:
        matched = DIGITS.match(self.pattern, position)
        digits = matched[0] if matched else ""
        if not digits:
            self.fail(position - 1, needed)
        if len(digits) > len(str(MAX_SUBLAYERS)):
            self.fail(position, f"the pattern has more than {MAX_SUBLAYERS} sublayers")
        value = int(digits)
        if value == 0:
            self.fail(position, "the repeat count or block size must be 1 or more")
        return min(value, MAX_SUBLAYERS + 1), position + len(digits)

    def fail(self, position: int, why: str) -> NoReturn:
        """Raise an error that points to a position; for long patterns, only a window around it is shown."""
        if len(self.pattern) <= LINE:
            first = 0
        else:
            first = max(0, min(position - LINE // 2, len(self.pattern) - LINE))
        part = self.pattern[first : first + LINE]
        before = "..." if first > 0 else ""
        after = "..." if first + LINE < len(self.pattern) else ""
        shown = f"{before}{part}{after}"
        caret = " " * (len(before) + position - first)
        raise UserError(f"sublayer pattern {shown!r}, character {position + 1}: {why}\n  {shown}\n  {caret}^")
