"""Time to a target, by two clocks, and its ratio to the baseline's; and the models that no other beats (Pareto fronts).

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

from lazyformer_fairseq.experiments.compare.results import BASELINE, COSTS, Comparison, Measure, Model
from lazyformer_fairseq.finetuning.results import mean_bounds

CLOCKS = ("curve", "whole")
NEVER = math.inf  # of a time: the target was not reached
Target = Union[float, str]  # a value of the measure, or BASELINE
Times = Mapping[int, Mapping[str, float]]  # by seed, by cost
FEWEST_FOR_BOUNDS = 3
MEBIBYTE = 2**20


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
            own = _own_times(comparison, baseline, target, clock)
            times, shares = _times(models, clock, value, comparison)
            if family == baseline and target == BASELINE:
                times, shares = own, dict.fromkeys(own, 1.0)
            ratios = {cost: ratio for cost in COSTS if (ratio := _ratio(times, own, cost)) is not None}
            found.append(TimeToTarget(family, clock, value, times, ratios, shares))
    return found


def target_value(comparison: Comparison, baseline: str, target: Target) -> float:
    """The target as a value of the measure."""
    if target == BASELINE:
        return float(np.median(comparison.longest(baseline).finals(comparison.measure.name)))
    return float(target)


def _own_times(comparison: Comparison, baseline: str, target: Target, clock: str) -> Times:
    """The baseline's own time: its whole training where the target is its own end, which it reaches there."""
    if target == BASELINE:
        runs = comparison.longest(baseline).runs.items()
        return {seed: {cost: run.whole(cost) for cost in COSTS} for seed, run in runs}
    return _times(comparison.families[baseline], clock, float(target), comparison)[0]


def _times(
    models: Sequence[Model], clock: str, target: float, comparison: Comparison
) -> tuple[Times, Mapping[int, float]]:
    """What it cost each seed to reach the target, and the share of the training that did; NEVER for none.

    Args:
        models: of a family, the shortest training first.
    """
    measure, times, shares = comparison.measure, {}, {}
    if clock == "curve":
        for seed, run in models[-1].runs.items():
            values = run.curve[measure.name]
            times[seed] = {cost: first_crossing(run.curve[cost], values, target, measure) for cost in COSTS}
            shares[seed] = models[-1].share
        return times, shares
    for seed in dict.fromkeys(seed for model in models for seed in model.runs):
        times[seed], shares[seed] = dict.fromkeys(COSTS, NEVER), NEVER
        for model in models:
            run = model.runs.get(seed)
            if run is not None and measure.reaches(run.final[measure.name], target):
                times[seed], shares[seed] = {cost: run.whole(cost) for cost in COSTS}, model.share
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


@dataclass(frozen=True)
class Front:
    """Models by one cost and the measure.

    Attributes:
        name: of the cost.
        unit: of the cost.
        label: with its unit, for an axis.
        points: by model: the cost, and the median over seeds of the final measure.
        members: of the front, the cheapest first.
    """

    name: str
    unit: str
    label: str
    points: Mapping[str, tuple[float, float]]
    members: tuple[str, ...]


def fronts(comparison: Comparison) -> list[Front]:
    """Those of whole training time, of latency or else the time of an update, and of peak memory.

    A shorter training counts as a point of its own against training time alone: it changes no other cost. A model that
    diverged is no point.
    """
    measure, models = comparison.measure, list(comparison.models.values())
    longest = [comparison.longest(family) for family in comparison.families]
    seconds = {model.name: float(np.median(model.wholes("seconds"))) for model in models}
    if all("latency_milliseconds" in model.facts for model in models):
        what, *speed = "latency_milliseconds", "latency", "latency", "latency, ms"
    else:
        what, *speed = "milliseconds_per_update", "update", "ms", "time of an update, ms"
    speeds = {model.name: model.facts[what]["median"] for model in longest}
    memory = {model.name: model.facts["peak_memory_bytes"] / MEBIBYTE for model in longest}
    found = []
    for kind, unit, label, costs in (
        ("training", "s", "whole training, s", seconds),
        (*speed, speeds),
        ("memory", "MiB", "peak memory, MiB", memory),
    ):
        qualities = {model: float(np.median(comparison.models[model].finals(measure.name))) for model in costs}
        points = {name: (cost, qualities[name]) for name, cost in costs.items() if math.isfinite(qualities[name])}
        if points:
            found.append(Front(kind, unit, label, points, not_dominated(points, measure.lower_is_better)))
    return found


def not_dominated(points: Mapping[str, tuple[float, float]], lower_is_better: bool = True) -> tuple[str, ...]:
    """Those that no other point beats: none is as good in both and better in one. The cheapest first.

    Args:
        points: by name a cost, of which less is better, and a quality.
        lower_is_better: of the quality.
    """
    sign = 1 if lower_is_better else -1
    signed = {name: (cost, sign * quality) for name, (cost, quality) in points.items()}
    best = [name for name, point in signed.items() if not any(_beats(other, point) for other in signed.values())]
    return tuple(sorted(best, key=lambda name: signed[name]))


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[0] and one[1] <= other[1] and one != other
