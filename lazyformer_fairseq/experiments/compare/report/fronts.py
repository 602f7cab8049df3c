"""Pareto fronts: the models that no other one beats in cost and in quality at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

import numpy as np

from lazyformer_fairseq.experiments.compare.report.comparison import Comparison, Model

MEBIBYTE = 2**20


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
    """Those of whole training time, of latency or else the time of an update, and of peak memory, as far as known.

    A shorter training counts as a point of its own against training time alone: it changes no other cost. A model that
    diverged is no point.
    """
    measure, models = comparison.measure, comparison.models.values()
    longest = [comparison.longest(family) for family in comparison.families]
    has_latency = all("latency_milliseconds" in model.facts for model in models)
    speed = ("latency", "latency", "latency, ms") if has_latency else ("update", "ms", "time of an update, ms")
    found = []
    for name, unit, label, cost_of, of in (
        ("training", "s", "whole training, s", _seconds, models),
        (*speed, _latency if has_latency else _update, longest),
        ("memory", "MiB", "peak memory, MiB", _memory, longest),
    ):
        points = {
            model.name: (cost, quality)
            for model in of
            if (cost := cost_of(model)) is not None
            and math.isfinite(quality := float(np.median(model.finals(measure.name))))
        }
        if points:
            found.append(Front(name, unit, label, points, not_dominated(points, measure.lower_is_better)))
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


def _seconds(model: Model) -> float:
    return float(np.median(model.wholes("seconds")))


def _latency(model: Model) -> float:
    return model.facts["latency_milliseconds"]["median"]


def _update(model: Model) -> Optional[float]:
    return (model.facts.get("milliseconds_per_update") or {}).get("median")


def _memory(model: Model) -> Optional[float]:
    held = model.facts.get("peak_memory_bytes")
    return None if held is None else held / MEBIBYTE
