"""For each budget of latency the pattern with the least loss: few are chosen by sums of scores, and these measured.

Each loss is measured once and kept in a file, so that a search that was stopped goes on.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.compress.choices import (
    ByPlace,
    Choices,
    Scores,
    Scoring,
    best_choices,
    list_scorings,
    scores_of,
)
from lazyformer_fairseq.experiments.search.latency import READ, REST, Prices, latency_of
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.checked import Amount, Finite
from lazyformer_fairseq.storage.json_files import read_checked_as, write_checked_json
from lazyformer_fairseq.training.warm_start.losses import Batches, BlockLosses, Scorer

TICKS = 4000  # of the trained model: prices are exact to an eighth of a thousandth of its latency
BETWEEN = " "  # of a pattern's places, in the file


class Measured(NamedTuple):
    """A pattern's loss, in bits a masked token.

    Attributes:
        above: the trained model's own.
        error: standard error of `above`, over blocks of text.
    """

    above: float
    error: float


@dataclass(frozen=True)
class KeptLoss:
    """:class:`Measured`, as the file has it."""

    above: Finite
    error: Amount


@dataclass(frozen=True)
class Kept:
    """What of the file is read again."""

    patterns: dict[str, KeptLoss]


class Losses:
    """Measures what it does not know yet.

    Args:
        path: of the file, which another run may have begun.
    """

    def __init__(self, path: Path, scorer: Scorer, choices: Choices):
        self.path, self.scorer, self.choices = path, scorer, choices
        patterns = read_checked_as(Kept, path).patterns if path.exists() else {}
        self.known = {tuple(key.split(BETWEEN)): Measured(each.above, each.error) for key, each in patterns.items()}
        self.known[choices.own] = Measured(0.0, 0.0)

    @cached_property
    def original(self) -> BlockLosses:
        """The trained model's own, measured when first needed."""
        return self._by_block(self.choices.own)

    def __getitem__(self, by_place: ByPlace) -> Measured:
        return self.known[by_place]

    def measure(self, patterns: Iterable[ByPlace], description: str) -> list[ByPlace]:
        """Returns those that were not known before, each once."""
        missing = [each for each in dict.fromkeys(patterns) if each not in self.known]
        for by_place in Progress(missing, desc=description, unit=" patterns"):
            self.known[by_place] = compare(self._by_block(by_place), self.original)
            self._write()
        return missing

    def _by_block(self, by_place: ByPlace) -> BlockLosses:
        return self.scorer.by_block(self.choices.pattern(by_place), self.choices.origins(by_place))

    def _write(self) -> None:
        write_checked_json(
            self.path,
            {
                "unit": "bits a masked token",
                "original": self.original.bits,
                "masked_tokens": int(self.original.words.sum()),
                "blocks": len(self.original.words),
                "patterns": {BETWEEN.join(key): each._asdict() for key, each in self.known.items()},
            },
        )


def measure_on_other_text(
    patterns: Iterable[ByPlace], choices: Choices, scorer: Scorer, used: Batches
) -> dict[ByPlace, Measured]:
    """Losses of patterns that were chosen for theirs, on text that had no part in it; of none where there is no more.

    Args:
        scorer: of more text; what of it is `used` is left out.
    """
    before = {int(block) for batch in used for block in batch["id"]}
    blocks = [int(block) for batch in scorer.text for block in batch["id"]]
    is_other = np.array([block not in before for block in blocks])
    if not is_other.any():
        return {}

    def losses_of(by_place: ByPlace) -> BlockLosses:
        found = scorer.by_block(choices.pattern(by_place), choices.origins(by_place))
        return BlockLosses(found.nats[is_other], found.words[is_other])

    original = losses_of(choices.own)
    missing = Progress(list(dict.fromkeys(patterns)), desc="measuring on other text", unit=" patterns")
    return {by_place: compare(losses_of(by_place), original) for by_place in missing}


