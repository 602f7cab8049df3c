"""The report of a grid of fine-tuning runs: its tables, notes and pictures, as files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.data.glue.task_table import TASKS
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.files.tables import write_csv
from lazyformer_fairseq.glue.report.paper_table import LEARNING_RATES, SCORES, SEEDS
from lazyformer_fairseq.glue.report.pictures import draw_seeds, draw_updates
from lazyformer_fairseq.glue.report.read_results import read_results
from lazyformer_fairseq.glue.report.results import Results, Run, mean_bounds
from lazyformer_fairseq.glue.report.tables import INCOMPLETE, Table, TableRow, all_tables, table_rows


def write_report(folder: Path, output: Path) -> str:
    """Writes glue.md, glue.csv, glue_scores.csv, glue.tex and the pictures into `output`. Returns the Markdown.

    Raises:
        UserError: a file of the folder is wrong, or no run has ended well.
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
    write_csv([_six_digits(_row_as_csv(row)) for row in table_rows(results)], output / "glue.csv")
    write_csv(list(map(_six_digits, _scores_as_csv(results))), output / "glue_scores.csv")
    return markdown


def notes(results: Results) -> list[str]:
    """Notes that a reader needs to compare these numbers with others, a sentence or two each."""
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
            if grid.rates == LEARNING_RATES and len(grid.seeds) == len(SEEDS)
            else f"The paper has rates {', '.join(f'{rate:g}' for rate in LEARNING_RATES)} and {len(SEEDS)} seeds."
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
    """Where runs of tasks differ from the paper's; and the number of training rows of each."""
    of_task: dict[str, list[Run]] = {task: [] for task in results.grid.tasks}
    for key, run in results.runs.items():
        of_task[key.task].append(run)
    of_task = {task: runs for task, runs in of_task.items() if runs}
    yield f"Training rows: {', '.join(_training_rows(task, runs) for task, runs in of_task.items())}."
    epochs = {task: _either({f"{run.epochs:g}" for run in runs}) for task, runs in of_task.items()}
    if changed := [f"{task} {count}" for task, count in epochs.items() if count != str(TASKS[task].epochs)]:
        yield f"Epochs: {', '.join(changed)}; the paper has {TASKS['MNLI'].epochs}."
    heads = {(run.head, run.head_dropout) for run in results.runs.values()}
    if heads - {(None, None)}:
        yield f"Head: {_either({_describe_head(*head) for head in heads})}; the default is dense."
    for task, runs in of_task.items():
        started = {run.started_from for run in runs} - {None}
        if started:
            which = "all" if all(run.started_from for run in runs) else "some"
            yield f"{task}: {which} runs started from the {_either(started)} checkpoint, which the paper does not do."


def _describe_head(kind: Optional[str], dropout: Optional[float]) -> str:
    return (kind or "dense") + (f" with dropout {dropout:g}" if dropout is not None else "")


def _training_rows(task: str, runs: list[Run]) -> str:
    """As "RTE 100 of 640 (the official file has 2,490)", where these numbers differ."""
    official = TASKS[task].splits["train"].rows
    trained_on = _either({f"{run.train_rows:,}" for run in runs})
    in_file = _either({f"{run.rows_in_file or run.train_rows:,}" for run in runs})
    of_file = f" of {in_file}" if in_file != trained_on else ""
    return f"{task} {trained_on}{of_file}" + (f" (the official file has {official:,})" * (in_file != f"{official:,}"))


def _either(values: set[str]) -> str:
    return " or ".join(sorted(values))


def _markdown(tables: list[Table], said: list[str], pictures: list[Path]) -> str:
    blocks = [f"## {table.title}\n\n{table.printed('github')}" for table in tables]
    blocks.insert(1, "\n".join(f"- {sentence}" for sentence in said))
    blocks += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    return "\n\n".join(blocks) + "\n"


def _row_as_csv(row: TableRow) -> dict[str, Any]:
    scores = {name: row.scores.get(name) for name in SCORES}
    known = {"model": row.name, "source": row.source, "updates": row.updates}
    return {**known, **scores, "Avg.": row.average, "incomplete": " ".join(sorted(row.incomplete))}


def _scores_as_csv(results: Results) -> Iterator[dict[str, Any]]:
    headers = (
        "model task split metric median lowest highest lower_bound upper_bound baseline rate seeds seeds_asked runs "
        "runs_asked runs_failed"
    ).split()
    for one in results.measurements():
        found, bounds = one.found, mean_bounds(one.values) or (None, None)
        middle = [np.median(one.values), one.values.min(), one.values.max(), *bounds, one.baseline, found.rate]
        counts = [len(one.values), len(results.grid.seeds), len(found.runs), len(found.asked), len(found.failed)]
        yield dict(zip(headers, [one.model, one.task, one.split, one.metric, *middle, *counts], strict=True))


def _six_digits(row: dict[str, Any]) -> dict[str, Any]:
    return {name: f"{cell:.6g}" if isinstance(cell, float) else cell for name, cell in row.items()}
