"""Time to a target, by two clocks, and its ratio to the baseline's.

The *curve* clock: when a run's validation first is as good as the target, on a straight line between the two
evaluations around that. A learning rate that is still high hides what the model has learned, so this clock is hard on
every model but the baseline, whose own time is all of its training.

The *whole* clock: the shortest training (``NAME``, ``NAME@0.7``, ...) whose end is as good as the target. Each ran its
schedule to its end, so nothing is interpolated, and the answer is as fine as the shares that were trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional, Union

import numpy as np

from lazyformer_fairseq.experiments.compare.report import BASELINE
from lazyformer_fairseq.experiments.compare.report.comparison import COSTS, Comparison, Measure, Model, Run
from lazyformer_fairseq.finetuning.report.results import mean_bounds

CLOCKS = ("curve", "whole")
NEVER = math.inf  # of a time: the target was not reached
Target = Union[float, str]  # a value of the measure, or BASELINE
Times = Mapping[int, Mapping[str, float]]  # by seed, by cost
FEWEST_FOR_BOUNDS = 3


@dataclass(frozen=True)
class Ratio:
    """How long a model took, in units of its baseline's own time.

    Attributes:
        by_seed: of runs of equal seed; NEVER where the model did not reach the target.
        bounds: Student's two-sided 95% interval of the geometric mean over seeds; None for fewer than three seeds, or
            where one did not reach the target.
    """

    by_seed: Mapping[int, float]

    @property
    def median(self) -> float:
        return float(np.median(list(self.by_seed.values())))

    @property
    def low(self) -> float:
        return min(self.by_seed.values())

    @property
    def high(self) -> float:
        return max(self.by_seed.values())

    @property
    def reached(self) -> int:
        """How many seeds did."""
        return sum(ratio < NEVER for ratio in self.by_seed.values())

    @property
    def bounds(self) -> Optional[tuple[float, float]]:
        if len(self.by_seed) < FEWEST_FOR_BOUNDS or self.reached < len(self.by_seed) or self.low <= 0:
            return None
        found = mean_bounds(np.log(list(self.by_seed.values())))
        assert found is not None
        return math.exp(found[0]), math.exp(found[1])


@dataclass(frozen=True)
class TimeToTarget:
    """What it cost the models of a family to reach the target.

    Attributes:
        model: the family.
        clock: one of CLOCKS.
        target: a value of the measure.
        times: by seed and cost.
        ratios: by cost, to the baseline's own; empty where the baseline has no time of its own.
        shares: of the whole clock, by seed, the share that reached it; NEVER for none.
    """

    model: str
    baseline: str
    clock: str
    target: float
    times: Times
    ratios: Mapping[str, Ratio]
    shares: Mapping[int, float]

    def median(self, cost: str) -> float:
        return float(np.median([costs[cost] for costs in self.times.values()]))


def times_to_target(comparison: Comparison, target: Target = BASELINE) -> list[TimeToTarget]:
    """Each family's time by each clock; the whole clock only where a family has more than one length of training.

    Args:
        target: a value, or the median over seeds of the final value of each model's baseline.
    """
    found = []
    for family, models in comparison.families.items():
        baseline = models[-1].baseline
        value = target_value(comparison, baseline, target)
        for clock in CLOCKS if len(models) > 1 else CLOCKS[:1]:
            own = own_times(comparison, baseline, target, clock)
            if family == baseline and target == BASELINE:
                times, shares = own, dict.fromkeys(own, 1.0)
            else:
                times, shares = _times_by(clock, models, value, comparison.measure)
            ratios = {cost: ratio for cost in COSTS if (ratio := _ratio(times, own, cost)) is not None}
            found.append(TimeToTarget(family, baseline, clock, value, times, ratios, shares))
    return found


def target_value(comparison: Comparison, baseline: str, target: Target) -> float:
    """The target as a value of the measure."""
    if target == BASELINE:
        return float(np.median(comparison.longest(baseline).finals(comparison.measure.name)))
    return float(target)


def own_times(comparison: Comparison, baseline: str, target: Target, clock: str) -> Times:
    """The baseline's own time: its whole training where the target is its own end, which it reaches there."""
    if target == BASELINE:
        return {seed: whole_costs(run) for seed, run in comparison.longest(baseline).runs.items()}
    return _times_by(clock, comparison.families[baseline], float(target), comparison.measure)[0]


def whole_costs(run: Run) -> dict[str, float]:
    """What all of a training cost, by cost."""
    return {cost: run.whole(cost) for cost in COSTS}


def _times_by(
    clock: str, models: Sequence[Model], target: float, measure: Measure
) -> tuple[Times, Mapping[int, float]]:
    """Times and shares of a family, the shortest training first."""
    if clock == "whole":
        return times_by_wholes(models, target, measure)
    longest = models[-1]
    times = {
        seed: {cost: first_crossing(run.curve[cost], run.curve[measure.name], target, measure) for cost in COSTS}
        for seed, run in longest.runs.items()
    }
    return times, {seed: longest.share for seed in times}


def times_by_wholes(models: Sequence[Model], target: float, measure: Measure) -> tuple[Times, Mapping[int, float]]:
    """For each seed, what the shortest training cost that ended as good as the target, and its share.

    Args:
        models: of a family, the shortest training first.
    """
    times, shares = {}, {}
    for seed in dict.fromkeys(seed for model in models for seed in model.runs):
        times[seed], shares[seed] = dict.fromkeys(COSTS, NEVER), NEVER
        for model in models:
            run = model.runs.get(seed)
            if run is not None and measure.reaches(run.final[measure.name], target):
                times[seed], shares[seed] = whole_costs(run), model.share
                break
    return times, shares


def first_crossing(spent: np.ndarray, values: np.ndarray, target: float, measure: Measure) -> float:
    """What had been spent when a curve first was as good as the target; NEVER if it never was.

    Args:
        spent: growing, (E,).
        values: measured then, (E,). After one that is not finite nothing is interpolated.
    """
    for place, value in enumerate(values):
        if measure.reaches(value, target):
            if place == 0 or not math.isfinite(values[place - 1]):
                return float(spent[place])
            before = values[place - 1]
            part = (before - target) / (before - value)
            return float(spent[place - 1] + part * (spent[place] - spent[place - 1]))
    return NEVER


def _ratio(times: Times, own: Times, cost: str) -> Optional[Ratio]:
    """Over the seeds of both; None where there are none, or the baseline never reaches the target with one of them."""
    seeds = [seed for seed in times if seed in own]
    if not seeds or any(not 0 < own[seed][cost] < NEVER for seed in seeds):
        return None
    return Ratio({seed: times[seed][cost] / own[seed][cost] for seed in seeds})
