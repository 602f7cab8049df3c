"""The report's pictures: SVG by matplotlib, as ``<img>`` that hold their data."""

import base64
import io
import math
from itertools import accumulate, pairwise

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from lazyformer_fairseq.corpus.report.html import Html, percent, short, text

BLUE, INK, SOFT = "#2f6f9f", "#1d232a", "#5c6773"
LOOK = {
    "svg.hashsalt": "report",  # the same manifest gives the same bytes
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
}


def picture_of_drops(dropped: dict[str, int], documents_in: int) -> Html:
    """Horizontal bars, the most frequent reason on top."""
    shown = sorted(((n, reason) for reason, n in dropped.items() if n), key=lambda pair: (-pair[0], pair[1]))
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(9, 0.15 + 0.27 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        places = range(len(shown))
        bars = axes.barh(places, [n for n, _ in shown], color=BLUE, height=0.68)
        axes.bar_label(bars, [f"{n:,}  ({percent(n / documents_in)})" for n, _ in shown], padding=5, color=SOFT)
        axes.set_yticks(places, [reason for _, reason in shown], color=INK, parse_math=False)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1.22 * shown[0][0])
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)
        return _image(figure, "Dropped documents by reason")


def picture_of_lengths(lengths: dict[str, dict[str, list]]) -> Html:
    """Histograms side by side: the share of all per doubling of the length, on a logarithmic axis of lengths."""
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(10, 2.7), layout="constrained")
        for axes, (name, histogram) in zip(
            figure.subplots(1, len(lengths), squeeze=False)[0], lengths.items(), strict=True
        ):
            _draw_lengths(axes, name, histogram)
        return _image(figure, f"Histograms: {', '.join(lengths)}")


def _draw_lengths(axes: Axes, name: str, histogram: dict[str, list]) -> None:
    edges, counts = filled_bins(histogram["edges"], histogram["counts"])
    axes.set_title(name, fontsize=10, loc="left", parse_math=False)
    if not counts:
        axes.set_axis_off()
        axes.annotate("nothing to count", (0.5, 0.5), xycoords="axes fraction", ha="center", color=SOFT)
        return
    # Per doubling, because equal bins of a logarithmic axis do not hold equally many whole numbers.
    doublings = [math.log2(right / left) for left, right in pairwise(edges)]
    shares = [n / sum(counts) / width for n, width in zip(counts, doublings, strict=True)]
    axes.stairs(shares, edges, fill=True, color=BLUE)
    axes.set_xscale("log")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1.18 * max(shares))  # room for the median's name
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if edges[-1] < 50 * edges[0] else (1,), numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value) if value >= 1 else ""))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    middle = median(edges, counts)
    axes.axvline(middle, color=INK, linewidth=1, linestyle=":")
    on_the_right = math.log(middle / edges[0]) < 0.6 * math.log(edges[-1] / edges[0])
    axes.annotate(
        f"median {middle:,.0f}",
        (middle, 1),
        (4 if on_the_right else -4, -2),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="left" if on_the_right else "right",
        va="top",
        fontsize=8,
    )


def median(edges: list[float], counts: list[int]) -> float:
    """Median of a histogram with positive edges, as if lengths were spread evenly, by logarithm, within a bin."""
    half = sum(counts) / 2
    place = next(i for i, total in enumerate(accumulate(counts)) if total >= half)
    part = (half - sum(counts[:place])) / counts[place]
    return edges[place] * (edges[place + 1] / edges[place]) ** part


def filled_bins(edges: list[float], counts: list[int]) -> tuple[list[float], list[int]]:
    """The same histogram from its first to its last bin that is not empty."""
    full = [place for place, n in enumerate(counts) if n]
    return (edges[full[0] : full[-1] + 2], counts[full[0] : full[-1] + 1]) if full else ([], [])


def _image(figure: Figure, description: str) -> Html:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return Html(f'<img alt="{text(description)}" src="data:image/svg+xml;base64,{data}">')
