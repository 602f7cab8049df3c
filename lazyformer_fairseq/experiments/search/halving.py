"""Patterns are judged by trainings from scratch, most of which end early (successive halving, arXiv 1502.07943).

A training has a constant rate. At each rung a branch of it decays (Haegele et al., 2024, arXiv 2405.18392), as if it
had been so short from the start, and its loss in validation ranks the patterns of a budget. The best go on from where
their branches began. The last branch is a whole training.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Optional

import numpy as np

from lazyformer_fairseq.experiments.compare.run import count_workers
from lazyformer_fairseq.experiments.compare.task import ComparedTask
from lazyformer_fairseq.experiments.search.latency import rank_correlations
from lazyformer_fairseq.experiments.search.material import Material
from lazyformer_fairseq.experiments.search.space import compact
from lazyformer_fairseq.experiments.trainings import Job, Training, train
from lazyformer_fairseq.storage.atomic import copy_file
from lazyformer_fairseq.training.loop import CHECKPOINT
from lazyformer_fairseq.training.optimization import OptimizationConfig

TRAININGS, TRUNK = "trainings", "trunk.pt"
DECAY = 0.15  # of a branch's updates, unless the recipe says how it decays


class BranchTraining(Training):
    """A branch, and what is common to it and to longer ones, the trunk, whose end is kept for the next rung.

    Where a kill leaves no trunk the next rung starts from scratch: the result is the same to the bit.
    """

    validations = 2
    may_diverge = True

    def __init__(self, compared: ComparedTask, job: Job):
        super().__init__(job)
        self.compared = compared
        self.is_whole = job.updates == compared.settings.updates

    def measure(self) -> Mapping[str, float]:
        return {"loss": self.compared.measure(self)["loss"]}

    def is_due(self) -> bool:
        return self.updates == self.schedule.decay_start or super().is_due()

    def save(self, with_optimizer: bool = True) -> None:
        super().save(with_optimizer)
        if self.updates == self.schedule.decay_start and not self.is_whole:
            copy_file(self.folder / CHECKPOINT, self.folder / TRUNK)

    def finish(self) -> None:
        """Only a whole training keeps its weights."""
        super().finish()
        if self.job.start:
            self.job.start.unlink(missing_ok=True)
        if not self.is_whole:
            (self.folder / CHECKPOINT).unlink()


class Trainings:
    """Of patterns, by rung; each has a folder of its own, so that all resume.

    Args:
        folder: of the search.

    Attributes:
        losses: by pattern, in bits by rung; infinite for what ended in no number.
        parameters: by pattern.
        made: updates that a rung adds to those of the one before.
    """

    def __init__(self, material: Material, folder: Path):
        self.material, self.folder, self.lengths = material, folder / TRAININGS, material.settings.lengths
        self.losses: dict[str, list[Optional[float]]] = {}
        self.parameters: dict[str, int] = {}
        decay = self.optimization(self.lengths[-1]).schedule_options["decay_share"]
        trunks = [0, *(length - math.ceil(decay * length) for length in self.lengths)]
        self.made = [length - trunk for length, trunk in zip(self.lengths, trunks, strict=False)]
        self._jobs: dict[str, list[Job]] = {}

    def optimization(self, updates: int) -> OptimizationConfig:
        """The recipe's, with a rate that is constant until it decays; warm-up ends before the first branch."""
        compared, seed = self.material.compared, self.material.settings.seed
        spec = compared.settings.specs[compared.settings.baseline]
        found = compared.optimization(spec, seed, compared.settings.rates_of(spec)[0], updates)
        said, whole = found.schedule_options, compared.settings.updates
        warmup = said.get("warmup_updates") or math.ceil(said.get("warmup_ratio", 0) * whole)
        how = {"decay_share": DECAY, **(said if found.schedule == "wsd" else {})}
        how["warmup_updates"] = max(1, min(warmup, self.lengths[0] // 2))
        return replace(found, schedule="wsd", schedule_options=how)

    def jobs(self, pattern: str) -> list[Job]:
        """By rung."""
        if pattern not in self._jobs:
            folder, start, found = self.folder / f"{len(self._jobs):03}", None, []
            for updates in self.lengths:
                own = folder / str(updates)
                of_all = (compact(pattern), self.material.objective(pattern), self.optimization(updates), own, updates)
                found.append(Job(*of_all, group=pattern, start=start))
                start = own / TRUNK
            self._jobs[pattern] = found
        return self._jobs[pattern]

    def train(self, patterns: Iterable[str], what: str, rung: int = -1) -> None:
        """To a rung, by default whole; one after the other, or a GPU each."""
        compared, jobs = self.material.compared, {pattern: self.jobs(pattern)[rung] for pattern in patterns}
        how = (what, count_workers(compared.settings), compared.settings.device)
        train([*jobs.values()], partial(BranchTraining, compared), *how)
        for pattern, job in jobs.items():
            result = job.result()
            loss = result["curve"]["loss"][-1]
            losses = self.losses.setdefault(pattern, [None] * len(self.lengths))
            losses[rung] = loss if math.isfinite(loss) else math.inf
            self.parameters[pattern] = result["parameters"]

    def halve(self, drawn: Sequence[Sequence[str]]) -> None:
        """Of the patterns of each budget the best go on from rung to rung."""
        left, counts = drawn, self._counts(drawn)
        for rung in range(len(self.lengths)):
            if rung:
                ranked = [sorted(some, key=lambda pattern: self.losses[pattern][rung - 1]) for some in left]
                left = [some[: count[rung]] for some, count in zip(ranked, counts, strict=True)]
                for pattern in self.losses.keys() - set(chain(*left)):
                    (self.jobs(pattern)[rung - 1].folder / TRUNK).unlink(missing_ok=True)
            self.train(chain(*left), f"rung {rung + 1} of {len(self.lengths)}", rung)

    def _counts(self, drawn: Sequence[Sequence[str]]) -> list[list[int]]:
        """Of each budget, patterns by rung."""
        keep, found = self.material.settings.keep, [[len(some)] for some in drawn]
        for counts in found:
            while len(counts) < len(self.lengths):
                counts.append(max(1, round(keep * counts[-1])))
        return found

    def plan(self, drawn: Sequence[Sequence[str]], cost_of: Callable[[str], float]) -> str:
        """What :meth:`halve` trains, in words.

        Args:
            cost_of: an update of a pattern, in updates of the baseline.
        """
        counts = self._counts(drawn)
        said = [f"{sum(on_it)} for {updates:,} updates" for *on_it, updates in zip(*counts, self.lengths, strict=True)]
        means = [np.mean([*map(cost_of, some)]) for some in drawn]
        cost = np.dot(means, np.dot(counts, self.made))
        return f"trains patterns, {', '.join(said)}: about as much as {cost:,.0f} updates of the baseline"

    def spent(self, pattern: str) -> int:
        """Updates on all rungs."""
        return sum(made for made, loss in zip(self.made, self.losses[pattern], strict=True) if loss is not None)

    def rank_correlations(self) -> dict[str, Optional[dict[str, float]]]:
        """By updates of a rung, of its losses with those of whole trainings, where a pattern has both."""
        found = {}
        for rung, updates in enumerate(self.lengths[:-1]):
            both = [(each[rung], each[-1]) for each in self.losses.values() if None not in (each[rung], each[-1])]
            found[str(updates)] = rank_correlations(*zip(*both, strict=True)) if both else None
        return found
