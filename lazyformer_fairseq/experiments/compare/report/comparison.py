"""results.json as objects: models, their runs, the curve of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

# What a curve may be drawn against, as results.json calls it.
COSTS = ("seconds", "updates", "tokens", "flops")


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
