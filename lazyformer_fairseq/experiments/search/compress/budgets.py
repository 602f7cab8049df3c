"""The search for the pattern with the lowest loss within each latency budget.

A few patterns are selected by their total scores, and only these are measured. Each loss is measured once and stored in
a file, so an interrupted search can resume.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.compress.candidates import Candidates, Positions
from lazyformer_fairseq.experiments.search.compress.selection import Scores, Scoring, list_scorings, scores_of, select
from lazyformer_fairseq.experiments.search.latency import READ, REST, Prices, latency_of
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.checked import Amount, Finite
from lazyformer_fairseq.storage.json_files import read_checked_as, write_checked_json
from lazyformer_fairseq.training.warm_start.losses import Batches, BlockLosses, Scorer

TICKS = 4000  # the trained model's latency in ticks; the rounding error per price is at most 1/8000 of it
BETWEEN = " "  # separates a pattern's positions in the file


@dataclass(frozen=True)
class Measured:
    """The loss of a pattern relative to the trained model, in bits per masked token.

    Attributes:
        above: the pattern's loss minus the trained model's.
        error: the standard error of `above` over blocks of text.
    """

    above: Finite
    error: Amount


@dataclass(frozen=True)
class Kept:
    """The contents of the losses file.

    Attributes:
        patterns: the losses by pattern; a pattern's positions are joined by BETWEEN.
    """

    patterns: dict[str, Measured]


class Losses:
    """A cache of pattern losses, each of which is measured only once.

    Args:
        path: the file to store the losses in, which an earlier run may have started.
        scorer: the scorer, which has the trained model and the text.
        candidates: the candidates at all positions.
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
        """The trained model's own losses, measured on first use."""
        return self.by_block(self.candidates.original)

    def __getitem__(self, by_place: Positions) -> Measured:
        return self.known[by_place]

    def measure(self, patterns: Iterable[Positions], description: str) -> None:
        """Measure the patterns that have not been measured yet."""
        missing = [each for each in dict.fromkeys(patterns) if each not in self.known]
        for by_place in Progress(missing, desc=description, unit=" patterns"):
            self.known[by_place] = compare(self.by_block(by_place), self.original)
            self._write()

    def by_block(self, by_place: Positions) -> BlockLosses:
        """Measure a pattern's loss on each block of the text."""
        return losses_of(self.scorer, self.candidates, by_place)

    def _write(self) -> None:
        patterns = {BETWEEN.join(key): asdict(measured) for key, measured in self.known.items()}
        write_checked_json(self.path, {"patterns": patterns})


def losses_of(scorer: Scorer, candidates: Candidates, by_place: Positions) -> BlockLosses:
    """Measure the loss on each block of text for a pattern that starts from the trained model's weights."""
    return scorer.by_block(candidates.pattern(by_place), candidates.origins(by_place))


def measure_on_other_text(
    patterns: Iterable[Positions],
    candidates: Candidates,
    scorer: Scorer,
    used: Batches,
) -> dict[Positions, Measured]:
    """Measure selected patterns on text that was not used to select them.

    Args:
        patterns: the selected patterns.
        candidates: the candidates at all positions.
        scorer: a scorer with more text than was used for the selection.
        used: the batches used for the selection, which are skipped.

    Returns:
        The losses by pattern; empty if there is no other text.
    """
    before = {int(block) for batch in used for block in batch["id"]}
    blocks = [int(block) for batch in scorer.text for block in batch["id"]]
    is_other = np.array([block not in before for block in blocks])
    if not is_other.any():
        return {}

    def on_other(by_place: Positions) -> BlockLosses:
        found = losses_of(scorer, candidates, by_place)
        return BlockLosses(found.nats[is_other], found.words[is_other])

    original = on_other(candidates.original)
    missing = Progress(list(dict.fromkeys(patterns)), desc="measuring on other text", unit=" patterns")
    return {by_place: compare(on_other(by_place), original) for by_place in missing}


def compare(one: BlockLosses, original: BlockLosses) -> Measured:
    """Return the difference between two mean losses on the same tokens, with its standard error.

    The difference is a ratio of two sums over blocks: the differences in loss, and the numbers of masked tokens. The
    standard error accounts for the variation of both between blocks.
    """
    gains = (one.nats - original.nats) / math.log(2)
    words = original.words
    count = len(words)
    mean = gains.sum() / words.sum()
    deviations = gains - mean * words
    spread = np.square(deviations).sum() * count / max(count - 1, 1)
    return Measured(float(mean), float(np.sqrt(spread) / words.sum()))


