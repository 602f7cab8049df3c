"""Figures in a common style, and the context manager that writes them."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from lazyformer_fairseq.storage.atomic import atomic_file

# The color-blind-safe palette of Okabe and Ito, with gray instead of yellow, which is hard to see on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#808080")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
INCHES_PER_COLUMN = 2.2  # width of a legend column
MARKERS_PER_LINE = 12  # approximate maximum; enough markers to tell the lines apart

Style = Mapping[str, Any]  # matplotlib keyword arguments


def styles(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Assign a color and a marker to each name, as matplotlib keyword arguments; the first 56 pairs are distinct."""
    colors = itertools.cycle(COLORS)
    marks = itertools.cycle(MARKS)
    return {name: {"color": color, "marker": mark} for name, color, mark in zip(names, colors, marks, strict=False)}


@contextmanager
def picture(
    path: Path,
    rows: int = 1,
    columns: int = 1,
    panel: tuple[float, float] = (5.5, 4.4),
    title: str = "",
    legend: Sequence[Line2D] = (),
    **subplots: Any,
) -> Iterator[np.ndarray]:
    """Yield an array of axes (rows, columns), and write the figure to a PNG file if the block raises no error.

    Args:
        path: the PNG file, which is written atomically.
        rows: number of rows of panels.
        columns: number of columns of panels.
        panel: width and height of a panel, in inches.
        title: a title above all panels.
        legend: handles for a legend below all panels (see :func:`handles`); the block may extend the list.
        subplots: further arguments for matplotlib's `Figure.subplots`, such as ``sharex`` and ``sharey``.
    """
    width, height = panel
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    yield axes
    if title:
        figure.suptitle(title, fontsize=11)
    if legend:
        fitting_columns = round(figure.get_figwidth() / INCHES_PER_COLUMN)
        columns_of_legend = min(len(legend), max(2, fitting_columns))
        figure.legend(
            handles=list(legend),
            loc="outside lower center",
            ncols=columns_of_legend,
            frameon=False,
        )
    with atomic_file(path) as file:
        figure.savefig(file, dpi=150, bbox_inches="tight", format="png")


def handles(style_of: Mapping[str, Style], **more: Any) -> list[Line2D]:
    """Create a legend handle for each name; `more` contains arguments for all of them, such as ``linestyle=""``."""
    found = []
    for name, style in style_of.items():
        combined = {**style, **more}
        found.append(Line2D([], [], label=name, **combined))
    return found


def draw_band(axis: Axes, x: Sequence[float], values: np.ndarray, style: Style) -> None:
    """Draw the median over seeds as a line, inside a band from the minimum to the maximum.

    Args:
        axis: the axes.
        x: the x coordinates, (points,).
        values: the values, (seeds, points).
        style: the style of the line; the band has the same color.
    """
    axis.fill_between(
        x,
        values.min(axis=0),
        values.max(axis=0),
        color=style["color"],
        alpha=0.18,
        linewidth=0,
    )
    median = np.median(values, axis=0)
    every = max(1, len(x) // MARKERS_PER_LINE)
    axis.plot(x, median, linewidth=1.4, markersize=4, markevery=every, **style)


def draw_spread(axis: Axes, x: float, values: Sequence[float], style: Style) -> None:
    """Draw a marker at the median of `values`, and a bar from their minimum to their maximum."""
    axis.vlines(x, min(values), max(values), color=style["color"], linewidth=1)
    axis.plot(x, np.median(values), linestyle="", markersize=8, zorder=3, **style)


OF_COST = {
    "updates": "updates",
    "tokens": "training tokens",
    "flops": "training FLOPs",
    "hours": "training time, hours",
    "seconds": "training time, seconds",
}
SECONDS_OF = {"hours": 3600, "minutes": 60, "seconds": 1}


def label_cost(axis: Axes, cost: str) -> None:
    """Format the x axis for one of the costs in OF_COST, starting at zero.

    Large numbers are abbreviated: 1.5e12 is shown as 1.5T. Times are shown in seconds up to six minutes, in minutes up
    to one hour, and in hours otherwise.
    """
    axis.set_xlim(left=0)
    most = axis.get_xlim()[1]
    label = OF_COST[cost]
    if cost in SECONDS_OF:
        seconds = most * SECONDS_OF[cost]
        unit = "seconds"
        if seconds >= 3600:
            unit = "hours"
        elif seconds > 360:
            unit = "minutes"
        scale = SECONDS_OF[unit] / SECONDS_OF[cost]
        locator = MaxNLocator(7, steps=[1, 2, 5, 10])
        ticks = np.asarray(locator.tick_values(0, most / scale))
        axis.set_xticks(ticks * scale, [f"{tick:g}" for tick in ticks])
        axis.set_xlim(0, most)
        label = label.replace(cost, unit)
    else:
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_xlabel(label)
