"""Classes for the models, runs and curves in results.json, from one comparison or several joined comparisons.

From these, the module computes each model's time to a target, and the ratio of this time to the baseline's. There are
two clocks:

The *curve* clock stops when a run's validation metric first reaches the target; the time is interpolated linearly
between the two evaluations around that point. Losses are inflated while the learning rate is still high, so this clock
puts every model at a disadvantage except the baseline, which is timed over its whole run.

The *whole* clock takes the duration of the shortest run (``NAME``, ``NAME@0.7``, ...) whose final metric is at least as
good as the target. All of these runs completed their schedules, so nothing is interpolated; the resolution depends on
which fractions were trained.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.folder import RESULTS
from lazyformer_fairseq.report.numbers import mean_bounds
from lazyformer_fairseq.storage.json_files import read_json

# The costs that a curve may be plotted against, by their names in results.json.
COSTS = ("seconds", "updates", "tokens", "flops")
BASELINE = "baseline"  # the target that stands for the baseline's final value
# Settings that comparisons must share in order to be joined. The others (models, lengths, trials and place) may differ,
# because each model is compared with the baseline in its own folder.
RULES = ("recipe", "normalize_before", "precision", "fairseq_options")


@dataclass(frozen=True)
class Measure:
    """The held-out metric that models are compared by. Its name is the same in curves and final results."""

    name: str
    unit: str
    lower_is_better: bool = True

    def reaches(self, value: float, target: float) -> bool:
        """Return whether a value is at least as good as the target; NaN never is."""
        if self.lower_is_better:
            return value <= target
        return value >= target

    @property
    def label(self) -> str:
        """The name followed by the unit."""
        if self.unit:
            return f"{self.name}, {self.unit}"
        return self.name


@dataclass(frozen=True)
class Run:
    """One training run of a model.

    Attributes:
        seed: the run's seed.
        curve: arrays of shape (E,), with one entry per evaluation on held-out data: each of COSTS, counted from the
            start of the run, and the metrics.
        final: the trained model's metrics.
    """

    seed: int
    curve: Mapping[str, np.ndarray]
    final: Mapping[str, float]

    def total_costs(self) -> dict[str, float]:
        """Return the costs of the whole run, by name."""
        return {cost: float(self.curve[cost][-1]) for cost in COSTS}


@dataclass(frozen=True)
class Model:
    """A model in a comparison.

    Attributes:
        name: ``NAME``, or ``NAME@0.7`` for a model that was trained for this fraction of the baseline's time.
        family: the NAME, which runs of different lengths have in common.
        share: the fraction of the baseline's training time; 1 for all of it.
        baseline: the family that the model is compared with.
        facts: the model's entry in results.json, without the runs.
        runs: the runs by seed.
    """

    name: str
    family: str
    share: float
    baseline: str
    facts: Mapping[str, Any]
    runs: Mapping[int, Run]

    def finals(self, measure: str) -> list[float]:
        """Return a metric's final values, in seed order, for the runs that have it."""
        return [run.final[measure] for run in self.runs.values() if measure in run.final]

    def totals(self, cost: str) -> list[float]:
        """Return the total of one cost for each seed's run."""
        return [run.total_costs()[cost] for run in self.runs.values()]


@dataclass(frozen=True)
class Comparison:
    """The results of a comparison, or of several that were joined.

    Attributes:
        measure: the metric that models are compared by.
        models: the models by name.
        facts: the rest of results.json, which applies to all models.
    """

    measure: Measure
    models: Mapping[str, Model]
    facts: Mapping[str, Any]

    @cached_property
    def families(self) -> dict[str, list[Model]]:
        """The models of each family, in order of increasing run length."""
        found: dict[str, list[Model]] = {}
        for model in self.models.values():
            found.setdefault(model.family, []).append(model)
        return {family: sorted(models, key=lambda model: model.share) for family, models in found.items()}

    @property
    def baselines(self) -> list[str]:
        """The families that others are compared with; there can be several if folders were joined."""
        return list(dict.fromkeys(model.baseline for model in self.models.values()))

    def longest(self, family: str) -> Model:
        """Return the family's model that was trained the longest."""
        return self.families[family][-1]


def read_folders(folders: Sequence[Path]) -> Comparison:
    """Read the comparison in a folder, or read several and join them.

    Raises:
        UserError: a folder has no comparison results, or two comparisons followed different rules.
    """
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise UserError(f"{', '.join(names)}: the same folder is specified twice; list each folder only once")
    return join({name: read_folder(folder) for name, folder in zip(names, folders, strict=True)})


def read_folder(folder: Path) -> Comparison:
    """Read the comparison in a folder, or in a copy of its results.json under any name.

    Raises:
        UserError: there is no such file, or it does not contain the results of a comparison.
    """
    path = folder
    if not folder.is_file():
        path = folder / RESULTS
    if not path.is_file():
        raise UserError(f"{path}: no such file; specify folders of finished `lazyformer compare` runs")
    remedy = "run the comparison again; finished runs are not repeated"
    try:
        return comparison_of(read_json(path, remedy))
    except UserError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise UserError(
            f"{path} does not contain the results of a comparison ({type(error).__name__}: {error}); {remedy}"
        ) from error


