"""results.json as objects: models, their runs, the curve of each."""

from collections.abc import Mapping
from dataclasses import dataclass
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
        facts: its entry in results.json.
        runs: by seed.
    """

    name: str
    family: str
    share: float
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
        baseline: the family that the others are compared with.
        facts: the rest of results.json.
    """

    baseline: str
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

    def longest(self, family: str) -> Model:
        """The model of a family that was trained for all updates."""
        return self.families[family][-1]


def read_folder(folder: Path) -> Comparison:
    """Of a folder's results.json, or of such a file under any name."""
    path = folder if folder.is_file() else folder / RESULTS
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a folder that `lazyformer compare` has finished")
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
            {key: value for key, value in facts.items() if key != "runs"},
            {int(seed): _run(int(seed), run, measure) for seed, run in facts["runs"].items()},
        )
        for name, facts in results["models"].items()
        if facts["runs"]
    }
    if not any(model.family == results["baseline"] for model in models.values()):
        raise UserError(f"the baseline, {results['baseline']}, has no finished run yet; rerun the comparison")
    return Comparison(
        results["baseline"], measure, models, {key: value for key, value in results.items() if key != "models"}
    )


def _run(seed: int, run: Mapping[str, Any], measure: Measure) -> Run:
    curve = {name: np.array(run["curve"][name], dtype=float) for name in (*COSTS, measure.name)}
    if len({len(values) for values in curve.values()}) != 1 or not len(curve[measure.name]):
        raise IndexError(f"the curve of seed {seed} is empty, or its columns differ in length")
    return Run(seed, curve, {measure.name: curve[measure.name][-1], **run["final"]})
