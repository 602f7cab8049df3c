"""Pictures of a comparison: curves as LazyFormer's Figure 2, times to the target, fronts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from lazyformer_fairseq.experiments.compare.results import Comparison, Model
from lazyformer_fairseq.experiments.compare.times import NEVER, Front, TimeToTarget
from lazyformer_fairseq.report.figures import draw_band, draw_spread, handles, picture, styles

LABELS = {
    "updates": "updates",
    "tokens": "tokens of training",
    "flops": "FLOPs of training",
    "seconds": "seconds of its own training",
}
BEGINNING = 0.2  # of a training: what is worse than the curves were then is left out, or it would flatten the rest
HOLLOW = {"markerfacecolor": "white"}  # a shorter training


def draw_curves(comparison: Comparison, times: Sequence[TimeToTarget], title: str, path: Path) -> None:
    """The measure against updates, tokens, FLOPs and seconds: medians, bands from lowest to highest over seeds.

    A dashed line is the target, a large mark where a median run first meets it, a hollow one the end of a shorter
    training of the same model.
    """
    style_of, measure = styles(comparison.families), comparison.measure
    legend = [*handles(style_of), _mark("first meets the target", 9), *_of_shorter(comparison)]
    targets = {time.target for time in times}
    with picture(path, 2, 2, (5.5, 4), title, legend, sharey=True) as panels:
        for (cost, label), axis in zip(LABELS.items(), panels.flat, strict=True):
            for family, models in comparison.families.items():
                draw_band(axis, *typical(models[-1], cost, measure.name), style_of[family])
                for shorter in models[:-1]:
                    end, where = np.median(shorter.finals(measure.name)), np.median(shorter.wholes(cost))
                    axis.plot(where, end, linestyle="", markersize=6, zorder=3, **style_of[family], **HOLLOW)
            for time in (time for time in times if time.clock == "curve" and time.median(cost) < NEVER):
                style = style_of[time.model]
                axis.plot(time.median(cost), time.target, linestyle="", markersize=9, zorder=4, **style)
            for target in targets:
                axis.axhline(target, color="0.3", linestyle="--", linewidth=0.9)
            axis.set_xlabel(label)
            if cost != "seconds":
                axis.xaxis.set_major_formatter("{x:.2g}" if cost == "flops" else EngFormatter(sep=""))
            axis.set_xlim(left=0)
        panels[0, 0].set_ylim(*_limits(comparison, list(targets)))
        for axis in panels[:, 0]:
            axis.set_ylabel(f"{measure.label}, held out")


def typical(model: Model, cost: str, measure: str) -> tuple[np.ndarray, np.ndarray]:
    """What a run of median speed had spent, (E,), and the measure of each seed then, (seeds, E).

    The points are those at which any seed was evaluated, as far as all seeds came.
    """
    curves = [run.curve for run in model.runs.values()]
    first, last = (pick(curve["updates"][end] for curve in curves) for pick, end in ((max, 0), (min, -1)))
    updates = np.unique(np.concatenate([curve["updates"] for curve in curves]))
    updates = updates[(updates >= first) & (updates <= last)]
    spent = np.median([np.interp(updates, curve["updates"], curve[cost]) for curve in curves], axis=0)
    return spent, np.array([np.interp(updates, curve["updates"], curve[measure]) for curve in curves])


def draw_times(times: Sequence[TimeToTarget], title: str, path: Path) -> None:
    """The share of the baseline's own seconds that each model needed: medians, bars from lowest to highest seed."""
    shown = [(time, time.ratios["seconds"]) for time in times if "seconds" in time.ratios]
    shown.sort(key=lambda pair: -pair[1].median)
    style_of = styles(dict.fromkeys(time.model for time in times))
    widest = 1.12 * max([1.0, *(end for _, ratio in shown for end in ratio.by_seed.values() if end < NEVER)])
    several = len({time.clock for time, _ in shown}) > 1
    with picture(path, panel=(8, 1.4 + 0.42 * max(len(shown), 1)), title=title) as ((axis,),):
        for place, (time, ratio) in enumerate(shown):
            colour, is_reached = style_of[time.model]["color"], ratio.median < NEVER
            bar = {"color": colour} if is_reached else {"color": "none", "hatch": "//"}
            alpha, length = 0.75 if time.clock == "curve" else 0.4, ratio.median if is_reached else widest
            axis.barh(place, length, height=0.62, alpha=alpha, edgecolor=colour, linewidth=0.8, **bar)
            if is_reached:
                axis.hlines(place, ratio.low, min(ratio.high, widest), color="0.15", linewidth=1.6)
                axis.plot([ratio.median], [place], marker="|", markersize=12, color="0.15")
            seeds = len(ratio.by_seed)
            by_some = f"by {ratio.reached} of {seeds} seeds" if 0 < ratio.reached < seeds else ""
            said = f"{ratio.median:.2f} {by_some}" if is_reached else f"reached {by_some}" if by_some else "not reached"
            axis.text(0.01 * widest, place, said.strip(), va="center", fontsize=9,
                      bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1})  # fmt: skip
        axis.axvline(1, color="0.3", linestyle="--", linewidth=0.9)
        labels = [f"{time.model} ({time.clock})" if several else time.model for time, _ in shown]
        axis.set_yticks(range(len(shown)), labels)
        axis.set_xlim(0, widest)
        axis.set_xlabel("seconds to the target, in units of the baseline's own (bars: lowest to highest seed)")


def draw_fronts(comparison: Comparison, fronts: Sequence[Front], title: str, path: Path) -> None:
    """The final measure against each cost, a panel each; a line joins the models that no other beats in both."""
    style_of, measure = styles(comparison.families), comparison.measure
    legend = [*handles(style_of), *_of_shorter(comparison)]
    with picture(path, 1, len(fronts), (4.7, 4.4), title, legend, sharey=True) as (panels,):
        for front, axis in zip(fronts, panels, strict=True):
            for name, (cost, _) in front.points.items():
                model = comparison.models[name]
                filled = {} if model is comparison.longest(model.family) else HOLLOW
                draw_spread(axis, cost, model.finals(measure.name), {**style_of[model.family], **filled})
            line = [front.points[name] for name in front.members]
            axis.plot(*zip(*line, strict=True), color="0.5", linewidth=1, zorder=1, drawstyle="steps-post")
            axis.set_xlabel(front.label)
        panels[0].set_ylabel(f"{measure.label}, held out (range of the seeds)")


def _limits(comparison: Comparison, targets: Sequence[float]) -> tuple[float, float]:
    """Of the measure's axis: from the best to what the worst model had after its beginning, the targets between."""
    seen = list(targets)
    for models in comparison.families.values():
        seen += [value for model in models for value in model.finals(comparison.measure.name)]
        updates, values = typical(models[-1], "updates", comparison.measure.name)
        seen += list(np.median(values, axis=0)[updates >= BEGINNING * updates[-1]])
    finite = [value for value in seen if np.isfinite(value)]
    low, high = min(finite), max(finite)
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


def _of_shorter(comparison: Comparison) -> list[Line2D]:
    """What the legend says of hollow marks, where there are any."""
    has_some = any(len(models) > 1 for models in comparison.families.values())
    return [_mark("end of a shorter training", 6, **HOLLOW)] if has_some else []


def _mark(label: str, size: float, **style: str) -> Line2D:
    return Line2D([], [], label=label, marker="o", linestyle="", color="0.4", markersize=size, **style)
