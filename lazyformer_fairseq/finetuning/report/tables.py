"""The tables that every report has: each score with its spread, other metrics, what is missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tabulate import tabulate

from lazyformer_fairseq.finetuning.report.results import Measurement, Results, RunKey, mean_bounds

NOTHING = "-"
INCOMPLETE = "*"


@dataclass(frozen=True)
class Table:
    """Cells as they are printed. `texts`: how many columns from the left hold words."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1

    def printed(self, style: str) -> str:
        align = ["left"] * self.texts + ["right"] * (len(self.headers) - self.texts)
        return tabulate(self.rows, self.headers, tablefmt=style, disable_numparse=True, colalign=align)


def score_table(results: Results, names: Mapping[tuple[str, str], str]) -> Table:
    """The selecting metric of every model and development set.

    Args:
        names: of scores that are not called as their task, by task and split.
    """
    rows = []
    for one in filter(lambda one: one.selects, results.measurements()):
        bounds = mean_bounds(one.values)
        rows.append(
            [
                *(one.model, names.get((one.task, one.split), one.task), one.metric, *_median_and_span(one)),
                f"{len(one.values)} of {len(results.grid.seeds)}",
                f"{one.found.rate:g}",
                f"{one.baseline:.2f}",
                NOTHING if bounds is None else _span(*bounds),
                NOTHING if bounds is None else ("yes" if bounds[0] > one.baseline else "no"),
            ]
        )
    headers = (
        *("model", "score", "metric", "median", "min to max", "seeds", "rate", "baseline"),
        *("95% bounds of the mean", "above baseline"),
    )
    return Table("Each score: median and spread over the seeds of the chosen rate", headers, rows, texts=3)


def extra_table(results: Results) -> Table:
    """The other metrics, at the rate that the selecting one chose."""
    rows = [
        [one.model, one.task, one.metric, *_median_and_span(one), f"{one.baseline:.2f}"]
        for one in results.measurements()
        if not one.selects
    ]
    headers = ("model", "task", "metric", "median", "min to max", "baseline")
    return Table("Other metrics of the same runs", headers, rows, texts=3)


def _median_and_span(one: Measurement) -> tuple[str, str]:
    median = f"{np.median(one.values):.2f}{'' if one.found.is_complete else INCOMPLETE}"
    return median, _span(one.values.min(), one.values.max())


def gap_table(results: Results) -> Table:
    """Models and tasks that lack runs."""
    rows = []
    for model in results.grid.models:
        for task in results.grid.tasks:
            found = results.of(model, task)
            if not found.is_complete:
                done = f"{len(found.runs)} of {len(found.asked)}"
                rows.append([model, task, done, _listed(found.missing), _listed(found.failed)])
    headers = ("model", "task", "runs done", "missing: rate (seeds)", "failed: rate (seeds)")
    return Table("Incomplete grids", headers, rows, texts=len(headers))


def _listed(keys: list[RunKey]) -> str:
    """How many, and which: "3: 2e-05 (1 2), 3e-05 (1)"."""
    seeds: dict[float, list[str]] = {}
    for key in keys:
        seeds.setdefault(key.rate, []).append(str(key.seed))
    if not keys:
        return "0"
    return f"{len(keys)}: " + ", ".join(f"{rate:g} ({' '.join(numbers)})" for rate, numbers in seeds.items())


def _span(low: float, high: float) -> str:
    return f"{low:.2f} to {high:.2f}"