def in_ticks(prices: Prices, candidates: Candidates) -> dict[str, int]:
    """Convert prices to integer ticks, so that the whole trained model takes about TICKS.

    The result contains two prices for every sublayer: one under the sublayer's text, and one under the text with READ
    appended, which applies if another sublayer reads from this one. It also contains the price of REST.
    """
    tick = latency_of(prices, candidates.pattern(candidates.original)) / TICKS
    found = {REST: round(prices.get(REST, 0.0) / tick)}
    for text in candidates.sublayers:
        found[text] = round(prices[text] / tick)
        found[text + READ] = round(prices.get(text + READ, prices[text]) / tick)
    return found


@dataclass
class Budgets:
    """The steps of a search, from scores of single changes to the best pattern for each budget.

    Attributes:
        candidates: the candidates at all positions.
        losses: the pattern losses.
        ticks: the prices in ticks, see :func:`in_ticks`.
        limits: each budget's latency limit, in ticks.
        scores: the scores of single changes; empty before :meth:`score`.
        searched: the measured patterns, as keys.
    """

    candidates: Candidates
    losses: Losses
    ticks: Mapping[str, int]
    limits: Sequence[int]
    scores: Scores = field(default_factory=dict)
    searched: dict[Positions, None] = field(default_factory=dict)

    @cached_property
    def scorings(self) -> list[Scoring]:
        """The patterns to measure for the scores of single changes."""
        return list_scorings(self.candidates)

    def latency(self, by_place: Positions) -> int:
        """Predict a pattern's latency in ticks."""
        return int(latency_of(self.ticks, self.candidates.pattern(by_place)))

    def refuse_too_small(self, shares: Sequence[float]) -> None:
        """Raise a UserError if a budget is too small for any pattern; the message states this budget as a fraction."""
        nothing = dict.fromkeys((scoring.placed for scoring in self.scorings), 0.0)
        by_limit = select(self.candidates, nothing, self.ticks, self.limits)
        for share, found in zip(shares, by_limit, strict=True):
            if not found:
                raise UserError(
                    f"--budgets {share:g}: no combination of the --candidates makes the model that fast; use a larger "
                    "budget, or add identity to the candidates"
                )

    def score(self) -> None:
        """Measure every single change and compute the scores from the losses."""
        self._measure([scoring.by_place for scoring in self.scorings], "scoring changes")
        above = {scoring.by_place: self.losses[scoring.by_place].above for scoring in self.scorings}
        self.scores = scores_of(self.candidates, self.scorings, above)

    def find(self, top: int) -> None:
        """Measure the `top` patterns with the smallest total scores within each budget."""
        selected = select(self.candidates, self.scores, self.ticks, self.limits, top)
        combinations = [each.by_place for found in selected for each in found]
        self._measure(combinations, "measuring combinations")

    def find_again(self, top: int) -> None:
        """Search again, after rescoring each change in a budget's best pattern by undoing only that change."""
        bests = [self.best(limit) for limit in self.limits]
        undone = [self._undone(best) for best in bests]
        rescored = [each for changes in undone for each in changes.values()]
        self._measure(rescored, "rescoring changes")
        selected = []
        for limit, best, changes in zip(self.limits, bests, undone, strict=True):
            scores = dict(self.scores)
            placed = self.candidates.placed(best)
            for place, without in changes.items():
                scores[placed[place]] = self.losses[best].above - self.losses[without].above
            selected += select(self.candidates, scores, self.ticks, [limit], top)[0]
        self._measure([each.by_place for each in selected], "measuring combinations")

    def best(self, limit: int) -> Positions:
        """Return the measured pattern with the lowest loss within a limit in ticks."""
        fitting = [each for each in self.searched if self.latency(each) <= limit]
        return min(fitting, key=lambda each: self.losses[each].above)

    def _measure(self, patterns: Sequence[Positions], description: str) -> None:
        self.searched |= dict.fromkeys(patterns)
        self.losses.measure(patterns, description)

    def _undone(self, by_place: Positions) -> dict[int, Positions]:
        """Return the valid patterns that undo one change of a pattern, by the position of the change."""
        found = {}
        for place, original in enumerate(self.candidates.original):
            without = (*by_place[:place], original, *by_place[place + 1 :])
            if by_place[place] != original and self.candidates.is_possible(without):
                found[place] = without
        return found
