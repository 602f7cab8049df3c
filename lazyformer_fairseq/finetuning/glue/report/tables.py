"""The tables of GLUE's report: the paper's, and those that back it up."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

from lazyformer_fairseq.finetuning.glue.report.paper_table import COLUMNS, PAPER_ROWS, PAPER_TASKS, SCORES, average
from lazyformer_fairseq.finetuning.report.results import Results
from lazyformer_fairseq.finetuning.report.tables import (
    INCOMPLETE,
    NOTHING,
    Table,
    extra_table,
    gap_table,
    score_table,
)

NAMES = {(score.task, score.split): name for name, score in SCORES.items()}


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


def paper_scores(results: Results, model: str) -> tuple[dict[str, float], frozenset[str]]:
    """The model's medians by their names in the paper's table, in percent, and the tasks whose grid lacks runs."""
    tasks = {task: results.of(model, task) for task in PAPER_TASKS if task in results.grid.tasks}
    scores = {
        score.name: float(np.median(tasks[score.task].values(score.split, score.metric)))
        for score in SCORES.values()
        if score.task in tasks and tasks[score.task].runs
    }
    return scores, frozenset(task for task, found in tasks.items() if not found.is_complete)


def own_row(results: Results, model: str) -> TableRow:
    """One of our models."""
    updates = next((run.updates for key, run in results.runs.items() if key.model == model), None)
    return TableRow(model, "ours", updates, *paper_scores(results, model))


def all_tables(results: Results) -> Iterator[Table]:
    """The paper's table first; the others where they have something to show."""
    rows = table_rows(results)
    headers = ["model", "updates", *COLUMNS, "Avg."]
    yield Table("GLUE, development sets, percent", headers, [row.cells() for row in rows])
    tables = [_partial_average(rows), score_table(results, NAMES), extra_table(results), gap_table(results)]
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
