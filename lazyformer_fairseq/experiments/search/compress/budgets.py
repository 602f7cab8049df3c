"""For each budget of latency the pattern with the least loss: few are selected by sums of scores, and these measured.

Each loss is measured once and kept in a file, so that a search that was stopped goes on.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.compress.candidates import ByPlace, Candidates
from lazyformer_fairseq.experiments.search.compress.selection import Scores, Scoring, list_scorings, scores_of, select
from lazyformer_fairseq.experiments.search.latency import READ, REST, Prices, latency_of
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.checked import Amount, Finite
from lazyformer_fairseq.storage.json_files import read_checked_as, write_checked_json
from lazyformer_fairseq.training.warm_start.losses import Batches, BlockLosses, Scorer

TICKS = 4000  # of the trained model: prices are exact to an eighth of a thousandth of its latency
BETWEEN = " "  # of a pattern's places, in the file


@dataclass(frozen=True)
class Measured:
    """A pattern's loss, in bits per masked token.

    Attributes:
        above: the trained model's own.
        error: standard error of `above`, over blocks of text.
    """

    above: Finite
    error: Amount


@dataclass(frozen=True)
class Kept:
    """The content of the file."""

    patterns: dict[str, Measured]


class Losses:
    """Losses of patterns, each measured when it is not known yet.

    Args:
        path: the file that keeps them, which an earlier run may have begun.
        scorer: the model and text that losses are measured with.
        candidates: the candidates of all places.
    """

    def __init__(self, path: Path, scorer: Scorer, candidates: Candidates):
        self.path = path
        self.scorer = scorer
        self.candidates = candidates
        patterns: dict[str, Measured] = {}
        if path.exists():
            patterns = read_checked_as(Kept, path).patterns
        self.known = {tuple(key.split(BETWEEN)): measured for key, measured in patterns.items()}
        self.known[candidates.original] = Measured(0.0, 0.0)

    @cached_property
    def original(self) -> BlockLosses:
        """The trained model's own losses, measured when first needed."""
        return self.by_block(self.candidates.original)

    def __getitem__(self, by_place: ByPlace) -> Measured:
        return self.known[by_place]

    def measure(self, patterns: Iterable[ByPlace], description: str) -> None:
        """Measure those that are not known."""
        missing = [each for each in dict.fromkeys(patterns) if each not in self.known]
        for by_place in Progress(missing, desc=description, unit=" patterns"):
            self.known[by_place] = compare(self.by_block(by_place), self.original)
            self._write()

    def by_block(self, by_place: ByPlace) -> BlockLosses:
        """Measure the losses of a pattern on the blocks of the text."""
        return losses_of(self.scorer, self.candidates, by_place)

    def _write(self) -> None:
        patterns = {BETWEEN.join(key): asdict(measured) for key, measured in self.known.items()}
        write_checked_json(self.path, {"patterns": patterns})


def losses_of(scorer: Scorer, candidates: Candidates, by_place: ByPlace) -> BlockLosses:
    """Measure the losses of a pattern that starts from the trained model."""
    return scorer.by_block(candidates.pattern(by_place), candidates.origins(by_place))


def measure_on_other_text(
    patterns: Iterable[ByPlace],
    candidates: Candidates,
    scorer: Scorer,
    used: Batches,
) -> dict[ByPlace, Measured]:
    """Measure patterns that were selected by their losses on text that had no part in it; none where there is no more.

    Args:
        patterns: the patterns that were selected.
        candidates: the candidates of all places.
        scorer: a scorer with more text.
        used: the batches of that text which are left out.
    """
    before = {int(block) for batch in used for block in batch["id"]}
    blocks = [int(block) for batch in scorer.text for block in batch["id"]]
    is_other = np.array([block not in before for block in blocks])
    if not is_other.any():
        return {}

    def on_other(by_place: ByPlace) -> BlockLosses:
        found = losses_of(scorer, candidates, by_place)
        return BlockLosses(found.nats[is_other], found.words[is_other])

    original = on_other(candidates.original)
    missing = Progress(list(dict.fromkeys(patterns)), desc="measuring on other text", unit=" patterns")
    return {by_place: compare(on_other(by_place), original) for by_place in missing}