def comparison_of(results: Mapping[str, Any]) -> Comparison:
    """Build a comparison from the contents of a results.json, skipping models without a finished run.

    Raises:
        UserError: the baseline has no finished run.
    """
    measure = Measure(**results["measure"])
    models = {}
    for name, facts in results["models"].items():
        runs = {}
        for seed, run in facts["runs"].items():
            runs[int(seed)] = _run(int(seed), run, measure)
        if runs:
            models[name] = Model(
                name=name,
                family=facts["of"],
                share=float(facts["share"]),
                baseline=results["baseline"],
                facts={key: value for key, value in facts.items() if key != "runs"},
                runs=runs,
            )
    if not any(model.family == results["baseline"] for model in models.values()):
        raise UserError(f"the baseline, {results['baseline']}, has no finished run yet; rerun the comparison")
    other_facts = {key: value for key, value in results.items() if key != "models"}
    return Comparison(measure, models, other_facts)


def _run(seed: int, run: Mapping[str, Any], measure: Measure) -> Run:
    curve = {name: np.array(run["curve"][name], dtype=float) for name in (*COSTS, measure.name)}
    lengths = {len(values) for values in curve.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise IndexError(f"the curve for seed {seed} is empty, or its columns differ in length")
    final = {measure.name: curve[measure.name][-1], **run["final"]}
    return Run(seed, curve, final)


def join(comparisons: Mapping[str, Comparison]) -> Comparison:
    """Join comparisons, passed by name, that followed the same rules.

    If the comparisons trained the same models with different seeds, their runs are pooled. Otherwise each model is
    compared with the baseline of its own comparison, and the comparison's name is appended to model names that occur
    more than once, as in ``bert [first]``.

    Raises:
        UserError: the comparisons followed different rules. The message names the first one that differs.
    """
    (first_name, first), *others = comparisons.items()
    rules = _rules(first)
    for name, other in others:
        found = _rules(other)
        for rule in dict.fromkeys([*rules, *found]):
            if rules.get(rule) != found.get(rule):
                raise UserError(
                    f"{first_name} and {name} cannot be joined: {rule} is {rules.get(rule)!r} in the first and "
                    f"{found.get(rule)!r} in the second, so their models were not trained under the same conditions"
                )
    if _differ_only_in_seeds(list(comparisons.values())):
        models = {}
        for name, model in first.models.items():
            runs: dict[int, Run] = {}
            for one in comparisons.values():
                runs |= one.models[name].runs
            models[name] = replace(model, runs=runs)
    else:
        models = _side_by_side(comparisons)
    devices = [one.facts["machine"]["device"] for one in comparisons.values()]
    machines = list(dict.fromkeys(devices))
    machine = {**first.facts["machine"], "device": " and ".join(machines)}
    return replace(first, models=models, facts={**first.facts, "machine": machine, "machines": machines})


def _rules(comparison: Comparison) -> dict[str, Any]:
    """Return the facts and settings that joined comparisons must share, by the names used in error messages."""
    facts = comparison.facts
    settings = facts["settings"]
    rules = {
        "the task": facts["task"],
        "the metric": facts["measure"],
        "the data (by checksum)": facts["data"]["checksums"],
        "the validation setup": facts["data"].get("validation"),
    }
    rules |= {f"sizes.{name}": value for name, value in settings.get("sizes", {}).items()}
    rules |= {name: settings.get(name) for name in RULES}
    return rules


def _differ_only_in_seeds(comparisons: Sequence[Comparison]) -> bool:
    """Return whether all comparisons trained the same models at the same rates on one machine with different seeds."""
    seeds: list[int] = []
    described = []
    for one in comparisons:
        seeds += {seed for model in one.models.values() for seed in model.runs}
        facts = {}
        for name, model in one.models.items():
            facts[name] = [
                model.facts.get(key) for key in ("what", "pattern", "parameters", "updates", "rate", "share")
            ]
        described.append((facts, one.baselines, one.facts["machine"]))
    has_distinct_seeds = len(set(seeds)) == len(seeds)
    return has_distinct_seeds and all(one == described[0] for one in described)


def _side_by_side(comparisons: Mapping[str, Comparison]) -> dict[str, Model]:
    """Return the models of all comparisons, appending the comparison's name to names that occur more than once."""
    counts = Counter(family for one in comparisons.values() for family in one.families)
    models = {}
    for label, one in comparisons.items():
        called = {}
        for family in one.families:
            called[family] = family
            if counts[family] > 1:
                called[family] = f"{family} [{label}]"
        for model in one.models.values():
            family = called[model.family]
            name = family + model.name.removeprefix(model.family)
            models[name] = replace(model, name=name, family=family, baseline=called[model.baseline])
    return models


CLOCKS = ("curve", "whole")
NEVER = math.inf  # the cost of a target that was not reached
Target = Union[float, str]  # a metric value, or BASELINE
Times = Mapping[int, Mapping[str, float]]  # by seed, then by cost
FEWEST_FOR_BOUNDS = 3
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Ratio:
    """The ratio of a model's time to its baseline's.

    Attributes:
        by_seed: the ratio for each seed; NEVER if the model did not reach the target.
    """

    by_seed: Mapping[int, float]

    @property
    def median(self) -> float:
        """The median over seeds."""
        return float(np.median(list(self.by_seed.values())))

    @property
    def low(self) -> float:
        """The lowest ratio of any seed."""
        return min(self.by_seed.values())

    @property
    def high(self) -> float:
        """The highest ratio of any seed."""
        return max(self.by_seed.values())

    @property
    def reached(self) -> int:
        """The number of seeds that reached the target."""
        return sum(ratio < NEVER for ratio in self.by_seed.values())

    @property
    def bounds(self) -> Optional[tuple[float, float]]:
        """The two-sided 95% confidence interval of the geometric mean over seeds, from Student's t-distribution.

        It is None for fewer than three seeds, or if one of them did not reach the target.
        """
        if len(self.by_seed) < FEWEST_FOR_BOUNDS or self.reached < len(self.by_seed) or self.low <= 0:
            return None
        found = mean_bounds(np.log(list(self.by_seed.values())))
        assert found is not None
        return math.exp(found[0]), math.exp(found[1])


@dataclass(frozen=True)
class TimeToTarget:
    """The costs at which a family's models reached a target.

    Attributes:
        model: the family's name.
        clock: one of CLOCKS.
        target: a metric value.
        times: the costs of reaching the target, by seed and then by name.
        ratios: the ratios to the baseline, by cost; costs for which the baseline did not reach the target are missing.
    """

    model: str
    clock: str
    target: float
    times: Times
    ratios: Mapping[str, Ratio]

    def median(self, cost: str) -> float:
        """Return the median of one of the costs over seeds."""
        return float(np.median([costs[cost] for costs in self.times.values()]))


def times_to_target(comparison: Comparison, target: Target = BASELINE) -> list[TimeToTarget]:
    """Compute the costs at which each family of models reaches the target, according to each clock.

    The *whole* clock applies only to families with runs of several lengths.

    Args:
        comparison: the comparison.
        target: a metric value, or BASELINE for the final value of each model's baseline (median over seeds).
    """
    found = []
    measure = comparison.measure
    for family, models in comparison.families.items():
        baseline = models[-1].baseline
        longest = comparison.longest(baseline)
        value = target
        if target == BASELINE:
            value = float(np.median(longest.finals(measure.name)))
        clocks = CLOCKS
        if len(models) == 1:
            clocks = ("curve",)

        for clock in clocks:
            own = _times(comparison.families[baseline], clock, value, measure)
            if target == BASELINE:  # by definition, the baseline reaches its own final value at the end, not earlier
                own = {seed: run.total_costs() for seed, run in longest.runs.items()}
            times = own
            if family != baseline:
                times = _times(models, clock, value, measure)

            ratios = {}
            for cost in COSTS:
                ratio = _ratio(times, own, cost)
                if ratio is not None:
                    ratios[cost] = ratio
            found.append(TimeToTarget(model=family, clock=clock, target=value, times=times, ratios=ratios))
    return found


def _times(models: Sequence[Model], clock: str, target: float, measure: Measure) -> Times:
    """Return the cost at which each seed reached the target, or NEVER for seeds that did not reach it.

    Args:
        models: a family's models, in order of increasing run length.
        clock: one of CLOCKS.
        target: a metric value.
        measure: the metric, including whether lower values are better.
    """
    times = {}
    if clock == "curve":
        for seed, run in models[-1].runs.items():
            values = run.curve[measure.name]
            times[seed] = {cost: first_crossing(run.curve[cost], values, target, measure) for cost in COSTS}
        return times
    for model in models:
        for seed, run in model.runs.items():
            times.setdefault(seed, dict.fromkeys(COSTS, NEVER))
            reached_before = times[seed]["updates"] != NEVER
            if not reached_before and measure.reaches(run.final[measure.name], target):
                times[seed] = run.total_costs()
    return times


def first_crossing(spent: np.ndarray, values: np.ndarray, target: float, measure: Measure) -> float:
    """Return the cost at which a curve first reached the target, or NEVER if it did not.

    Args:
        spent: the cost spent at each evaluation, increasing, (E,).
        values: the metric at each evaluation, (E,). Non-finite values are excluded from interpolation.
        target: a metric value.
        measure: the metric, including whether lower values are better.
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
    """Return the ratio of a model's times to its baseline's for the seeds that both models have.

    It is None if there are no such seeds, or if the baseline misses the target with any of them.
    """
    seeds = [seed for seed in times if seed in own]
    if not seeds or any(not 0 < own[seed][cost] < NEVER for seed in seeds):
        return None
    return Ratio({seed: times[seed][cost] / own[seed][cost] for seed in seeds})
