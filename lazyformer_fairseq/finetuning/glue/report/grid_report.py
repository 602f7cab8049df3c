"""The report of a grid of fine-tuning runs: its tables, notes and pictures, as files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.data.glue.task_table import TASKS
from lazyformer_fairseq.finetuning.glue.protocols import LAZYFORMER, PROTOCOLS
from lazyformer_fairseq.finetuning.glue.report import table_4
from lazyformer_fairseq.finetuning.glue.report.paper_table import LEARNING_RATES, SCORES, SEEDS
from lazyformer_fairseq.finetuning.glue.report.pictures import draw
from lazyformer_fairseq.finetuning.glue.report.read_results import read_results
from lazyformer_fairseq.finetuning.glue.report.table_4 import read_sources
from lazyformer_fairseq.finetuning.glue.report.tables import TableRow, all_tables, table_rows
from lazyformer_fairseq.finetuning.report.files import refuse_no_runs, six_digits, write_files
from lazyformer_fairseq.finetuning.report.notes import notes_on_failures, notes_on_runs
from lazyformer_fairseq.finetuning.report.results import Results, Run
from lazyformer_fairseq.report.tables import write_csv

LAZYFORMERS = PROTOCOLS[LAZYFORMER]


def write_report(folder: Path, output: Path, squad: Optional[Path] = None, latency: Optional[Path] = None) -> str:
    """Writes glue.md, glue.csv, glue_scores.csv, glue.tex and the pictures into `output`. Returns the Markdown.

    Args:
        squad, latency: for PAR's Table 4, as `read_sources` takes them.

    Raises:
        UserError: a file of the folder is wrong, or no run has ended well.
    """
    results = read_results(folder)
    refuse_no_runs(results)
    beside = read_sources(results, squad, latency)
    tables, said = list(all_tables(results)), notes(results)
    if beside:
        tables, said = [*tables, table_4.table_4(beside)], [*said, *table_4.notes(beside)]
    output.mkdir(parents=True, exist_ok=True)
    pictures = draw(results, output)
    markdown = write_files(results, output, "glue", tables, said, pictures)
    write_csv([six_digits(_row_as_csv(row)) for row in table_rows(results)], output / "glue.csv")
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
        *notes_on_runs(results),
    ]
    said += _deviations(results)
    return said + notes_on_failures(results)


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
    for name, usual in (("batch_size", LAZYFORMERS.batch_size), ("warmup_ratio", LAZYFORMERS.warmup)):
        found = {getattr(run, name) or usual for run in results.runs.values()}
        if found != {usual}:
            called = "Rows of an update" if name == "batch_size" else "Share of the updates that warm up"
            yield f"{called}: {_either({f'{value:g}' for value in found})}; the paper has {usual:g}."
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


def _row_as_csv(row: TableRow) -> dict[str, Any]:
    scores = {name: row.scores.get(name) for name in SCORES}
    known = {"model": row.name, "source": row.source, "updates": row.updates}
    return {**known, **scores, "Avg.": row.average, "incomplete": " ".join(sorted(row.incomplete))}
