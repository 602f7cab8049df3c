"""Which stretches of which documents become examples; all as arrays, nothing is read."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.diagnostics.draws import Draws


@dataclass(frozen=True)
class PairsSettings:
    """All that decides the examples of a corpus.

    Attributes:
        rows: examples by split.
        min_length, max_length: tokens of both halves together, symbols at their ends not counted.
        gap: tokens left out between the halves, so that no sentence is cut in two by them.
        per_document: stretches of a document, at most.
        seed: of everything.

    Raises:
        UserError: no example is like that.
    """

    rows: Mapping[str, int] = field(default_factory=lambda: {"train": 10_000, "valid": 1_000, "test": 1_000})
    min_length: int = 500
    max_length: int = 2_000
    gap: int = 32
    per_document: int = 1
    seed: int = 1

    def __post_init__(self):
        if self.max_length < max(2, self.min_length):
            raise UserError(
                f"--min-length {self.min_length}, --max-length {self.max_length}: two halves have 2 tokens at least, "
                "and no length may be below the minimum"
            )
        if odd := [split for split, rows in self.rows.items() if rows < 4 or rows % 2]:
            raise UserError(
                f"--{odd[0]} {self.rows[odd[0]]}: half of them are of one document; give an even number from 4"
            )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Stretches(NamedTuple):
    """Parts of documents; all int64 (stretches,).

    Attributes:
        document: number of its document.
        start: tokens of the document before it.
        size: its tokens, the gap included.
    """

    document: np.ndarray
    start: np.ndarray
    size: np.ndarray

    def at(self, chosen: np.ndarray) -> "Stretches":
        return Stretches(*(values[chosen] for values in self))


class Halves(NamedTuple):
    """What examples are made of; all int64 (examples,).

    Attributes:
        first, second: numbers of the stretches that the halves are of.
        size: tokens of each of the two halves.
    """

    first: np.ndarray
    second: np.ndarray
    size: np.ndarray

    @property
    def targets(self) -> np.ndarray:
        """1 where both halves are of the same document."""
        return (self.first == self.second).astype(np.int64)


def choose_stretches(sizes: np.ndarray, settings: PairsSettings, draws: Draws) -> dict[str, Stretches]:
    """By split; no document is in two.

    Args:
        sizes: tokens of each document, (documents,).

    Raises:
        UserError: there are too few long documents.
    """
    shortest, longest = settings.min_length + settings.gap, settings.max_length + settings.gap
    order = draws.permutation(len(sizes))
    order = order[sizes[order] >= shortest]
    counts = np.clip(sizes[order] // longest, 1, settings.per_document)
    ends, first, found = np.cumsum(counts), 0, {}
    for split, rows in settings.rows.items():
        before = ends[first - 1] if first else 0
        last = int(np.searchsorted(ends, before + rows)) + 1
        if last > len(order):
            raise UserError(
                f"{int(counts.sum()):,} stretches of {shortest:,} to {longest:,} tokens in {len(order):,} of "
                f"{len(sizes):,} documents, but {sum(settings.rows.values()):,} examples are wanted; give more text, "
                "fewer --train, a smaller --min-length, or more --per-document"
            )
        document, count = order[first:last], counts[first:last]
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        step = np.repeat(sizes[document] // count, count)
        whole = Stretches(np.repeat(document, count), number * step, np.minimum(step, longest))
        found[split] = whole.at(np.arange(rows))
        first = last
    return found


def pair_halves(stretches: Stretches, gap: int, draws: Draws) -> Halves:
    """Half of the examples have both halves of their stretch, the others the second half of a stretch as long.

    Stretches are paired with their neighbour by length. A pair keeps its own second halves or exchanges them, and both
    its examples are cut to the shorter one's length: so each half is used once, and no half, no length and no position
    tells the answer.

    Args:
        stretches: an even number.

    Raises:
        UserError: too many neighbours are of the same document, whose halves cannot be exchanged.
    """
    shuffled = draws.permutation(len(stretches.size))
    by_length = shuffled[np.argsort(stretches.size[shuffled], kind="stable")].reshape(-1, 2)
    can_exchange = np.flatnonzero(stretches.document[by_length[:, 0]] != stretches.document[by_length[:, 1]])
    exchanged = len(by_length) // 2
    if len(can_exchange) < exchanged:
        raise UserError(
            "too few documents: most stretches of one length are of the same one; give fewer --per-document"
        )
    chosen = can_exchange[draws.permutation(len(can_exchange))[:exchanged]]
    second = by_length.copy()
    second[chosen] = second[chosen, ::-1]
    size = (stretches.size[by_length].min(1) - gap) // 2
    mixed = draws.permutation(by_length.size)
    return Halves(by_length.ravel()[mixed], second.ravel()[mixed], np.repeat(size, 2)[mixed])
