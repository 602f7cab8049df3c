"""results.json as objects: models, their runs, the curve of each; of one comparison, or of several joined."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.folder import RESULTS
from lazyformer_fairseq.storage.json_files import read_json

# What a curve may be drawn against, as results.json calls it.
COSTS = ("seconds", "updates", "tokens", "flops")
BASELINE = "baseline"  # the target that is where the baseline ended
# Settings that two comparisons must share for their models to have done the same. Others say which models, for how
# long, with how many tries and where: a model is compared with the baseline of its own folder.
RULES = ("recipe", "normalize_before", "precision", "fairseq_options")


@dataclass(frozen=True)
class Measure:
    """What is measured on held-out data, by the name that curves and final results give it."""

    name: str
    unit: str
    lower_is_better: bool = True

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is as good as the target. NaN never is."""
        return value <= target if self.lower_is_better else value >= target

    @property
    def label(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name


@dataclass(frozen=True)
class Run:
    """One training of a model.

    Attributes:
        curve: arrays (E,), one entry an evaluation on held-out data: each of COSTS, all counted from the start of this
            training and of this training alone, and the measures.
        final: the measures of the trained model.
    """

    seed: int
    curve: Mapping[str, np.ndarray]
    final: Mapping[str, float]

    def whole(self, cost: str) -> float:
        """What the whole training cost, in a unit of COSTS."""
        return float(self.curve[cost][-1])


@dataclass(frozen=True)
class Model:
    """A model of a comparison.

    Attributes:
        name: ``NAME``, or ``NAME@0.7`` for one that was trained for this share of the updates.
        family: NAME.
        share: of the updates, 1 for all.
        baseline: the family that it is compared with.
        facts: its entry in results.json.
        runs: by seed.
    """

    name: str
    family: str
    share: float
    baseline: str
    facts: Mapping[str, Any]
    runs: Mapping[int, Run]

    def finals(self, measure: str) -> list[float]:
        """Of the trained models, by seed in order; those that were measured."""
        return [run.final[measure] for run in self.runs.values() if measure in run.final]

    def wholes(self, cost: str) -> list[float]:
        return [run.whole(cost) for run in self.runs.values()]


@dataclass(frozen=True)
class Comparison:
    """All models, and what was the same for all of them.

    Attributes:
        facts: the rest of results.json.
    """

    measure: Measure
    models: Mapping[str, Model]
    facts: Mapping[str, Any]

    @cached_property
    def families(self) -> dict[str, list[Model]]:
        """The models of each family, the shortest training first."""
        found: dict[str, list[Model]] = {}
        for model in self.models.values():
            found.setdefault(model.family, []).append(model)
        return {family: sorted(models, key=lambda model: model.share) for family, models in found.items()}

    @property
    def baselines(self) -> list[str]:
        """Families that others are compared with; more than one where folders were joined."""
        return list(dict.fromkeys(model.baseline for model in self.models.values()))

    def longest(self, family: str) -> Model:
        """The model of a family that was trained for all updates."""
        return self.families[family][-1]


def read_folders(folders: Sequence[Path]) -> Comparison:
    """The comparison of one folder, or of several joined.

    Raises:
        UserError: a folder has no such results, or two of them kept different rules.
    """
    names = [folder.name if len({one.name for one in folders}) == len(folders) else str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise UserError(f"{', '.join(names)}: a folder is there twice; leave one out")
    return join({name: read_folder(folder) for name, folder in zip(names, folders, strict=True)})


def read_folder(folder: Path) -> Comparison:
    """Of a folder's results.json, or of such a file under any name."""
    path = folder if folder.is_file() else folder / RESULTS
    if not path.is_file():
        raise UserError(f"{path}: no such file; give folders that `lazyformer compare` has finished")
    remedy = "run the comparison again; it trains nothing twice"
    try:
        return comparison_of(read_json(path, remedy))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: is no comparison's results ({type(error).__name__}: {error}); {remedy}") from error


def comparison_of(results: Mapping[str, Any]) -> Comparison:
    """Of results.json's content. Models without a run are left out."""
    measure = Measure(**results["measure"])
    models = {
        name: Model(
            name,
            facts["of"],
            float(facts["share"]),
            results["baseline"],
            {key: value for key, value in facts.items() if key != "runs"},
            {int(seed): _run(int(seed), run, measure) for seed, run in facts["runs"].items()},
        )
        for name, facts in results["models"].items()
        if facts["runs"]
    }
    if not any(model.family == results["baseline"] for model in models.values()):
        raise UserError(f"the baseline, {results['baseline']}, has no finished run yet; rerun the comparison")
    return Comparison(measure, models, {key: value for key, value in results.items() if key != "models"})


def _run(seed: int, run: Mapping[str, Any], measure: Measure) -> Run:
    curve = {name: np.array(run["curve"][name], dtype=float) for name in (*COSTS, measure.name)}
    if len({len(values) for values in curve.values()}) != 1 or not len(curve[measure.name]):
        raise IndexError(f"the curve of seed {seed} is empty, or its columns differ in length")
    return Run(seed, curve, {measure.name: curve[measure.name][-1], **run["final"]})


def join(comparisons: Mapping[str, Comparison]) -> Comparison:
    """All models of comparisons that kept the same rules, by the name of each comparison.

    Where the comparisons have other seeds, the same models and one baseline, a model gets the runs of all of them.
    Otherwise each model is compared with the baseline of its own comparison, and models of equal names get that of the
    comparison, too: ``bert [first]``.

    Raises:
        UserError: names the first rule in which two comparisons differ.
    """
    (first_name, first), *others = comparisons.items()
    rules = _rules(first)
    for name, other in others:
        found = _rules(other)
        for rule in dict.fromkeys([*rules, *found]):
            if rules.get(rule) != found.get(rule):
                raise UserError(
                    f"{first_name} and {name} cannot be joined: {rule} is {rules.get(rule)!r} in the first and "
                    f"{found.get(rule)!r} in the second, so their models did not do the same"
                )
    if _differ_in_seeds_alone(list(comparisons.values())):
        models = {
            name: replace(
                model, runs={seed: run for one in comparisons.values() for seed, run in one.models[name].runs.items()}
            )
            for name, model in first.models.items()
        }
    else:
        models = _side_by_side(comparisons)
    machines = list(dict.fromkeys(one.facts["machine"]["device"] for one in comparisons.values()))
    machine = {**first.facts["machine"], "device": " and ".join(machines)}
    return replace(first, models=models, facts={**first.facts, "machine": machine, "machines": machines})


def _rules(comparison: Comparison) -> dict[str, Any]:
    """What two comparisons must share, each under the name that a reader knows it by."""
    facts, settings = comparison.facts, comparison.facts["settings"]
    return {
        "the task": facts["task"],
        "the measure": facts["measure"],
        "the data's checksums": facts["data"]["checksums"],
        "what is masked and counted in validation": facts["data"].get("validation"),
        **{f"sizes.{name}": value for name, value in settings.get("sizes", {}).items()},
        **{name: settings.get(name) for name in RULES},
    }


def _differ_in_seeds_alone(comparisons: Sequence[Comparison]) -> bool:
    """Whether the same models, at the same rates, were trained with other seeds on one machine."""
    alike = ("what", "pattern", "parameters", "updates", "rate", "share")
    described = [
        ([{key: model.facts.get(key) for key in alike} for model in one.models.values()],
         list(one.models), one.baselines, one.facts["machine"])
        for one in comparisons
    ]  # fmt: skip
    seeds = [seed for one in comparisons for seed in {seed for model in one.models.values() for seed in model.runs}]
    return len(set(seeds)) == len(seeds) and all(one == described[0] for one in described)


def _side_by_side(comparisons: Mapping[str, Comparison]) -> dict[str, Model]:
    counts, models = Counter(family for one in comparisons.values() for family in one.families), {}
    for label, one in comparisons.items():
        for model in one.models.values():
            family, baseline = (
                f"{name} [{label}]" if counts[name] > 1 else name for name in (model.family, model.baseline)
            )
            name = family + model.name.removeprefix(model.family)
            models[name] = replace(model, name=name, family=family, baseline=baseline)
    return models
