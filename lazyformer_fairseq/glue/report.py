"""The report of a grid of fine-tuning runs: the paper's table, and all that must stand beside it to be believed."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import numpy as np
from tabulate import tabulate

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.glue.paper_table import COLUMNS, PAPER_ROWS, PAPER_TASKS, SCORES, Score, average
from lazyformer_fairseq.glue.pictures import draw_seeds, draw_updates
from lazyformer_fairseq.glue.results import (
    Results,
    Run,
    RunKey,
    TaskResults,
    development_splits,
    mean_bounds,
    read_results,
)
from lazyformer_fairseq.glue.task_table import TASKS

NOTHING = "-"
INCOMPLETE = "*"
PAPER_RATES = (2e-5, 3e-5, 4e-5, 5e-5)
PAPER_SEEDS = 5


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
        """Of the paper's nine numbers, where each is there and complete."""
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


def write_report(folder: Path, output: Path) -> str:
    """Writes glue.md, glue.csv, glue_scores.csv, glue.tex and the pictures into `output`. Returns the Markdown.

    Args:
        folder: holds `runs`, as ``lazyformer glue run`` wrote it.

    Raises:
        UserError: a file of the folder is not what it should be, or no run has ended well.
    """
    results = read_results(folder)
    if not results.runs:
        raise UserError(
            f"{folder / 'runs'}: no run has ended well yet, {len(results.failures)} failed; see the logs in it, or run "
            "`lazyformer glue run` again"
        )
    output.mkdir(parents=True, exist_ok=True)
    pictures = [output / "glue_seeds.png"]
    draw_seeds(results, pictures[0])
    if draw_updates(results, output / "glue_updates.png"):
        pictures.append(output / "glue_updates.png")
    else:
        (output / "glue_updates.png").unlink(missing_ok=True)  # of an earlier report on another grid
    tables = list(all_tables(results))
    markdown = _markdown(tables, notes(results), pictures)
    (output / "glue.md").write_text(markdown, encoding="utf-8")
    latex = (f"% {table.title}\n{table.printed('latex_booktabs')}\n" for table in tables)
    (output / "glue.tex").write_text("\n".join(latex), encoding="utf-8")
    _write_csv(output / "glue.csv", *_rows_as_csv(table_rows(results)))
    _write_csv(output / "glue_scores.csv", *_scores_as_csv(results))
    return markdown


def table_rows(results: Results) -> list[TableRow]:
    """Our models, the baseline of their development sets, and the paper's models."""
    ours = [_own_row(results, model) for model in results.grid.models]
    baseline = {score.name: results.baseline(score.task, score.split, score.metric) for score in SCORES.values()}
    known = {name: value for name, value in baseline.items() if value is not None}
    return [
        *ours,
        TableRow("majority class or constant", "baseline", None, known),
        *(TableRow(f"{row.model} (paper)", "paper", row.updates, dict(row.scores)) for row in PAPER_ROWS),
    ]


def _own_row(results: Results, model: str) -> TableRow:
    scores, incomplete = results.paper_scores(model)
    return TableRow(model, "ours", updates_of(results, model), scores, incomplete)


def updates_of(results: Results, model: str) -> Optional[int]:
    """Of the model's pre-training, as its runs say."""
    return next((run.updates for key, run in results.runs.items() if key.model == model), None)


def all_tables(results: Results) -> Iterator[Table]:
    """The paper's table first; the others where there is something to say."""
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


def _scores_of(results: Results) -> Iterator[tuple[str, Score, TaskResults]]:
    """Each score of each model that has a run: the paper's, then those of WNLI where it was asked for."""
    others = [Score(task, task) for task in results.grid.tasks if task not in PAPER_TASKS]
    for model in results.grid.models:
        for score in [*SCORES.values(), *others]:
            found = results.of(model, score.task) if score.task in results.grid.tasks else None
            if found is not None and found.runs:
                yield model, score, found


def _score_table(results: Results) -> Table:
    rows = []
    for model, score, found in _scores_of(results):
        values = found.values(score.split, score.metric)
        baseline = results.baseline(score.task, score.split, score.metric)
        bounds = mean_bounds(values)
        rows.append(
            [
                model,
                score.name,
                score.metric,
                f"{np.median(values):.2f}{'' if found.is_complete else INCOMPLETE}",
                _span((values.min(), values.max())),
                f"{len(values)} of {len(results.grid.seeds)}",
                f"{found.rate:g}",
                f"{baseline:.2f}",
                NOTHING if bounds is None else _span(bounds),
                NOTHING if bounds is None else ("yes" if bounds[0] > baseline else "no"),
            ]
        )
    headers = (
        *("model", "score", "metric", "median", "min to max", "seeds", "rate", "baseline"),
        *("95% bounds of the mean", "above baseline"),
    )
    return Table("Each score: median and spread over the seeds of the chosen rate", headers, rows, texts=3)


def _extra_table(results: Results) -> Table:
    """The metrics that the paper's table leaves out, at the rate that its own metric chose."""
    rows = []
    for model in results.grid.models:
        for task in results.grid.tasks:
            found = results.of(model, task)
            for split in development_splits(TASKS[task]):
                for metric in TASKS[task].metrics[1:] if found.runs else ():
                    values = found.values(split, metric)
                    rows.append(
                        [
                            *(model, task, metric),
                            f"{np.median(values):.2f}{'' if found.is_complete else INCOMPLETE}",
                            _span((values.min(), values.max())),
                            f"{results.baseline(task, split, metric):.2f}",
                        ]
                    )
    headers = ("model", "task", "metric", "median", "min to max", "baseline")
    return Table("Other metrics of the same runs", headers, rows, texts=3)


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


