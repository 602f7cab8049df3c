"""Successive halving (arXiv 1502.07943): patterns are trained from scratch, and most runs end early.

The trunk of a run has a constant learning rate. At each rung, a branch leaves the trunk and decays the rate (Haegele et
al., 2024, arXiv 2405.18392), as if the run had been planned to end there. The branches' validation losses rank the
patterns of a budget, and the best patterns continue from the points where their branches began. On the last rung, trunk
and branch form a complete run.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.experiments.compare.task import ComparedTask
from lazyformer_fairseq.experiments.search.latency import rank_correlations
from lazyformer_fairseq.experiments.search.material import SearchContext
from lazyformer_fairseq.experiments.search.space import compact
from lazyformer_fairseq.experiments.training_runs import Job, Training
from lazyformer_fairseq.storage.atomic import copy_file
from lazyformer_fairseq.training.loop import CHECKPOINT
from lazyformer_fairseq.training.optimization import OptimizationConfig

TRAININGS = "trainings"
TRUNK = "trunk.pt"
DECAY = 0.15  # fraction of the updates over which the learning rate decays, unless the recipe sets this fraction


class BranchTraining(Training):
    """The training loop of a pattern up to one rung: a trunk with a constant rate, and a branch that decays the rate.

    The checkpoint at the end of the trunk is kept, and the next rung continues from it. If the process is killed before
    the checkpoint is written, the next rung starts from scratch; the result is bitwise identical.
    """

    validations = 2
    may_diverge = True

    def __init__(self, compared: ComparedTask, job: Job):
        super().__init__(job)
        self.compared = compared
        self.is_whole = job.updates == compared.settings.updates

    def measure(self) -> Mapping[str, float]:
        """Compute the validation loss, in bits."""
        return {"loss": self.compared.measure(self)["loss"]}

    def is_due(self) -> bool:
        """Return whether to validate and save after this update, as also happens at the end of the trunk."""
        return self.updates == self.schedule.decay_start or super().is_due()

    def save(self, with_optimizer: bool = True) -> None:
        """Save a checkpoint, and keep a copy of it at the end of the trunk."""
        super().save(with_optimizer)
        if self.updates == self.schedule.decay_start and not self.is_whole:
            copy_file(self.folder / CHECKPOINT, self.folder / TRUNK)

    def finish(self) -> None:
        """Write the result, and remove the weights unless this is a complete run."""
        super().finish()
        if self.job.start:
            self.job.start.unlink(missing_ok=True)
        if not self.is_whole:
            (self.folder / CHECKPOINT).unlink()


class HalvingRuns:
    """The training runs of patterns on all rungs, each in a separate folder so that it can resume.

    Args:
        material: the search's models and objectives.
        folder: the search's folder.

    Attributes:
        losses: each pattern's loss on each rung, in bits; None if it was not trained to that rung, infinite if the run
            diverged.
        parameters: each pattern's number of parameters.
        made: the number of additional updates per rung, beyond the previous rung's trunk.
    """

    def __init__(self, material: SearchContext, folder: Path):
        self.material = material
        self.folder = folder / TRAININGS
        self.lengths = material.settings.lengths
        self.losses: dict[str, list[Optional[float]]] = {}
        self.parameters: dict[str, int] = {}
        decay = self.optimization(self.lengths[-1]).schedule_options["decay_share"]
        self.made = []
        trunk = 0
        for length in self.lengths:
            self.made.append(length - trunk)
            trunk = length - math.ceil(decay * length)
        self._jobs: dict[str, list[Job]] = {}

    def optimization(self, updates: int) -> OptimizationConfig:
        """Return the recipe's optimization with a learning rate that is constant until it decays.

        The warm-up is shortened if necessary so that it ends before the first branch.
        """
        compared = self.material.compared
        spec = compared.settings.specs[compared.settings.baseline]
        rate = compared.settings.rates_of(spec)[0]
        found = compared.optimization(spec, self.material.settings.seed, rate, updates)
        options = found.schedule_options
        warmup = options.get("warmup_updates")
        if not warmup:
            warmup = math.ceil(options.get("warmup_ratio", 0) * compared.settings.updates)
        schedule_options = {"decay_share": DECAY}
        if found.schedule == "wsd":
            schedule_options |= options
        schedule_options["warmup_updates"] = max(1, min(warmup, self.lengths[0] // 2))
        return replace(found, schedule="wsd", schedule_options=schedule_options)

    def jobs(self, pattern: str) -> list[Job]:
        """Return a pattern's jobs, one per rung."""
        if pattern not in self._jobs:
            folder = self.folder / f"{len(self._jobs):03}"
            start = None
            jobs = []
            for updates in self.lengths:
                job = Job(
                    compact(pattern),
                    self.material.objective(pattern),
                    self.optimization(updates),
                    folder / str(updates),
                    group=pattern,
                    start=start,
                )
                jobs.append(job)
                start = job.folder / TRUNK
            self._jobs[pattern] = jobs
        return self._jobs[pattern]

    def train(self, patterns: Iterable[str], what: str, rung: int = -1) -> None:
        """Train patterns up to a rung and store their losses.

        Args:
            patterns: the patterns.
            what: the label of the progress bar.
            rung: the index of the rung; by default the last one.
        """
        jobs = {pattern: self.jobs(pattern)[rung] for pattern in patterns}
        self.material.compared.train(list(jobs.values()), what, BranchTraining)
        for pattern, job in jobs.items():
            result = job.result()
            loss = result["curve"]["loss"][-1]
            if not math.isfinite(loss):
                loss = math.inf
            losses = self.losses.setdefault(pattern, [None] * len(self.lengths))
            losses[rung] = loss
            self.parameters[pattern] = result["parameters"]

    def halve(self, drawn: Sequence[Sequence[str]]) -> None:
        """Train each budget's patterns on the first rung, and only the best ones on every further rung."""
        counts = self.counts(drawn)
        left = list(drawn)
        for rung in range(len(self.lengths)):
            if rung:
                for budget, patterns in enumerate(left):
                    ranked = sorted(patterns, key=lambda pattern: self.losses[pattern][rung - 1])
                    left[budget] = ranked[: counts[budget][rung]]
                for pattern in self.losses.keys() - set(chain(*left)):
                    folder = self.jobs(pattern)[rung - 1].folder
                    (folder / TRUNK).unlink(missing_ok=True)
            self.train(chain(*left), f"rung {rung + 1} of {len(self.lengths)}", rung)

    def counts(self, drawn: Sequence[Sequence[str]]) -> list[list[int]]:
        """Return the number of patterns trained on each rung, for each budget."""
        keep = self.material.settings.keep
        found = []
        for patterns in drawn:
            counts = [len(patterns)]
            while len(counts) < len(self.lengths):
                counts.append(max(1, round(keep * counts[-1])))
            found.append(counts)
        return found

    def updates(self, pattern: str) -> int:
        """Return the number of updates spent on a pattern, over all rungs."""
        losses = self.losses[pattern]
        return sum(made for made, loss in zip(self.made, losses, strict=True) if loss is not None)

    def rank_correlations(self) -> dict[str, Optional[dict[str, float]]]:
        """Return the rank correlations between losses on each rung and losses of complete runs, by number of updates.

        They are computed over the patterns that have both losses.
        """
        found = {}
        for rung, updates in enumerate(self.lengths[:-1]):
            both = [each for each in self.losses.values() if each[rung] is not None and each[-1] is not None]
            early = [losses[rung] for losses in both]
            whole = [losses[-1] for losses in both]
            found[str(updates)] = rank_correlations(early, whole)
        return found
