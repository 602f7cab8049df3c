"""The report on a grid of fine-tuning runs: a Markdown page and a plot, for any benchmark."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Optional

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.benchmark import Benchmark, TableRow
from lazyformer_fairseq.finetuning.registry import benchmark_of_grid
from lazyformer_fairseq.finetuning.results import Measurement, Results, RunKey, read_results
from lazyformer_fairseq.report.figures import draw_spread, handles, picture, styles
from lazyformer_fairseq.report.numbers import NOTHING, mean_bounds
from lazyformer_fairseq.report.page import Notes, Picture, write_page
from lazyformer_fairseq.report.tables import Table

INCOMPLETE = "*"
ONE_CLASS = " (one class)"  # printed after a score on a development set with only one label
AVERAGE = "Avg."
PANELS_PER_ROW = 3
PANEL = (3.4, 2.8)  # inches
# Settings that the report shows elsewhere.
IDENTITY = ("model", "checkpoint_sha256", "task", "data_sha256", "description")


def write_report(folder: Path, output: Path) -> str:
    """Write the report on the grid in `folder` to the folder `output`, and return its text for the terminal.

    Raises:
        UserError: a file in the folder is invalid, or no run has succeeded.
    """
    benchmark = benchmark_of_grid(folder)
    results = read_results(folder, benchmark)
    if not results.runs:
        raise UserError(
            f"{folder / 'runs'}: no run has succeeded yet and {len(results.failures)} failed; see the logs there, or "
            "run `lazyformer finetune` again"
        )
    rows = [model_row(results, benchmark, model) for model in results.grid.models]
    rows += benchmark.other_rows(results)
    development = "development set"
    if len(benchmark.tasks) > 1:
        development = "development sets"
    tasks = set(results.grid.tasks)
    of_papers = Table(f"{benchmark.name}, {development}, percent", [cells(row, benchmark, tasks) for row in rows])
    num_seeds = len(results.grid.seeds)
    of_scores = Table(
        "Each score: median and spread over seeds at the selected learning rate",
        [_score_row(each, benchmark, num_seeds) for each in results.measurements()],
        left=("score", "metric"),
    )
    # If the grid has few tasks, the paper's table is mostly empty, so the table of the grid's own scores comes first.
    first, second = of_scores, of_papers
    if benchmark.averages_available or tasks >= {score.task for score in benchmark.scores}:
        first, second = of_papers, of_scores
    settings = Table("Settings", list(_setting_rows(results, benchmark)), left=("these runs", "protocol"))

    figure = output / f"{benchmark.key}.png"
    draw(results, benchmark, figure)
    blocks = [
        verdict(results, benchmark),
        first,
        Notes(list(notes(results, benchmark))),
        second,
        settings,
        Picture(figure.name),
    ]
    return write_page(blocks, output, benchmark.key)


def verdict(results: Results, benchmark: Benchmark) -> str:
    """Return the report's headline: the best model's score, compared with the runner-up and the baseline."""
    found: dict[str, dict[tuple[str, str], Measurement]] = {}
    for each in results.measurements():
        if each.selects:
            found.setdefault(each.model, {})[each.task, each.split] = each
    shared = set.intersection(*map(set, found.values()))
    if not shared:
        return "The models do not have any score in common yet."

    means = {}
    for model, measurements in found.items():
        means[model] = fmean(np.median(measurements[each].values) for each in shared)
    best, *others = sorted(means, key=means.__getitem__, reverse=True)
    baseline = fmean(found[best][each].baseline for each in shared)
    if len(shared) == 1:
        (only,) = shared
        measurement = found[best][only]
        what = f"{_score_name(measurement, benchmark)} ({measurement.metric})"
    else:
        what = f"average ({len(shared)} scores)"
    rest = f"{baseline:.2f} for the baseline, which needs no model"
    if others:
        rest = f"{means[others[0]]:.2f} for {others[0]} and {rest}"
    sentence = f"{best} scores {means[best]:.2f} on {what}, compared with {rest}."
    combinations = product(results.grid.models, results.grid.tasks)
    if not all(results.of(model, task).is_complete for model, task in combinations):
        sentence += " Runs are missing, so this may change."
    return sentence


def notes(results: Results, benchmark: Benchmark) -> Iterator[str]:
    """Yield short notes on how to read the scores, and on missing and failed runs."""
    yield from results.warnings()
    yield from benchmark.notes(results)
    yield (
        "The 95% bounds are a two-sided Student's t interval for the mean over seeds at the selected learning rate. A "
        "score counts as above the baseline if its lower bound is above the baseline. The bounds account for variation "
        "between seeds, but not for the fact that the epoch and the learning rate were selected on the same "
        "development set."
    )
    runs = results.runs.values()
    yield f"Total time of all {len(runs)} runs, in hours: {sum(run.seconds for run in runs) / 3600:.2f}."
    for model in results.grid.models:
        for task in results.grid.tasks:
            found = results.of(model, task)
            if not found.is_complete:
                yield (
                    f"{INCOMPLETE} {model} on {task}: the score is provisional, because runs are missing "
                    f"({_listed(found.missing)}) or failed ({_listed(found.failed)})."
                )
    for failure in results.failures.values():
        yield f"Failed: {failure}"


def _listed(keys: Sequence[RunKey]) -> str:
    return ", ".join(f"rate {key.rate:g} seed {key.seed}" for key in keys) or "none"


def _setting_rows(results: Results, benchmark: Benchmark) -> Iterator[dict[str, str]]:
    """Yield a row per setting, with its values in these runs and in the benchmark's protocol."""
    runs = list(results.runs.values())
    protocol = benchmark.default_protocol
    rows_of_task = {run.task: run.train_rows for run in runs}
    official = {task: benchmark.tasks[task].splits["train"].rows for task in rows_of_task}
    usual = {
        "lr": ", ".join(f"{rate:g}" for rate in protocol.lrs),
        "seed": ", ".join(map(str, protocol.seeds)),
        "epochs": protocol.epochs,
        "batch_size": protocol.batch_size,
        "warmup_ratio": protocol.warmup_ratio,
    }
    yield {
        "setting": "training rows",
        "these runs": ", ".join(f"{task} {rows:,}" for task, rows in rows_of_task.items()),
        "protocol": ", ".join(f"{task} {rows:,}" for task, rows in official.items() if rows) or NOTHING,
    }
    names = dict.fromkeys(name for run in runs for name in run.settings)
    for name in names:
        if name in IDENTITY:
            continue
        values = dict.fromkeys(run.settings.get(name) for run in runs)
        if list(values) == [None]:
            continue
        yield {
            "setting": name.replace("_", " "),
            "these runs": ", ".join(NOTHING if value is None else str(value) for value in values),
            "protocol": str(usual.get(name, NOTHING)),
        }


