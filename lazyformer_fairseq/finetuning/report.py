"""The report of a grid of fine-tuning runs, whatever the benchmark: its tables, notes and pictures, as files.

STEM.md, STEM.tex, STEM.csv (the first table), STEM_scores.csv (every score), STEM_seeds.png and STEM_updates.png.
"""

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, Optional

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.benchmark import Benchmark, Score, TableRow, TuningProtocol
from lazyformer_fairseq.finetuning.registry import benchmark_of_grid
from lazyformer_fairseq.finetuning.results import Measurement, Results, Run, RunKey, mean_bounds, read_results
from lazyformer_fairseq.report.figures import Style, handles, picture, styles
from lazyformer_fairseq.report.numbers import NOTHING
from lazyformer_fairseq.report.page import Notes, Picture, write_page
from lazyformer_fairseq.report.tables import Table, write_csv

INCOMPLETE = "*"
ONE_CLASS = " (one class)"  # behind a score on a development set whose rows all have one label
AVERAGE = "Avg."


def write_report(folder: Path, output: Path) -> str:
    """Writes the report of the grid in `folder` into `output`. Returns what a screen shows of it.

    Raises:
        UserError: a file of the folder is wrong, or no run has ended well.
    """
    benchmark = benchmark_of_grid(folder)
    results = read_results(folder, benchmark)
    if not results.runs:
        raise UserError(
            f"{folder / 'runs'}: no run has ended well yet, {len(results.failures)} failed; see the logs in "
            f"it, or run `lazyformer finetune` again"
        )
    rows = [*(model_row(results, benchmark, model) for model in results.grid.models), *benchmark.other_rows(results)]
    title = f"{benchmark.name}, development {'sets' if len(benchmark.tasks) > 1 else 'set'}, percent"
    ran = set(results.grid.tasks)
    of_scores = _score_table(results, benchmark)
    first = Table(title, [cells(row, benchmark, ran) for row in rows])
    # Of some tasks the paper's table is mostly empty: one's own numbers stand first.
    if ran >= {score.task for score in benchmark.scores}:
        tables = [first, of_scores]
    else:
        tables = [of_scores, first]
    others = [table for table in (tables[1], *_extra_and_gaps(results)) if table.rows]
    blocks = [tables[0], Notes(notes(results, benchmark)), *others, *draw(results, benchmark, output)]
    write_csv([_six_digits(_as_csv(row, benchmark)) for row in rows], output / f"{benchmark.key}.csv")
    write_csv(list(map(_six_digits, _scores_as_csv(results))), output / f"{benchmark.key}_scores.csv")
    return write_page(blocks, output, benchmark.key, with_latex=True)


def notes(results: Results, benchmark: Benchmark) -> list[str]:
    """What a reader needs to compare these numbers with others, a sentence or two each."""
    grid = results.grid
    runs = results.runs.values()
    said = [
        *results.warnings(),
        *benchmark.notes(results),
        "95% bounds: Student's t, two-sided, of the mean over the seeds of the chosen rate; above baseline: the lower "
        "bound is. They tell the chance of the seed from learning. That epoch and rate were chosen on the same "
        "development set is not in them.",
        f"Hours of all runs ({len(runs)}) together: {sum(run.seconds for run in runs) / 3600:.2f}.",
    ]
    if any(not results.of(model, task).is_complete for model in grid.models for task in grid.tasks):
        said.append(f"{INCOMPLETE} The grid of this task is incomplete: the number may change when it is whole.")
    return [*said, *deviations(results, benchmark.usual), *(f"Failed: {each}" for each in results.failures.values())]


