"""The pattern language: a string of sublayers is the architecture.

Each letter is one residual sublayer, the lowest first:

    s   self-attention: computes its own distribution softmax(QK^T / sqrt(D) + bias)
    l   lazy attention: own values, on the distribution of the nearest ``s`` below (LazyFormer, section 2)
    f   feed-forward

Groups repeat with ``x``: ``(sff)x5 (f)x9`` is PAR BERT (PAR Transformer, Table 4). ``Mb`` is LazyFormer's lazy block of
b layers (section 3.1), ``sf`` followed by b - 1 times ``lf``: ``M2x6`` is ``(sflf)x6``, ``M5M3M2M2`` four blocks.
Spaces mean nothing. This module knows no torch: a pattern can be parsed, searched and counted anywhere.
"""

from dataclasses import dataclass
from typing import Optional

from lazyformer_fairseq.errors import UserError

KINDS = "slf"
# Far above any model that trains: they stop "((((s)x999)x999)x999)x999" and "((((((..." from filling memory and stack.
MAX_SUBLAYERS = 10_000
MAX_DEPTH = 100


@dataclass(frozen=True)
class PlannedSublayer:
    """One sublayer of a plan.

    Attributes:
        kind: ``s``, ``l`` or ``f``.
        reads: index of the ``s`` whose distribution an ``l`` reuses, ``None`` for the other kinds.
        readers: for an ``s``, how many ``l`` above read its distribution.
    """

    kind: str
    reads: Optional[int] = None
    readers: int = 0

    @property
    def is_read(self) -> bool:
        """Whether the distribution must be handed on."""
        return self.readers > 0


def expand(pattern: str) -> str:
    """Writes a pattern out letter by letter: ``expand("M2x2 (f)x3")`` is ``"sflfsflffff"``.

    Raises:
        UserError: naming the character, for an unknown letter, an unbalanced or empty bracket, a repeat without a
            number or of zero, an ``l`` with no ``s`` below it, and a pattern that is empty or too long.
    """
    letters, end = _Parser(pattern).sequence(0)
    assert end == len(pattern)
    if not letters:
        raise UserError(f"sublayer pattern {pattern!r} is empty; write for example M2x6, (sf)x12 or '(sff)x5 (f)x9'")
    return letters


def plan(pattern: str) -> tuple[PlannedSublayer, ...]:
    """Turns a pattern into the sublayers to build, lowest first.

    Raises:
        UserError: as :func:`expand` does.
    """
    letters = expand(pattern)
    source: Optional[int] = None
    reads: list[Optional[int]] = []
    for index, kind in enumerate(letters):
        source = index if kind == "s" else source
        reads.append(source if kind == "l" else None)
    return tuple(PlannedSublayer(kind, reads[index], reads.count(index)) for index, kind in enumerate(letters))


class _Parser:
    """Recursive descent over one pattern; every method takes a position and returns (letters, next position)."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.depth = 0

    def sequence(self, start: int, opened_at: Optional[int] = None, below: str = "") -> tuple[str, int]:
        """Units up to the end, or up to the bracket that closes the one opened at `opened_at`.

        `below` holds the letters under this sequence, for checking that every ``l`` has its ``s``.
        """
        letters, position = "", start
        while position < len(self.pattern):
            character = self.pattern[position]
            if character.isspace():
                position += 1
            elif character == ")":
                if opened_at is None:
                    self.fail(position, "this bracket closes none")
                if not letters:
                    self.fail(opened_at, "these brackets hold nothing")
                return letters, position + 1
            else:
                unit, end = self.unit(position, below + letters)
                times, position = self.repeat(end)
                if len(letters) + len(unit) * times > MAX_SUBLAYERS:
                    self.fail(end, f"this makes more than {MAX_SUBLAYERS} sublayers")
                letters += unit * times
        if opened_at is not None:
            self.fail(opened_at, "this bracket is never closed")
        return letters, position

    def unit(self, position: int, below: str) -> tuple[str, int]:
        """One letter, one bracketed group or one lazy block ``Mb``."""
        character = self.pattern[position]
        if character == "(":
            self.depth += 1
            if self.depth > MAX_DEPTH:
                self.fail(position, f"brackets are nested more than {MAX_DEPTH} deep")
            letters, end = self.sequence(position + 1, opened_at=position, below=below)
            self.depth -= 1
            return letters, end
        if character == "M":
            layers, end = self.number(position + 1, "M needs the number of layers in the block, as in M2x6")
            return "sf" + "lf" * (layers - 1), end
        if character not in KINDS:
            self.fail(position, f"unknown letter {character!r}: use s (self-attention), l (lazy) or f (feed-forward)")
        if character == "l" and "s" not in below:
            self.fail(position, "this l has no s below it whose distribution it could reuse")
        return character, position + 1

    def repeat(self, position: int) -> tuple[int, int]:
        """An optional ``xN`` after a unit."""
        if self.pattern[position : position + 1] != "x":
            return 1, position
        return self.number(position + 1, "x needs the number of repeats, as in (sf)x12")

    def number(self, position: int, needed: str) -> tuple[int, int]:
        end = position
        while end < len(self.pattern) and self.pattern[end] in "0123456789":
            end += 1
        if end == position:
            self.fail(position - 1, needed)
        if end - position > len(str(MAX_SUBLAYERS)):
            self.fail(position, f"this makes more than {MAX_SUBLAYERS} sublayers")
        value = int(self.pattern[position:end])
        if value == 0:
            self.fail(position, "a repeat or block of zero builds nothing; use 1 or more")
        return min(value, MAX_SUBLAYERS + 1), end

    def fail(self, position: int, why: str) -> None:
        raise UserError(
            f"sublayer pattern {self.pattern!r}, character {position + 1}: {why}\n  {self.pattern}\n  {' ' * position}^"
        )
