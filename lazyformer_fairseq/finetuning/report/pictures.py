"""Pictures of a grid of fine-tuning runs: the spread over seeds, and scores against updates of pre-training."""

import itertools
import math
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from lazyformer_fairseq.finetuning.report.results import Results, TaskResults
from lazyformer_fairseq.report.figures import styles, write_picture

BASELINE = {"color": "0.45", "linestyle": "--", "linewidth": 1.2}
FEWEST_FOR_A_BOX = 5  # of fewer seeds the marks say all
LEAST_HEIGHT = 2.0  # of an axis, in points: what lies within it is noise
FARTHEST_BASELINE = 6  # below the scores, in multiples of their spread
METRIC_NAMES = {
    "matthews": "Matthews' correlation x 100",
    "pearson": "Pearson's correlation x 100",
    "f1": "F1, %",
    "exact_match": "exact match, %",
}
PANELS_IN_A_ROW = 3


class Panel(NamedTuple):
    """A score with a panel of its own: a metric of a task's development split."""

    name: str
    task: str
    split: str
    metric: str


Look = dict[str, Any]  # of a model in every panel, as matplotlib takes it


def draw_seeds(results: Results, scores: Sequence[Panel], path: Path, baseline_name: str) -> None:
    """A panel per score: every seed at the chosen rate, a box where there are enough, the baseline as a line.

    Args:
        scores: those that no model has a run of are left out.
    """
    models = list(results.grid.models)
    look_of = styles(models)
    scores = _drawable(results, scores, models)
    figure, panels = _panels(len(scores))
    for axis, score in zip(panels, scores, strict=True):
        drawn = []
        for place, model in enumerate(models):
            found = results.of(model, score.task)
            if found.runs:
                values = found.values(score.split, score.metric)
                _draw_model(axis, place, values, look_of[model])
                drawn.append(values)
        baseline = results.baseline(score.task, score.split, score.metric)
        _draw_baseline(axis, baseline, np.concatenate(drawn), models=len(drawn))
        axis.set_xlim(-0.6, len(models) - 0.4)
        axis.set_xticks([])
        complete = all(results.of(model, score.task).is_complete for model in models)
        axis.set_title(score.name if complete else f"{score.name} (incomplete)", fontsize=10)
        axis.set_ylabel(_unit(score), fontsize=8)
    handles = [Line2D([], [], label=model, **look, linestyle="") for model, look in look_of.items()]
    _finish(figure, handles, "Development scores, a mark a seed at the chosen learning rate", path, baseline_name)


def draw_updates(
    results: Results,
    scores: Sequence[Panel],
    path: Path,
    baseline_name: str,
    average: Callable[[str], Optional[float]] = lambda model: None,
) -> bool:
    """A panel per score against updates of pre-training, as LazyFormer's Figure 2: medians, and the seeds' range.

    Args:
        average: of a model over scores, for a panel of its own; None where it has none.

    Returns:
        False, and nothing is drawn, where no model has checkpoints of several numbers of updates.
    """
    series = checkpoint_series(results)
    if not any(len(points) > 1 for points in series.values()):
        return False
    look_of = styles(series)
    scores = _drawable(results, scores, [model for points in series.values() for _, model in points])
    averages = {name: _averages(average, points) for name, points in series.items()}
    with_average = any(averages.values())
    figure, panels = _panels(len(scores) + with_average)
    for axis, score in zip(panels, scores, strict=False):
        drawn = [
            values
            for name, points in series.items()
            if (values := _draw_series(axis, results, score, points, look_of[name])) is not None
        ]
        _draw_baseline(axis, results.baseline(score.task, score.split, score.metric), np.concatenate(drawn))
        axis.set_title(score.name, fontsize=10)
        axis.set_ylabel(_unit(score), fontsize=8)
    if with_average:
        for name, points in averages.items():
            panels[-1].plot(*zip(*points, strict=True) if points else ((), ()), **look_of[name])
        panels[-1].set_title("Avg. of the nine", fontsize=10)
        panels[-1].set_ylabel("mean of the paper's nine numbers", fontsize=8)
    for axis in panels:
        axis.set_xlim(left=0)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.set_xlabel("updates of pre-training", fontsize=8)
    handles = [Line2D([], [], label=name, **look) for name, look in look_of.items()]
    _finish(
        figure,
        handles,
        "Development scores: median over seeds; bars from the lowest to the highest",
        path,
        baseline_name,
    )
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


def _drawable(results: Results, scores: Sequence[Panel], models: Collection[str]) -> list[Panel]:
    """Those on whose task one of the models has a run."""
    has_run = {task for task in results.grid.tasks if any(results.of(model, task).runs for model in models)}
    return [score for score in scores if score.task in has_run]


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure and `count` panels in rows of three."""
    columns = min(count, PANELS_IN_A_ROW)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(3.1 * columns, 5), 2.5 * rows + 0.7), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in panels[count:]:
        axis.remove()
    for axis in panels[:count]:
        axis.grid(axis="y", alpha=0.3)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, panels[:count]


def _draw_model(axis: Axes, place: int, values: np.ndarray, look: Look) -> None:
    if len(values) >= FEWEST_FOR_A_BOX:
        axis.boxplot(
            values,
            positions=[place],
            widths=0.6,
            showfliers=False,  # every seed is drawn below
            patch_artist=True,
            boxprops={"facecolor": look["color"], "alpha": 0.25, "edgecolor": look["color"]},
            medianprops={"color": look["color"], "linewidth": 2},
            whiskerprops={"color": look["color"]},
            capprops={"color": look["color"]},
        )
    else:
        axis.hlines(np.median(values), place - 0.3, place + 0.3, color=look["color"], linewidth=2)
    beside = np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else [0.0]
    axis.plot(place + np.asarray(beside), values, **{**look, "linestyle": "", "markersize": 4, "alpha": 0.8})


def _draw_series(
    axis: Axes, results: Results, score: Panel, points: list[tuple[int, str]], look: Look
) -> Optional[np.ndarray]:
    """Medians of a series' checkpoints with the seeds' range. Returns all that was drawn, None where nothing was."""
    found: list[tuple[int, TaskResults]] = [(updates, results.of(model, score.task)) for updates, model in points]
    seeds = [(updates, task.values(score.split, score.metric)) for updates, task in found if task.runs]
    if not seeds:
        return None
    updates = [point for point, _ in seeds]
    medians = np.array([np.median(values) for _, values in seeds])
    below = medians - [values.min() for _, values in seeds]
    above = [values.max() for _, values in seeds] - medians
    axis.errorbar(updates, medians, yerr=[below, above], capsize=2.5, elinewidth=1, **look)
    return np.concatenate([values for _, values in seeds])


def _averages(average: Callable[[str], Optional[float]], points: list[tuple[int, str]]) -> list[tuple[int, float]]:
    """(updates, average) of the checkpoints that have one."""
    averages = ((updates, average(model)) for updates, model in points)
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


def _unit(score: Panel) -> str:
    return METRIC_NAMES.get(score.metric, f"{score.metric}, %")


def _finish(figure: Figure, handles: list[Line2D], title: str, path: Path, baseline_name: str) -> None:
    handles = [*handles, Line2D([], [], label=f"baseline: {baseline_name}", **BASELINE)]
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4), fontsize=8, frameon=False)
    write_picture(figure, path)
