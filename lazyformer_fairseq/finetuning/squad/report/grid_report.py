"""The report of a grid of runs on SQuAD: its tables, notes and pictures, as files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.finetuning.report.files import refuse_no_runs, six_digits, write_files
from lazyformer_fairseq.finetuning.report.notes import notes_on_failures, notes_on_runs
from lazyformer_fairseq.finetuning.report.pictures import Panel, draw_seeds, draw_updates
from lazyformer_fairseq.finetuning.report.results import Results
from lazyformer_fairseq.finetuning.report.tables import (
    INCOMPLETE,
    NOTHING,
    Table,
    extra_table,
    gap_table,
    score_table,
)
from lazyformer_fairseq.finetuning.scored_task import split_file
from lazyformer_fairseq.finetuning.squad.protocol import EPOCHS, LEARNING_RATES, OFFICIAL_QUESTIONS, PAPER_F1, SEEDS
from lazyformer_fairseq.finetuning.squad.report.read_results import read_results
from lazyformer_fairseq.finetuning.squad_family import SQUAD
from lazyformer_fairseq.report.tables import write_csv

PANELS = [Panel(name, SQUAD.name, "valid", metric) for name, metric in (("F1", "f1"), ("exact match", "exact_match"))]
BASELINE = "the best heuristic by F1"


def write_report(folder: Path, output: Path) -> str:
    """Writes squad.md, squad.csv, squad_scores.csv, squad.tex and the pictures into `output`. Returns the Markdown.

    Raises:
        UserError: a file of the folder is wrong, or no run has ended well.
    """
    results = read_results(folder)
    refuse_no_runs(results)
    output.mkdir(parents=True, exist_ok=True)
    rows = list(table_rows(results))
    titles = ("model", "updates", "F1", "exact match")
    first = Table("SQuAD v1.1, development set, percent", titles, [row.cells() for row in rows])
    tables = [first, score_table(results, {})]
    tables += [table for table in (extra_table(results), gap_table(results)) if table.rows]
    markdown = write_files(results, output, "squad", tables, notes(results), _draw(results, output))
    write_csv([six_digits(row.as_csv()) for row in rows], output / "squad.csv")
    return markdown


@dataclass(frozen=True)
class TableRow:
    """A row of the table.

    Attributes:
        source: "ours", "baseline" or "paper".
        marks: metric -> percent; those that are known.
        is_complete: whether the grid has all of its runs.
    """

    name: str
    source: str
    marks: Mapping[str, float]
    updates: Optional[int] = None
    is_complete: bool = True

    def cells(self) -> list[str]:
        sign = "" if self.is_complete else INCOMPLETE
        marks = [f"{self.marks[name]:.2f}{sign}" if name in self.marks else NOTHING for name in SQUAD.metrics]
        return [self.name, NOTHING if self.updates is None else f"{self.updates:,}", *marks]

    def as_csv(self) -> dict[str, Any]:
        marks = {metric: self.marks.get(metric) for metric in SQUAD.metrics}
        known = {"model": self.name, "source": self.source, "updates": self.updates}
        return {**known, **marks, "incomplete": "" if self.is_complete else "yes"}


def table_rows(results: Results) -> Iterator[TableRow]:
    """Our models, the heuristics, and the paper's models."""
    for model in results.grid.models:
        found = results.of(model, SQUAD.name)
        updates = next((run.updates for run in found.runs), None)
        marks = {metric: float(np.median(found.values("valid", metric))) for metric in SQUAD.metrics if found.runs}
        yield TableRow(model, "ours", marks, updates, found.is_complete)
    for name, marks in _heuristics(results).items():
        yield TableRow(name, "baseline", marks)
    for name, f1 in PAPER_F1.items():
        yield TableRow(f"{name} (paper)", "paper", {"f1": f1})


def _heuristics(results: Results) -> dict[str, dict[str, float]]:
    """Each heuristic's marks in percent, the best first."""
    file = split_file(SQUAD, "valid")
    run = next(iter(results.runs.values()))
    of_file = {name: found[file] for name, found in (run.baselines or {"heuristic": run.baseline}).items()}
    ordered = sorted(of_file.items(), key=lambda each: -each[1][SQUAD.selecting_metric])
    return {name: {metric: 100 * marks[metric] for metric in SQUAD.metrics} for name, marks in ordered}


def notes(results: Results) -> list[str]:
    """Notes that a reader needs to compare these numbers with others, a sentence or two each."""
    said = [
        "A score is the median over seeds at each learning rate, and of these medians the best by F1; exact match "
        "stands at the same rate. Both as the official evaluation of version 1.1 defines them, times 100.",
        "Rows marked (paper) are those of PAR, arXiv 2009.04534, Table 4: medians of five runs on the official "
        "development set, F1 alone; theirs, not measured here. The other rows without updates are heuristics, which "
        "have no model.",
        *notes_on_runs(results),
        *_deviations(results),
    ]
    return said + notes_on_failures(results)


def _deviations(results: Results) -> Iterator[str]:
    """Where runs differ from the protocol, and from the official files."""
    grid, runs = results.grid, list(results.runs.values())
    yield (
        f"Learning rates {_listed(f'{rate:g}' for rate in grid.rates)}; seeds {_listed(map(str, grid.seeds))}; epochs "
        f"{_either({f'{run.epochs:g}' for run in runs})}. The usual protocol has "
        f"{_listed(f'{rate:g}' for rate in LEARNING_RATES)}, {len(SEEDS)} seeds and {EPOCHS} epochs."
    )
    trained = _either({f"{run.train_rows:,}" for run in runs})
    official = f"{OFFICIAL_QUESTIONS['train']:,}"
    yield f"Trained on {trained} questions" + (
        "." if trained == official else f"; the official file has {official}, so compare with no published number."
    )


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


def _either(values: set[str]) -> str:
    return " or ".join(sorted(values))


def _draw(results: Results, output: Path) -> Sequence[Path]:
    """Draws squad_seeds.png and, where there are checkpoints to draw it of, squad_updates.png."""
    seeds, updates = output / "squad_seeds.png", output / "squad_updates.png"
    draw_seeds(results, PANELS, seeds, BASELINE)
    if draw_updates(results, PANELS, updates, BASELINE):
        return [seeds, updates]
    updates.unlink(missing_ok=True)  # of an earlier report on another grid
    return [seeds]