def deviations(results: Results, usual: TuningProtocol) -> Iterator[str]:
    """Rates, seeds and training rows; and where else runs differ from the protocol."""
    grid = results.grid
    runs = list(results.runs.values())
    rates, seeds, theirs = (", ".join(f"{value:g}" for value in of) for of in (grid.lrs, grid.seeds, usual.lrs))
    yield f"Learning rates {rates}; seeds {seeds}. The protocol has rates {theirs} and {len(usual.seeds)} seeds."
    of_task = {task: [run for run in runs if run.task == task] for task in grid.tasks}
    of_task = {task: found for task, found in of_task.items() if found}
    yield f"Training rows: {', '.join(_training_rows(results, task, found) for task, found in of_task.items())}."
    epochs = {task: _either(f"{run.epochs:g}" for run in found) for task, found in of_task.items()}
    if changed := [f"{task} {count}" for task, count in epochs.items() if count != str(usual.epochs)]:
        yield f"Epochs: {', '.join(changed)}; the protocol has {usual.epochs}."
    batch = ("Rows of an update", usual.batch_size)
    warmup = ("Share of the updates that warm up", usual.warmup_ratio)
    for name, (called, number) in {"batch_size": batch, "warmup_ratio": warmup}.items():
        found = {number if (said := getattr(run, name)) is None else said for run in runs}
        if found != {number}:
            yield f"{called}: {_either(f'{value:g}' for value in found)}; the protocol has {number:g}."
    dropouts = (f" with dropout {run.head_dropout}" * (run.head_dropout is not None) for run in runs)
    if (heads := {(run.head or "dense") + said for run, said in zip(runs, dropouts, strict=True)}) - {"dense"}:
        yield f"Head: {_either(heads)}; the default is dense."


def _training_rows(results: Results, task: str, runs: Sequence[Run]) -> str:
    """As "RTE 100 of 640 (the official file has 2,490)", where these numbers differ."""
    official = f"{results.benchmark.tasks[task].splits['train'].rows:,}"  # 0 of a task that is made
    trained_on = _either(f"{run.train_rows:,}" for run in runs)
    in_file = _either(f"{run.rows_in_file or run.train_rows:,}" for run in runs)
    of_file = f" of {in_file}" * (in_file != trained_on)
    return f"{task} {trained_on}{of_file}" + f" (the official file has {official})" * (official not in ("0", in_file))


def _either(values: Iterable[str]) -> str:
    """Different ones, in a sentence."""
    return " or ".join(sorted(set(values)))


# --- tables -----------------------------------------------------------------------------------------------------------


def model_row(results: Results, benchmark: Benchmark, model: str) -> TableRow:
    """One of our models: its medians, in percent."""
    tasks = {task: results.of(model, task) for task in results.grid.tasks}
    updates = next((found.updates for found in tasks.values() if found.runs), None)
    scores = {
        score.name: float(np.median(tasks[score.task].values(score.split, score.metric)))
        for score in benchmark.scores
        if score.task in tasks and tasks[score.task].runs
    }
    shown = {score.task for score in benchmark.scores}
    incomplete = frozenset(task for task, found in tasks.items() if task in shown and not found.is_complete)
    one_class = {
        score.name
        for score in benchmark.scores
        if score.name in scores and tasks[score.task].only_label(score.split) is not None
    }
    return TableRow(model, "ours", updates, scores, incomplete, frozenset(one_class))


def complete_scores(row: TableRow, benchmark: Benchmark) -> dict[str, float]:
    """The scores of tasks whose grid lacks no run."""
    task_of = {score.name: score.task for score in benchmark.scores}
    return {name: value for name, value in row.scores.items() if task_of[name] not in row.incomplete}


def average_of(row: TableRow, benchmark: Benchmark) -> Optional[float]:
    """The mean of all scores of the table; None where one is missing or incomplete."""
    complete = complete_scores(row, benchmark)
    if len(complete) == len(benchmark.scores):
        return fmean(complete[score.name] for score in benchmark.scores)
    return None


def cells(row: TableRow, benchmark: Benchmark, tasks: Optional[Collection[str]] = None) -> dict[str, str]:
    """The row as it is printed, with the scores of these tasks; None for all, and their average."""
    complete = complete_scores(row, benchmark)
    task_of = {score.name: score.task for score in benchmark.scores}
    is_whole = tasks is None or {*task_of.values()} <= {*tasks}

    def cell(name: str) -> str:
        if name not in row.scores:
            return NOTHING
        shown = f"{row.scores[name]:.2f}"
        if name not in complete:
            shown += INCOMPLETE
        if name in row.one_class:
            shown += ONE_CLASS
        return shown

    found = {"model": row.name, "updates": NOTHING if row.updates is None else f"{row.updates:,}"}
    for title, names in benchmark.columns.items():
        if is_whole or {task_of[name] for name in names} & {*tasks}:
            found[title] = "/".join(map(cell, names))
    if benchmark.average and is_whole:
        average = average_of(row, benchmark)
        missing = NOTHING if row.source == "baseline" else "incomplete"
        found[AVERAGE] = missing if average is None else f"{average:.2f}"
    return found