def compare(one: BlockLosses, original: BlockLosses) -> Measured:
    """How far a loss is above another on the same tokens; the error is that of a ratio over blocks drawn at random."""
    gains, words = (one.nats - original.nats) / math.log(2), original.words
    mean, count = gains.sum() / words.sum(), len(words)
    spread = np.square(gains - mean * words).sum() * count / max(count - 1, 1)
    return Measured(float(mean), float(np.sqrt(spread) / words.sum()))


def in_ticks(prices: Prices, choices: Choices) -> dict[str, int]:
    """Prices in whole ticks, of which the trained model has so many (but for rounding); each with READ and REST."""
    tick = latency_of(prices, choices.pattern(choices.own)) / TICKS
    found = {REST: round(prices.get(REST, 0.0) / tick)}
    for text in choices.sublayers:
        found[text] = round(prices[text] / tick)
        found[text + READ] = round(prices.get(text + READ, prices[text]) / tick)
    return found


@dataclass
class Budgets:
    """A search, from scores to patterns.

    Args:
        ticks: prices, see :func:`in_ticks`.
        limits: of each budget, in ticks.

    Attributes:
        scores: of single changes; empty before :meth:`score`.
        searched: patterns that were measured.
    """

    choices: Choices
    losses: Losses
    ticks: Mapping[str, int]
    limits: Sequence[int]
    scores: Scores = field(default_factory=dict)
    searched: dict[ByPlace, None] = field(default_factory=dict)

    @cached_property
    def scorings(self) -> list[Scoring]:
        return list_scorings(self.choices)

    def latency(self, by_place: ByPlace) -> int:
        """In ticks, predicted."""
        return int(latency_of(self.ticks, self.choices.pattern(by_place)))

    def refuse_too_small(self, shares: Sequence[float]) -> None:
        """Raises a UserError where no pattern is so fast."""
        nothing = dict.fromkeys((scoring.made for scoring in self.scorings), 0.0)
        for share, found in zip(shares, best_choices(self.choices, nothing, self.ticks, self.limits), strict=True):
            if not found:
                raise UserError(
                    f"--budgets {share:g}: no choice of --candidates makes the model so fast; give a larger budget, or "
                    "identity among the candidates"
                )

    def score(self) -> None:
        """Measures every change."""
        self._measure([scoring.by_place for scoring in self.scorings], "scoring changes")
        above = {scoring.by_place: self.losses[scoring.by_place].above for scoring in self.scorings}
        self.scores = scores_of(self.choices, self.scorings, above)

    def find(self, top: int) -> None:
        """Measures the `top` patterns of each budget by their sums."""
        chosen = best_choices(self.choices, self.scores, self.ticks, self.limits, top)
        self._measure([each.by_place for found in chosen for each in found], "measuring sums")

    def find_again(self, top: int) -> None:
        """A second round: the changes of each budget's best pattern are scored where they stand."""
        bests = [self.best(limit) for limit in self.limits]
        undone = [self._undone(best) for best in bests]
        self._measure([each for changes in undone for each in changes.values()], "scoring again")
        chosen = []
        for limit, best, changes in zip(self.limits, bests, undone, strict=True):
            made = {each.place: each for each in self.choices.all_made(best)}
            there = {made[at]: self.losses[best].above - self.losses[each].above for at, each in changes.items()}
            chosen += best_choices(self.choices, {**self.scores, **there}, self.ticks, [limit], top)[0]
        self._measure([each.by_place for each in chosen], "measuring sums")

    def best(self, limit: int) -> ByPlace:
        """The pattern with the least loss of all that were measured and stay within the limit."""
        fitting = [each for each in self.searched if self.latency(each) <= limit]
        return min(fitting, key=lambda each: self.losses[each].above)

    def _measure(self, patterns: Sequence[ByPlace], description: str) -> None:
        self.searched |= dict.fromkeys(patterns)
        self.losses.measure(patterns, description)

    def _undone(self, by_place: ByPlace) -> dict[int, ByPlace]:
        """By place the pattern without its change there, where it has one and can stand without."""
        found = {}
        for place, own in enumerate(self.choices.own):
            without = (*by_place[:place], own, *by_place[place + 1 :])
            if by_place[place] != own and self.choices.is_possible(without):
                found[place] = without
        return found
