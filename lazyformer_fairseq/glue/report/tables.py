"""The tables of a report: the paper's, and those that back it up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Optional

import numpy as np
from tabulate import tabulate

from lazyformer_fairseq.glue.report.paper_table import COLUMNS, PAPER_ROWS, SCORES, average
from lazyformer_fairseq.glue.report.results import Measurement, Results, RunKey, mean_bounds

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


@dataclass(frozen=True)
class TableRow:
    """A row of the paper's table.

    Attributes:
        source: "ours", "baseline" or "paper".
        scores: name of a score -> percent; those that are known.
        incomplete: tasks whose grid lacks runs.
    """

    name: str
    source: str
    updates: Optional[int]
    scores: dict[str, float]
    incomplete: frozenset[str] = field(default=frozenset())

    @property
    def complete_scores(self) -> dict[str, float]:
        return {name: value for name, value in self.scores.items() if SCORES[name].task not in self.incomplete}

    @property
    def average(self) -> Optional[float]:
        """The average of the paper's nine numbers, where all are there and complete."""
        return average(self.complete_scores)

    def cells(self) -> list[str]:
        columns = ["/".join(self._cell(name) for name in names) for names in COLUMNS.values()]
        missing = NOTHING if self.source == "baseline" else "incomplete"
        return [
            self.name,
            NOTHING if self.updates is None else f"{self.updates:,}",
            *columns,
            missing if self.average is None else f"{self.average:.2f}",
        ]

    def _cell(self, name: str) -> str:
        if name not in self.scores:
            return NOTHING
        return f"{self.scores[name]:.2f}{INCOMPLETE if SCORES[name].task in self.incomplete else ''}"


def table_rows(results: Results) -> list[TableRow]:
    """Our models, the baseline of their development sets, and the paper's models."""
    ours = [own_row(results, model) for model in results.grid.models]
    baseline = {score.name: results.baseline(score.task, score.split, score.metric) for score in SCORES.values()}
    known = {name: value for name, value in baseline.items() if value is not None}
    return [
        *ours,
        TableRow("majority class or constant", "baseline", None, known),
        *(TableRow(f"{row.model} (paper)", "paper", row.updates, dict(row.scores)) for row in PAPER_ROWS),
    ]


def own_row(results: Results, model: str) -> TableRow:
    """One of our models."""
    updates = next((run.updates for key, run in results.runs.items() if key.model == model), None)
    return TableRow(model, "ours", updates, *results.paper_scores(model))


def all_tables(results: Results) -> Iterator[Table]:
    """The paper's table first; the others where they have something to show."""
    rows = table_rows(results)
    headers = ["model", "updates", *COLUMNS, "Avg."]
    yield Table("GLUE, development sets, percent", headers, [row.cells() for row in rows])
    tables = [_partial_average(rows), _score_table(results), _extra_table(results), _gap_table(results)]
    yield from (table for table in tables if table is not None and table.rows)


def _partial_average(rows: list[TableRow]) -> Optional[Table]:
    """Where some model lacks one of the nine numbers: the mean of those that all models have."""
    ours = [row for row in rows if row.source == "ours"]
    shared = [name for name in SCORES if all(name in row.complete_scores for row in ours)]
    if len(shared) < 2 or len(shared) == len(SCORES):
        return None
    label = f"mean of {', '.join(shared)}"
    cells = [[row.name, f"{np.mean([row.scores[name] for name in shared]):.2f}"] for row in rows]
    return Table(f"Not the paper's average: {label} alone", ["model", label], cells)


def _score_table(results: Results) -> Table:
    names = {(score.task, score.split): name for name, score in SCORES.items()}
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


def _extra_table(results: Results) -> Table:
    """The metrics that the paper's table leaves out, at the rate that its own metric chose."""
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


def _gap_table(results: Results) -> Table:
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