def _as_csv(row: TableRow, benchmark: Benchmark) -> dict[str, Any]:
    scores = {score.column: row.scores.get(score.name) for score in benchmark.scores}
    if benchmark.average:
        average = {AVERAGE: average_of(row, benchmark)}
    else:
        average = {}
    known = {"model": row.name, "source": row.source, "updates": row.updates}
    return {**known, **scores, **average, "incomplete": " ".join(sorted(row.incomplete))}


def _score_table(results: Results, benchmark: Benchmark) -> Table:
    """The selecting metric of every model and development set."""
    if len(benchmark.tasks) > 1:
        names = {(score.task, score.split): score.name for score in benchmark.scores}
    else:
        names = {}
    rows = []
    for one in filter(lambda one: one.selects, results.measurements()):
        bounds = mean_bounds(one.values)
        rows.append(
            {
                **{"model": one.model, "score": names.get((one.task, one.split), one.task), "metric": one.metric},
                **_median_and_span(one),
                **{"seeds": f"{len(one.values)} of {len(results.grid.seeds)}", "rate": f"{one.found.rate:g}"},
                "baseline": f"{one.baseline:.2f}",
                "95% bounds of the mean": NOTHING if bounds is None else _span(*bounds),
                "above baseline": NOTHING if bounds is None else ("yes" if bounds[0] > one.baseline else "no"),
            }
        )
    title = "Each score: median and spread over the seeds of the chosen rate"
    return Table(title, rows, left=("score", "metric"))


def _extra_and_gaps(results: Results) -> Iterator[Table]:
    """The other metrics, at the rate that the selecting one chose; models and tasks that lack runs."""
    rows = []
    for one in filter(lambda one: not one.selects, results.measurements()):
        known = {"model": one.model, "task": one.task, "metric": one.metric}
        rows.append({**known, **_median_and_span(one), "baseline": f"{one.baseline:.2f}"})
    yield Table("Other metrics of the same runs", rows, left=("task", "metric"))
    rows = []
    for model, task in itertools.product(results.grid.models, results.grid.tasks):
        found = results.of(model, task)
        if not found.is_complete:
            gaps = {"missing: rate (seeds)": _listed(found.missing), "failed: rate (seeds)": _listed(found.failed)}
            done = f"{len(found.runs)} of {len(found.asked)}"
            rows.append({"model": model, "task": task, "runs done": done, **gaps})
    yield Table("Incomplete grids", rows, left=rows[0] if rows else ())


def _median_and_span(one: Measurement) -> dict[str, str]:
    median = f"{np.median(one.values):.2f}{'' if one.found.is_complete else INCOMPLETE}"
    if one.only_label is not None:
        median += ONE_CLASS
    return {"median": median, "min to max": _span(one.values.min(), one.values.max())}


def _listed(keys: Sequence[RunKey]) -> str:
    """How many, and which: "3: 2e-05 (1 2), 3e-05 (1)"."""
    by_rate = itertools.groupby(keys, key=lambda key: key.rate)  # keys come rate by rate
    found = ", ".join(f"{rate:g} ({' '.join(str(key.seed) for key in of_rate)})" for rate, of_rate in by_rate)
    if keys:
        return f"{len(keys)}: {found}"
    return "0"


def _span(low: float, high: float) -> str:
    return f"{low:.2f} to {high:.2f}"


def _scores_as_csv(results: Results) -> Iterator[dict[str, Any]]:
    for one in results.measurements():
        found = one.found
        bounds = mean_bounds(one.values) or (None, None)
        yield {
            **{"model": one.model, "task": one.task, "split": one.split, "metric": one.metric},
            **{"median": np.median(one.values), "lowest": one.values.min(), "highest": one.values.max()},
            **{"lower_bound": bounds[0], "upper_bound": bounds[1], "baseline": one.baseline, "rate": found.rate},
            **{"seeds": len(one.values), "seeds_asked": len(results.grid.seeds), "runs": len(found.runs)},
            **{"runs_asked": len(found.asked), "runs_failed": len(found.failed)},
            "only_label": one.only_label,
        }


def _six_digits(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: f"{cell:.6g}" if isinstance(cell, float) else cell for name, cell in row.items()}


# --- pictures: the spread over seeds, and scores against updates of pre-training --------------------------------------