def compare(one: BlockLosses, original: BlockLosses) -> Measured:
    """Return how far a loss is above another on the same tokens; the error is that of a ratio over random blocks."""
    gains = (one.nats - original.nats) / math.log(2)
    words = original.words
    count = len(words)
    mean = gains.sum() / words.sum()
    spread = np.square(gains - mean * words).sum() * count / max(count - 1, 1)
    return Measured(float(mean), float(np.sqrt(spread) / words.sum()))


def in_ticks(prices: Prices, candidates: Candidates) -> dict[str, int]:
    """Return prices in whole ticks, TICKS of which the trained model has but for rounding; each with READ and REST."""
    tick = latency_of(prices, candidates.pattern(candidates.original)) / TICKS
    found = {REST: round(prices.get(REST, 0.0) / tick)}
    for text in candidates.sublayers:
        found[text] = round(prices[text] / tick)
        found[text + READ] = round(prices.get(text + READ, prices[text]) / tick)
    return found


@dataclass
class Budgets:
    """A search, from scores to patterns.

    Attributes:
        candidates: the candidates of all places.
        losses: the losses of patterns.
        ticks: the prices, see :func:`in_ticks`.
        limits: the limit of each budget, in ticks.
        scores: the scores of single changes; empty before :meth:`score`.
        searched: the patterns that were measured, in the keys.
    """

    candidates: Candidates
    losses: Losses
    ticks: Mapping[str, int]
    limits: Sequence[int]
    scores: Scores = field(default_factory=dict)
    searched: dict[ByPlace, None] = field(default_factory=dict)

    @cached_property
    def scorings(self) -> list[Scoring]:
        """The patterns by which single changes are scored."""
        return list_scorings(self.candidates)

    def latency(self, by_place: ByPlace) -> int:
        """Return the predicted latency in ticks."""
        return int(latency_of(self.ticks, self.candidates.pattern(by_place)))

    def refuse_too_small(self, shares: Sequence[float]) -> None:
        """Raise a UserError where no pattern is as fast as one of the budgets."""
        nothing = dict.fromkeys((scoring.placed for scoring in self.scorings), 0.0)
        for share, found in zip(shares, select(self.candidates, nothing, self.ticks, self.limits), strict=True):
            if not found:
                raise UserError(
                    f"--budgets {share:g}: no selection of --candidates makes the model so fast; give a larger budget, "
                    "or identity among the candidates"
                )

    def score(self) -> None:
        """Measure every change."""
        self._measure([scoring.by_place for scoring in self.scorings], "scoring changes")
        above = {scoring.by_place: self.losses[scoring.by_place].above for scoring in self.scorings}
        self.scores = scores_of(self.candidates, self.scorings, above)

    def find(self, top: int) -> None:
        """Measure the `top` patterns of each budget by their sums."""
        selected = select(self.candidates, self.scores, self.ticks, self.limits, top)
        self._measure([each.by_place for found in selected for each in found], "measuring sums")

    def find_again(self, top: int) -> None:
        """Make a second round, in which the changes of each budget's best pattern are scored where they stand."""
        bests = [self.best(limit) for limit in self.limits]
        undone = [self._undone(best) for best in bests]
        self._measure([each for changes in undone for each in changes.values()], "scoring again")
        selected = []
        for limit, best, changes in zip(self.limits, bests, undone, strict=True):
            scores = dict(self.scores)
            placed = self.candidates.placed(best)
            for place, without in changes.items():
                scores[placed[place]] = self.losses[best].above - self.losses[without].above
            selected += select(self.candidates, scores, self.ticks, [limit], top)[0]
        self._measure([each.by_place for each in selected], "measuring sums")

    def best(self, limit: int) -> ByPlace:
        """Return the pattern with the least loss of all that were measured and stay within the limit."""
        fitting = [each for each in self.searched if self.latency(each) <= limit]
        return min(fitting, key=lambda each: self.losses[each].above)

    def _measure(self, patterns: Sequence[ByPlace], description: str) -> None:
        self.searched |= dict.fromkeys(patterns)
        self.losses.measure(patterns, description)

    def _undone(self, by_place: ByPlace) -> dict[int, ByPlace]:
        """Return by place the pattern without its change there, where it has one and can stand without."""
        found = {}
        for place, original in enumerate(self.candidates.original):
            without = (*by_place[:place], original, *by_place[place + 1 :])
            if by_place[place] != original and self.candidates.is_possible(without):
                found[place] = without
        return found
