"""A comparison as tables: few columns for a reader, every number in a column of its own for a program."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
from tabulate import tabulate

from lazyformer_fairseq.experiments.compare.report.comparison import COSTS, Comparison, Model
from lazyformer_fairseq.experiments.compare.report.fronts import MEBIBYTE, Front
from lazyformer_fairseq.experiments.compare.report.times import NEVER, Ratio, TimeToTarget

NOTHING = "-"
NOT_REACHED = "not reached"
SPREADS = ("milliseconds_per_update", "latency_milliseconds")


@dataclass(frozen=True)
class Table:
    """Cells as they are printed; the first `texts` columns hold words."""

    title: str
    rows: Sequence[Mapping[str, str]]
    texts: int = 1

    def printed(self, style: str) -> str:
        """In a format of tabulate's; it escapes what LaTeX would read as its own."""
        align = ["left"] * self.texts + ["right"] * (len(self.rows[0]) - self.texts)
        return tabulate(self.rows, "keys", tablefmt=style, disable_numparse=True, colalign=align)


def cost_table(comparison: Comparison, fronts: Sequence[Front]) -> Table:
    """Every model: its size, what its training cost, how good it became, and the fronts that it is on."""
    measure = comparison.measure
    rows = []
    for model in comparison.models.values():
        facts = model.facts
        row = {
            "model": model.name,
            "parameters": f"{facts['parameters']:,}",
            "updates": f"{facts['updates']:,}",
            "ms": _median(facts.get("milliseconds_per_update")),
            "s": _number(float(np.median(model.wholes("seconds")))),
            "MiB": _mebibytes(facts.get("peak_memory_bytes")),
            measure.label: with_range(model.finals(measure.name)),
        }
        if of_test := model.finals(f"test_{measure.name}"):
            row["of test"] = with_range(of_test).split()[0]
        if "latency_milliseconds" in facts:
            row["latency, ms"] = _median(facts["latency_milliseconds"])
        rows.append(row | {"on front of": ", ".join(front.unit for front in fronts if model.name in front.members)})
    headers = dict.fromkeys(header for row in rows for header in row)
    return Table("Cost and quality", [{header: row.get(header, NOTHING) for header in headers} for row in rows])


def time_table(times: Sequence[TimeToTarget]) -> Table:
    """What it took to reach the target, as a share of the baseline's own time."""
    rows = [
        {
            "model": time.model,
            "clock": time.clock,
            "seconds": _number(middle) if (middle := time.median("seconds")) < NEVER else NOT_REACHED,
            "ratio (range)": _with_ends(time.ratios.get("seconds")),
            "95% bounds": _bounds(time.ratios.get("seconds")),
            "updates": _ratio(time.ratios.get("updates")),
            "FLOPs": _ratio(time.ratios.get("flops")),
            "seeds": f"{sum(costs['seconds'] < NEVER for costs in time.times.values())} of {len(time.times)}",
        }
        for time in times
    ]
    return Table("Time to the target", rows, texts=2)


def csv_models(comparison: Comparison, fronts: Sequence[Front]) -> list[dict[str, Any]]:
    """A row a model, in full precision."""
    measures = dict.fromkeys(
        name for model in comparison.models.values() for run in model.runs.values() for name in run.final
    )
    return [
        {
            **{"model": model.name, "of": model.family, "share": model.share, "baseline": model.baseline},
            **{"what": model.facts.get("what"), "pattern": model.facts.get("pattern")},
            **(model.facts.get("sublayers") or {}),
            **{key: value for key, value in model.facts.items() if isinstance(value, (int, float)) and key != "share"},
            **_spreads(model.facts),
            **{"tries": len(model.facts.get("tries") or ()), "seeds": len(model.runs)},
            **_with_columns("seconds", model.wholes("seconds")),
            **{column: value for name in measures for column, value in _of_measure(model, name).items()},
            **{f"on_front_of_{front.name}": int(model.name in front.members) for front in fronts},
        }
        for model in comparison.models.values()
    ]


def csv_times(times: Sequence[TimeToTarget]) -> Iterator[dict[str, Any]]:
    """A row for each model, clock and cost; what was not reached is inf."""
    for time in times:
        for cost in COSTS:
            ratio = time.ratios.get(cost)
            low, high = (ratio.bounds if ratio is not None else None) or (None, None)
            yield {
                **{"model": time.model, "baseline": time.baseline, "clock": time.clock, "target": time.target},
                **{"cost": cost, "median": time.median(cost)},
                **{f"seed_{seed}": costs[cost] for seed, costs in time.times.items()},
                **({} if ratio is None else _of_ratio(ratio)),
                **{"ratio_t95_low": low, "ratio_t95_high": high},
            }


def csv_curves(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """A row for each evaluation of each run."""
    for model in comparison.models.values():
        for seed, run in model.runs.items():
            for place in range(len(run.curve["updates"])):
                yield {"model": model.name, "seed": seed, **{name: values[place] for name, values in run.curve.items()}}


def with_range(values: Sequence[float]) -> str:
    """The median, and in brackets the lowest and the highest where there are several; four digits or more."""
    middle = float(np.median(values))
    said, *ends = (f"{value:.{1 if abs(middle) >= 100 else 3}f}" for value in (middle, min(values), max(values)))
    return said if len(values) < 2 else f"{said} ({' to '.join(ends)})"


def _of_ratio(ratio: Ratio) -> dict[str, float]:
    found = {"ratio_median": ratio.median, "ratio_lowest": ratio.low, "ratio_highest": ratio.high}
    return found | {f"ratio_seed_{seed}": value for seed, value in ratio.by_seed.items()}


def _of_measure(model: Model, name: str) -> dict[str, float]:
    values = model.finals(name)
    return _with_columns(name, values) if values else {}


def _with_columns(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: float(np.median(values)), f"{name}_lowest": min(values), f"{name}_highest": max(values)}


def _spreads(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name if part == "median" else f"{name}_{part}": facts[name].get(part)
        for name in SPREADS
        if facts.get(name)
        for part in ("median", "low", "high")
    }


def _ratio(ratio: Optional[Ratio]) -> str:
    return NOTHING if ratio is None or ratio.median == NEVER else f"{ratio.median:.3f}"


def _with_ends(ratio: Optional[Ratio]) -> str:
    if ratio is None:
        return NOTHING
    middle, low, high = (f"{end:.3f}" if end < NEVER else "never" for end in (ratio.median, ratio.low, ratio.high))
    if ratio.reached == 0:
        return NOT_REACHED
    return middle if len(ratio.by_seed) < 2 else f"{middle} ({low} to {high})"


def _bounds(ratio: Optional[Ratio]) -> str:
    bounds = None if ratio is None else ratio.bounds
    return NOTHING if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"


def _median(spread: Optional[Mapping[str, float]]) -> str:
    return NOTHING if not spread else _number(spread["median"])


def _mebibytes(held: Optional[int]) -> str:
    return NOTHING if held is None else _number(held / MEBIBYTE)


def _number(value: float) -> str:
    """Three digits or more, and no power of ten."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