BASELINE = {"color": "0.45", "linestyle": "--", "linewidth": 1.2}
LEAST_HEIGHT = 2.0  # of an axis, in points: what lies within it is noise
FARTHEST_BASELINE = 6  # below the scores, in multiples of their spread
METRIC_NAMES = {
    "matthews": "Matthews' correlation x 100",
    "pearson": "Pearson's correlation x 100",
    "f1": "F1, %",
    "exact_match": "exact match, %",
}
PANELS_IN_A_ROW = 3
PANEL = (3.4, 2.8)  # inches


def draw(results: Results, benchmark: Benchmark, output: Path) -> list[Picture]:
    """Draws STEM_seeds.png and, where there are checkpoints to draw it of, STEM_updates.png. Returns what it drew."""
    shown = {score.task for score in benchmark.scores}
    others = [task for name, task in benchmark.tasks.items() if name in results.grid.tasks and name not in shown]
    panels = [*benchmark.scores, *(Score(one.name, one.name, "valid", one.selecting_metric, "") for one in others)]
    seeds = output / f"{benchmark.key}_seeds.png"
    updates = output / f"{benchmark.key}_updates.png"
    draw_seeds(results, panels, seeds, benchmark.baseline_name)
    if draw_updates(results, panels, updates, benchmark):
        return [Picture(seeds.name), Picture(updates.name)]
    updates.unlink(missing_ok=True)  # of an earlier report on another grid
    return [Picture(seeds.name)]


def draw_seeds(results: Results, scores: Sequence[Score], path: Path, baseline_name: str) -> None:
    """A panel per score that a model has a run of: every seed at the chosen rate, a box where there are enough."""
    models = list(results.grid.models)
    style_of = styles(models)
    scores = _drawable(results, scores, models)
    legend = [*handles(style_of, linestyle=""), *handles({f"baseline: {baseline_name}": BASELINE})]
    title = "Development scores, a mark a seed at the chosen learning rate"
    with _panels(path, len(scores), title, legend) as panels:
        for axis, score in zip(panels, scores, strict=True):
            drawn = []
            for place, model in enumerate(models):
                found = results.of(model, score.task)
                if found.runs:
                    drawn.append(found.values(score.split, score.metric))
                    _draw_model(axis, place, drawn[-1], style_of[model])
            baseline = results.baseline(score.task, score.split, score.metric)
            _draw_baseline(axis, baseline, np.concatenate(drawn), models=len(drawn))
            axis.set(xlim=(-0.6, len(models) - 0.4), xticks=[])
            complete = all(results.of(model, score.task).is_complete for model in models)
            _name(axis, score.name if complete else f"{score.name} (incomplete)", score.metric)


def draw_updates(results: Results, scores: Sequence[Score], path: Path, benchmark: Benchmark) -> bool:
    """A panel per score against updates of pre-training, as LazyFormer's Figure 2: medians, and the seeds' range.

    Returns:
        False, and nothing is drawn, where no model has checkpoints of several numbers of updates.
    """
    series = checkpoint_series(results)
    if not any(len(points) > 1 for points in series.values()):
        return False
    style_of = styles(series)
    scores = _drawable(results, scores, [model for points in series.values() for _, model in points])
    averages = {name: _averages(results, benchmark, points) for name, points in series.items()}
    number = len(scores) + any(averages.values())
    legend = [*handles(style_of), *handles({f"baseline: {benchmark.baseline_name}": BASELINE})]
    title = "Development scores: median over seeds; bars from the lowest to the highest"
    with _panels(path, number, title, legend) as panels:
        for axis, score in zip(panels, scores, strict=False):
            drawn = [_draw_series(axis, results, score, points, style_of[name]) for name, points in series.items()]
            _draw_baseline(axis, results.baseline(score.task, score.split, score.metric), np.concatenate(drawn))
            _name(axis, score.name, score.metric)
        if any(averages.values()):
            for name, points in averages.items():
                panels[-1].plot(*zip(*points, strict=True) if points else ((), ()), **style_of[name])
            _name(panels[-1], f"{AVERAGE} of the {len(benchmark.scores)}", "mean of the paper's numbers")
        for axis in panels:
            axis.set_xlim(left=0)
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.xaxis.set_major_locator(MaxNLocator(5))
            axis.set_xlabel("updates of pre-training", fontsize=8)
    return True


