"""Which sublayer of a trained model each sublayer of a new pattern takes its weights from."""

from collections.abc import Sequence
from typing import NamedTuple, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.sublayers.attention_heads import AttentionSublayer
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import ENCODER

Plan = Sequence[PlannedSublayer]
Alignment = tuple[Optional[int], ...]

NONE = "-"  # in words for "from no sublayer"


class _Value(NamedTuple):
    """Of an alignment, compared in this order; less `depth` is better, so it counts below zero."""

    pairs: int = 0
    likeness: int = 0
    depth: int = 0

    def plus(self, other: "_Value") -> "_Value":
        return _Value(*(one + another for one, another in zip(self, other, strict=True)))


def align(old: Plan, new: Plan) -> Alignment:
    """For each new sublayer, the number of the old one that it starts from, or None.

    Both orders are kept, and no old sublayer serves twice. Of all such alignments it is the one with the most pairs; of
    these, the one whose pairs are most alike (:func:`likeness`); of these, the one whose pairs are nearest in depth,
    which is measured from 0 to 1 and squared. Found by dynamic programming over all pairs.
    """
    rows, columns = _with_weights(old), _with_weights(new)
    best = [[_Value()] * (len(columns) + 1) for _ in range(len(rows) + 1)]
    paired: dict[tuple[int, int], bool] = {}
    for i, row in enumerate(rows, 1):
        for j, column in enumerate(columns, 1):
            skipped = max(best[i - 1][j], best[i][j - 1])
            alike = likeness(old[row], new[column])
            depth = ((2 * i - 1) * len(columns) - (2 * j - 1) * len(rows)) ** 2
            together = best[i - 1][j - 1].plus(_Value(1, alike, -depth)) if alike else skipped
            paired[i, j] = bool(alike) and together >= skipped
            best[i][j] = max(together, skipped)
    found: list[Optional[int]] = [None] * len(new)
    i, j = len(rows), len(columns)
    while i and j:
        if paired[i, j]:
            i, j = i - 1, j - 1
            found[columns[j]] = rows[i]
        elif best[i - 1][j] >= best[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return tuple(found)


def likeness(old: PlannedSublayer, new: PlannedSublayer) -> int:
    """3 for the same letter and settings, 2 for the same letter, 1 for two kinds of attention, else 0: no pair."""
    if old.kind is new.kind:
        return 3 if old.settings == new.settings else 2
    return int(all(issubclass(each.kind.module(ENCODER), AttentionSublayer) for each in (old, new)))


def given_alignment(words: Sequence[str], old: Plan, new: Plan) -> Alignment:
    """An alignment of the user's own: for each new sublayer the number of an old one, from 0, or "-".

    Raises:
        UserError: there are more or fewer than new sublayers; one is no old sublayer, or of a kind whose weights do not
            fit.
    """
    if len(words) != len(new):
        raise UserError(f"--from-sublayers: {len(words)} given, but the new pattern has {len(new)} sublayers")
    found: list[Optional[int]] = []
    for place, (word, planned) in enumerate(zip(words, new, strict=True)):
        number = None if word == NONE else int(word) if word.isdecimal() else len(old)
        if number is not None and number >= len(old):
            raise UserError(f"--from-sublayers: {word!r} is no sublayer of the old pattern, 0 to {len(old) - 1}, nor -")
        if number is not None and not planned.kind.is_identity and not likeness(old[number], planned):
            raise UserError(
                f"--from-sublayers: new sublayer {place} ({planned.text}) cannot take the weights of old sublayer "
                f"{number} ({old[number].text}): give - or another"
            )
        found.append(None if planned.kind.is_identity else number)
    return tuple(found)


def left_out(old: Plan, alignment: Alignment) -> list[int]:
    """The old sublayers that no new one takes its weights from."""
    return [index for index in _with_weights(old) if index not in alignment]


def _with_weights(plan: Plan) -> list[int]:
    return [index for index, planned in enumerate(plan) if not planned.kind.is_identity]
