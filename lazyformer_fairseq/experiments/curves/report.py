"""Table and picture of runs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Union

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from lazyformer_fairseq.experiments.curves.history import AXES, History
from lazyformer_fairseq.experiments.curves.phases import Phases
from lazyformer_fairseq.report.figures import styles, write_picture
from lazyformer_fairseq.report.tables import markdown_table

LABELS = {
    "updates": "updates",
    "tokens": "tokens of training",
    "hours": "hours of training",
    "flops": "FLOPs of training, by formula",
}
NOT_TOLD = "-"
TRAINING = "train"  # among the splits
Runs = Mapping[str, Union[History, Phases]]  # by name


def table(shown: Runs, labels: Mapping[str, str]) -> str:
    """A Markdown table: a run's last and best validation, and what had been spent by the last."""
    rows = []
    for name, history in shown.items():
        losses = history.losses
        last, best = max(losses), min(losses, key=lambda updates: (losses[updates], updates))
        spent = {axis: float(history.at(axis, [last])[0]) for axis in AXES}
        rows.append(
            {
                "run": labels[name],
                "pattern": history.pattern or NOT_TOLD,
                "validations": f"{len(losses):,}",
                "updates": f"{last:,}",
                "tokens": _short(spent["tokens"]),
                "hours": NOT_TOLD if np.isnan(spent["hours"]) else f"{spent['hours']:,.3f}",
                "FLOPs": NOT_TOLD if np.isnan(spent["flops"]) else f"{spent['flops']:.2e}",
                "last loss": f"{losses[last]:.3f}",
                "best loss": f"{losses[best]:.3f}",
                "at update": f"{best:,}",
            }
        )
    return markdown_table(rows, left=("pattern",))


def csv_rows(shown: Runs, training: bool = False) -> Iterator[dict[str, Any]]:
    """A row a validation, of the training loss too where asked for; what the log does not tell stays empty."""
    for name, history in shown.items():
        of_training = {TRAINING: history.training} if training else {}
        for split, losses in {**of_training, **history.splits}.items():
            columns = {axis: history.at(axis, sorted(losses)) for axis in AXES}
            for place, updates in enumerate(sorted(losses)):
                spent = {axis: _digits(values[place]) for axis, values in columns.items() if axis != "updates"}
                known = {"run": name, "arch": history.arch, "pattern": history.pattern, "split": split}
                yield {**known, "updates": updates, **spent, "loss": losses[updates]}


def draw(shown: Runs, labels: Mapping[str, str], axes: Sequence[str], path: Path, training: bool = False) -> None:
    """Loss against each of `axes` (of AXES), a panel each, to a PNG: of validation, and of training where asked for.

    A thin line stands where a phase ends.
    """
    figure = Figure(figsize=(1 + 4.6 * len(axes), 4), layout="constrained")
    panels = figure.subplots(1, len(axes), squeeze=False, sharey=True)[0]
    look_of, drawn = styles(shown), {}
    for name, panel in zip(axes, panels, strict=True):
        for run, history in shown.items():
            updates = sorted(history.losses)
            where = history.at(name, updates)
            if not np.isnan(where).all():
                losses = [history.losses[made] for made in updates]
                drawn[run], *_ = panel.plot(where, losses, label=labels[run], markersize=4, **look_of[run])
            colour = look_of[run]["color"]
            if training:
                panel.plot(history.at(name, history.training), history.training.values(), color=colour, alpha=0.45,
                           linewidth=0.8, zorder=1)  # fmt: skip
            for border in history.at(name, history.borders):
                panel.axvline(border, color=colour, linewidth=0.8, linestyle="--")
        panel.set_xlim(left=0)
        panel.set_xlabel(LABELS[name])
        if name != "hours":
            panel.xaxis.set_major_formatter("{x:.2g}" if name == "flops" else EngFormatter(sep=""))
        panel.grid(alpha=0.3)
    measure = next(iter(shown.values())).measure
    panels[0].set_ylabel(f"{measure} (thin: of training)" if training else measure)
    if drawn:
        panels[0].legend(handles=list(drawn.values()))
    write_picture(figure, path)


def left_out(shown: Runs, axes: Sequence[str]) -> list[str]:
    """A sentence for each curve that a panel lacks, and why."""
    return [
        f"{name}: no curve against {axis}: {_why_not(history, axis)}"
        for name, history in shown.items()
        for axis in axes
        if np.isnan(history.at(axis, history.losses)).all()
    ]


def _why_not(history: Union[History, Phases], axis: str) -> str:
    if axis == "flops" and history.why_no_flops:
        return history.why_no_flops
    return "the log does not tell tokens (wpb) or time (wall), which fairseq logs with each --log-interval"


def _short(number: float) -> str:
    return NOT_TOLD if np.isnan(number) else f"{number:,.0f}" if number < 1e6 else f"{number / 1e6:,.1f}M"


def _digits(number: float) -> Any:
    return None if np.isnan(number) else float(f"{number:.6g}")
