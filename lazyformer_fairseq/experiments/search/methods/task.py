"""What a method gets: the patterns to choose among, the budgets, and a judge of limited patience."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional

from lazyformer_fairseq.experiments.search.space import Band, Path, Space

PROPOSALS = 20  # times the evaluations: a space with fewer patterns than evaluations must come to an end


class Judge:
    """Answers a pattern's loss; computes each once, and so many as there are evaluations.

    Args:
        loss_of: the loss of a pattern in bits.
        evaluations: how many.
        known: losses from before, which a resumed search takes up: each still counts when a method asks for it.
    """

    def __init__(self, loss_of: Callable[[Path], float], evaluations: int, known: Optional[dict[Path, float]] = None):
        self.loss_of = loss_of
        self.evaluations = evaluations
        self.known = {} if known is None else known
        self.losses: dict[Path, float] = {}  # in the order of the evaluations
        self.proposals = 0

    @property
    def is_spent(self) -> bool:
        return len(self.losses) >= self.evaluations or self.proposals >= PROPOSALS * self.evaluations

    def __call__(self, path: Path) -> float:
        """Bits a prediction; infinite for a new pattern when the evaluations are spent."""
        self.proposals += 1
        if path in self.losses:
            return self.losses[path]
        if self.is_spent:
            return float("inf")
        if path not in self.known:
            self.known[path] = self.loss_of(path)
        self.losses[path] = self.known[path]
        return self.losses[path]


@dataclass(frozen=True)
class Task:
    """A method's task.

    Attributes:
        bands: of latencies, the lowest first.
        baseline: its path.
        seed: of the method's own choices.
        shares: by band the probabilities (L rows of K) that gradient descent found; None for other methods.
    """

    space: Space
    bands: Sequence[Band]
    baseline: Path
    judge: Judge
    seed: int
    shares: Optional[Sequence[Sequence[Sequence[float]]]] = None

    def chance(self) -> random.Random:
        return random.Random(self.seed)

    def best_within(self, latency: float) -> Optional[Path]:
        """Of the patterns judged so far that cost no more the one of the lowest loss."""
        losses = self.judge.losses
        fitting = [path for path in losses if self.space.latency(path) <= latency]
        return min(fitting, key=losses.__getitem__, default=None)