# --- the papers' table ------------------------------------------------------------------------------------------------


def model_row(results: Results, benchmark: Benchmark, model: str) -> TableRow:
    """Return a trained model's table row, with median scores in percent."""
    updates = None
    scores = {}
    marks = {}
    for score in benchmark.scores:
        if score.task not in results.grid.tasks:
            continue
        found = results.of(model, score.task)
        if not found.runs:
            continue
        updates = found.runs[0].updates
        values = found.values(score.split, score.metric)
        scores[score.name] = float(np.median(values))
        marks[score.name] = ""
        if not found.is_complete:
            marks[score.name] = INCOMPLETE
        if found.only_label(score.split) is not None:
            marks[score.name] += ONE_CLASS
    return TableRow(model, updates, scores, marks)


def average_of(row: TableRow, benchmark: Benchmark, tasks: Optional[set[str]] = None) -> Optional[float]:
    """Return the mean score over `tasks`, by default all tasks; None if a score is missing or incomplete."""
    names = [score.name for score in benchmark.scores if tasks is None or score.task in tasks]
    for name in names:
        if name not in row.scores or INCOMPLETE in row.marks.get(name, ""):
            return None
    return fmean(row.scores[name] for name in names)


def cells(row: TableRow, benchmark: Benchmark, tasks: set[str]) -> dict[str, str]:
    """Format a row's scores on `tasks`, followed by their average if the benchmark reports it."""
    task_of = {score.name: score.task for score in benchmark.scores}
    found = {"model": row.name, "updates": NOTHING}
    if row.updates is not None:
        found["updates"] = f"{row.updates:,}"
    for title, names in benchmark.columns.items():
        if tasks.isdisjoint(task_of[name] for name in names):
            continue
        printed = []
        for name in names:
            if name in row.scores:
                printed.append(f"{row.scores[name]:.2f}{row.marks.get(name, '')}")
            else:
                printed.append(NOTHING)
        found[title] = "/".join(printed)
    has_all = tasks.issuperset(task_of.values())
    if benchmark.average and (has_all or benchmark.averages_available):
        average = average_of(row, benchmark, tasks)
        found[AVERAGE] = NOTHING
        if average is not None:
            found[AVERAGE] = f"{average:.2f}"
    return found