def _span(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2f} to {ends[1]:.2f}"


def notes(results: Results) -> list[str]:
    """What a reader must know to compare these numbers with others, a sentence or two each."""
    grid = results.grid
    rates = ", ".join(f"{rate:g}" for rate in grid.rates)
    said = [
        "A score is the median over seeds at each learning rate, and of these medians the best; MNLI-mm stands at the "
        "rate that MNLI-m chose. CoLA: Matthews' correlation, STS: Pearson's, all others accuracy; times 100.",
        "Avg. is the mean of the paper's nine numbers, MNLI-m and -mm counted apart, and stands only where all nine "
        "are complete. Rows marked (paper) are those of LazyFormer, arXiv 2102.12702, Table 1: theirs, not measured "
        "here.",
        f"Learning rates {rates}; seeds {', '.join(map(str, grid.seeds))}. "
        + (
            "These are the paper's rates and its number of seeds."
            if grid.rates == PAPER_RATES and len(grid.seeds) == PAPER_SEEDS
            else f"The paper has rates {', '.join(f'{rate:g}' for rate in PAPER_RATES)} and {PAPER_SEEDS} seeds."
        ),
        "95% bounds: Student's t, two-sided, of the mean over the seeds of the chosen rate; above baseline: the lower "
        "bound is. They tell the chance of the seed from learning. That epoch and rate were chosen on the same "
        "development set is not in them.",
        f"{len(results.runs)} runs took {sum(run.seconds for run in results.runs.values()) / 3600:.2f} hours in all.",
    ]
    if any(not results.of(model, task).is_complete for model in grid.models for task in grid.tasks):
        said.append(f"{INCOMPLETE} The grid of this task is incomplete: the number may change when it is whole.")
    said += _deviations(results)
    if results.outside_grid:
        said.append(f"{results.outside_grid} runs in the folder are none of this grid's and left out.")
    said += [f"Failed: {failure.folder}: {failure.message}" for failure in results.failures.values()]
    return said


def _deviations(results: Results) -> Iterator[str]:
    """Where tasks were not run as the paper ran them; and on how many rows each was trained."""
    of_task: dict[str, list[Run]] = {task: [] for task in results.grid.tasks}
    for key, run in results.runs.items():
        of_task[key.task].append(run)
    of_task = {task: runs for task, runs in of_task.items() if runs}
    rows = {task: _either({f"{run.train_rows:,}" for run in runs}) for task, runs in of_task.items()}
    whole = {task: f"{TASKS[task].rows['train']:,}" for task in rows}
    shown = [f"{task} {rows[task]}" + (f" of {whole[task]}" * (rows[task] != whole[task])) for task in rows]
    yield f"Training rows: {', '.join(shown)}."
    epochs = {task: _either({f"{run.epochs:g}" for run in runs}) for task, runs in of_task.items()}
    if changed := [f"{task} {count}" for task, count in epochs.items() if count != str(TASKS[task].epochs)]:
        yield f"Epochs: {', '.join(changed)}; the paper has {TASKS['MNLI'].epochs}."
    for task, runs in of_task.items():
        started = {run.started_from for run in runs} - {None}
        if started:
            which = "all" if all(run.started_from for run in runs) else "some"
            yield f"{task}: {which} runs started from the {_either(started)} checkpoint, which the paper does not do."


def _either(values: set[str]) -> str:
    return " or ".join(sorted(values))


def _markdown(tables: list[Table], said: list[str], pictures: list[Path]) -> str:
    blocks = [f"## {table.title}\n\n{table.printed('github')}" for table in tables]
    blocks.insert(1, "\n".join(f"- {sentence}" for sentence in said))
    blocks += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    return "\n\n".join(blocks) + "\n"


def _rows_as_csv(rows: list[TableRow]) -> tuple[list[str], list[list]]:
    headers = ["model", "source", "updates", *SCORES, "Avg.", "incomplete"]
    return headers, [
        [
            *(row.name, row.source, row.updates),
            *(row.scores.get(name) for name in SCORES),
            row.average,
            " ".join(sorted(row.incomplete)),
        ]
        for row in rows
    ]


def _scores_as_csv(results: Results) -> tuple[list[str], list[list]]:
    headers = (
        "model task split metric median lowest highest lower_bound upper_bound baseline rate seeds seeds_asked runs "
        "runs_asked runs_failed"
    ).split()
    rows = []
    for model in results.grid.models:
        for task in results.grid.tasks:
            found = results.of(model, task)
            counts = [len(found.chosen), len(results.grid.seeds), len(found.runs), len(found.asked), len(found.failed)]
            for split in development_splits(TASKS[task]):
                for metric in TASKS[task].metrics if found.runs else ():
                    values = found.values(split, metric)
                    bounds = mean_bounds(values) or (None, None)
                    middle = [np.median(values), values.min(), values.max(), *bounds]
                    baseline = results.baseline(task, split, metric)
                    rows.append([model, task, split, metric, *middle, baseline, found.rate, *counts])
    return headers, rows


def _write_csv(path: Path, headers: Sequence[str], rows: Sequence[Sequence]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(headers)
        writer.writerows([round(cell, 4) if isinstance(cell, float) and cell > 1e-3 else cell for cell in row]
                        for row in rows)  # fmt: skip