def checkpoint_series(results: Results) -> dict[str, list[tuple[int, str]]]:
    """Models of known updates, grouped by the folder of their checkpoints: name -> [(updates, model)].

    A series takes the common start of its models' names, else their folder's name.
    """
    folders: dict[Path, dict[str, int]] = {}
    for key, run in results.runs.items():
        if run.updates is not None:
            folders.setdefault(Path(run.checkpoint).parent, {})[key.model] = run.updates
    series = {}
    for folder, updates in folders.items():
        words = zip(*(re.split(r"([-_@ ])", model) for model in updates), strict=False)
        shared = itertools.takewhile(lambda column: len(set(column)) == 1, words)
        name = "".join(column[0] for column in shared).rstrip("-_@ ") or folder.name
        series[name if name not in series else str(folder)] = sorted((n, model) for model, n in updates.items())
    return series


def _drawable(results: Results, scores: Sequence[Score], models: Collection[str]) -> list[Score]:
    """Those on whose task one of the models has a run."""
    has_run = {task for task in results.grid.tasks if any(results.of(model, task).runs for model in models)}
    return [score for score in scores if score.task in has_run]


@contextmanager
def _panels(path: Path, count: int, title: str, legend: Sequence[Any]) -> Iterator[list[Axes]]:
    """Panels of a picture, which is saved when the block ends."""
    columns = min(count, PANELS_IN_A_ROW)
    with picture(path, math.ceil(count / columns), columns, panel=PANEL, title=title, legend=legend) as axes:
        for axis in axes.flat[count:]:
            axis.remove()
        yield list(axes.flat[:count])


def _name(axis: Axes, title: str, metric: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_ylabel(METRIC_NAMES.get(metric, metric if " " in metric else f"{metric}, %"), fontsize=8)
    axis.tick_params(labelsize=8)


def _draw_model(axis: Axes, place: int, values: np.ndarray, style: Style) -> None:
    axis.hlines(np.median(values), place - 0.3, place + 0.3, color=style["color"], linewidth=2)
    if len(values) > 1:
        beside = np.linspace(-0.2, 0.2, len(values))
    else:
        beside = np.zeros(1)
    axis.plot(place + beside, values, **{**style, "linestyle": "", "markersize": 4, "alpha": 0.8})


def _draw_series(
    axis: Axes,
    results: Results,
    score: Score,
    points: Sequence[tuple[int, str]],
    style: Style,
) -> np.ndarray:
    """Medians of a series' checkpoints with the seeds' range. Returns all that was drawn."""
    found = [(updates, results.of(model, score.task)) for updates, model in points]
    seeds = {updates: task.values(score.split, score.metric) for updates, task in found if task.runs}
    if not seeds:
        return np.empty(0)
    medians = np.array([np.median(values) for values in seeds.values()])
    below = medians - [values.min() for values in seeds.values()]
    above = [values.max() for values in seeds.values()] - medians
    axis.errorbar(list(seeds), medians, yerr=[below, above], capsize=2.5, elinewidth=1, **style)
    return np.concatenate(list(seeds.values()))


def _averages(results: Results, benchmark: Benchmark, points: Sequence[tuple[int, str]]) -> list[tuple[int, float]]:
    """(updates, average) of the checkpoints that have one."""
    rows = ((updates, model_row(results, benchmark, model)) for updates, model in points if benchmark.average)
    averages = ((updates, average_of(row, benchmark)) for updates, row in rows)
    return [(updates, value) for updates, value in averages if value is not None]


def _draw_baseline(axis: Axes, baseline: float, values: np.ndarray, models: int = 1) -> None:
    """A line; or, where models are compared and it lies so far below that it would flatten their differences, words at
    the foot of the panel.
    """
    spread = max(float(np.ptp(values)), 1.0)
    if models == 1 or values.min() - baseline <= FARTHEST_BASELINE * spread:
        axis.axhline(baseline, **BASELINE)
        low, high = axis.get_ylim()
        axis.set_ylim(low, max(high, low + LEAST_HEIGHT))
        return
    low, high = axis.get_ylim()
    axis.set_ylim(low - 0.15 * (high - low), high)
    axis.text(0.5, 0.02, f"baseline {baseline:.1f}, below", transform=axis.transAxes, ha="center", va="bottom",
              fontsize=7.5, color="0.35", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