# --- every score ------------------------------------------------------------------------------------------------------


def _score_name(measurement: Measurement, benchmark: Benchmark) -> str:
    if len(benchmark.tasks) > 1:
        for score in benchmark.scores:
            if (score.task, score.split) == (measurement.task, measurement.split):
                return score.name
    return measurement.task


def _score_row(measurement: Measurement, benchmark: Benchmark, seeds: int) -> dict[str, str]:
    """Format a metric as a table row, including whether it is above the baseline."""
    values = measurement.values
    mark = ""
    if not measurement.found.is_complete:
        mark = INCOMPLETE
    if measurement.found.only_label(measurement.split) is not None:
        mark += ONE_CLASS
    bounds = mean_bounds(values)
    bounds_printed = NOTHING
    verdict = NOTHING
    if bounds is not None:
        bounds_printed = f"{bounds[0]:.2f} to {bounds[1]:.2f}"
        verdict = "no"
        if bounds[0] > measurement.baseline:
            verdict = "yes"
    return {
        "model": measurement.model,
        "score": _score_name(measurement, benchmark),
        "metric": measurement.metric,
        "median": f"{np.median(values):.2f}{mark}",
        "min to max": f"{values.min():.2f} to {values.max():.2f}",
        "seeds": f"{len(values)} of {seeds}",
        "rate": f"{measurement.found.rate:g}",
        "baseline": f"{measurement.baseline:.2f}",
        "95% bounds of the mean": bounds_printed,
        "above baseline": verdict,
    }


# --- the figure -------------------------------------------------------------------------------------------------------


def draw(results: Results, benchmark: Benchmark, path: Path) -> None:
    """Draw one panel per score: the median over seeds at the selected learning rate, with a min-to-max bar.

    Models are drawn side by side. If a folder contains checkpoints with different numbers of updates, they are drawn as
    a curve over pre-training updates, as in Figure 2 of the LazyFormer paper.
    """
    panels: dict[str, list[Measurement]] = {}
    for each in results.measurements():
        if each.selects:
            panels.setdefault(_score_name(each, benchmark), []).append(each)

    updates_of_folder: dict[Path, set[int]] = {}
    series_of = {}
    for run in results.runs.values():
        folder = Path(run.checkpoint).parent
        updates_of_folder.setdefault(folder, set()).add(run.updates or 0)
        series_of[run.model] = (str(folder), run.updates or 0)
    is_curve = any(len(updates) > 1 for updates in updates_of_folder.values())
    if not is_curve:
        series_of = {model: (model, place) for place, model in enumerate(series_of)}
    style_of = styles(dict.fromkeys(series for series, _ in series_of.values()))

    columns = min(len(panels), PANELS_PER_ROW)
    rows = -(-len(panels) // columns)
    title = "Development scores: median and range (minimum to maximum) over seeds"
    with picture(path, rows, columns, panel=PANEL, title=title, legend=handles(style_of)) as axes:
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        for axis, (name, found) in zip(axes.flat, panels.items(), strict=False):
            curves: dict[str, list[tuple[int, float]]] = {}
            for each in found:
                series, x = series_of[each.model]
                draw_spread(axis, x, each.values, style_of[series])
                median = float(np.median(each.values))
                curves.setdefault(series, []).append((x, median))
            for series, points in curves.items():
                places, medians = zip(*sorted(points), strict=True)
                axis.plot(places, medians, color=style_of[series]["color"], linewidth=1)
            axis.set_title(f"{name} (baseline {found[0].baseline:.1f})", fontsize=10)
            axis.set_ylabel(f"{found[0].metric} x 100", fontsize=8)
            if is_curve:
                axis.set_xlabel("pre-training updates", fontsize=8)
            else:
                axis.set_xticks([])
            axis.tick_params(labelsize=8)
