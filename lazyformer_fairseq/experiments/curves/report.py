"""Runs as a user names them, and their table and picture."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.curves.history import AXES, History, read_history
from lazyformer_fairseq.report.figures import picture, styles
from lazyformer_fairseq.report.numbers import NOTHING
from lazyformer_fairseq.report.tables import markdown_table

LOGS, LOGS_OF_PHASES = "*.log", "phase[0-9]*/*.log"
STAMP = re.compile(r"^\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
STAMPED_WITHIN = 20  # lines; before them stands what a launcher prints
GENERIC = ("", "lazyformer", "lazyformer_lm")  # as a YAML file has it, which sets pattern and sizes one by one
LABELS = {"updates": "updates", "tokens": "tokens of training", "hours": "hours of training",
          "flops": "FLOPs of training"}  # fmt: skip
Runs = Mapping[str, History]  # by name


def logs_of_runs(given: Iterable[str]) -> dict[str, list[Path]]:
    """Logs by run, from words ``[NAME=]RUN``: a folder that holds ``*.log``, or a log; of one NAME they are one run.

    A folder that holds ``phase1``, ``phase2``, ... with logs is a run of these phases.
    A name that is not given is the folder's, or the file's without ``.log``, and stands in brackets.

    Raises:
        UserError: there is no such file, no log in the folder, or two runs of the same name.
    """
    runs: dict[str, list[Path]] = {}
    for word in given:
        name, equals, place = word.partition("=")
        if not equals or "/" in name:
            name, place = "", word
        path = Path(place)
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; give a folder of checkpoints, or a log")
        logs = (list(path.glob(LOGS_OF_PHASES)) or list(path.glob(LOGS))) if path.is_dir() else [path]
        if not logs:
            raise UserError(
                f"{path}: holds no {LOGS}; our runs write train.log there. Where the output went to a file, give it"
            )
        chosen = name or path.absolute().stem
        if chosen in runs and not name:
            raise UserError(f"{word}: a run is called {chosen} already; give NAME={word}")
        runs.setdefault(chosen, []).extend(logs)
    return {name: sorted(logs, key=_begun) for name, logs in runs.items()}


def _begun(log: Path) -> tuple[str, str]:
    """When its first line was written; without times, logs follow each other by name."""
    with log.open(encoding="utf-8", errors="replace") as file:
        for _, line in zip(range(STAMPED_WITHIN), file, strict=False):
            if found := STAMP.match(line):
                return found[1], log.name
    return "", log.name


def histories(runs: Mapping[str, list[Path]]) -> tuple[dict[str, History], list[str]]:
    """The runs that were validated, by name, and a sentence for each that was not.

    Raises:
        UserError: none was, or losses of different kinds.
    """
    read = {name: read_history(logs) for name, logs in runs.items()}
    silent = [
        f"{name}: no validation in {', '.join(map(str, runs[name]))}"
        + (f" after {history.last_update:,} updates" if history.last_update else ", and no update")
        for name, history in read.items()
        if not history.losses
    ]
    shown = {name: history for name, history in read.items() if history.losses}
    if not shown:
        raise UserError(
            f"nothing to draw: {'; '.join(silent)}. A run is validated when it saves (--save-interval-updates), "
            "every --validate-interval-updates, unless --disable-validation"
        )
    measures = {history.measure: name for name, history in shown.items()}
    if len(measures) > 1:
        what = "; ".join(f"{name}: {measure}" for measure, name in measures.items())
        raise UserError(f"these losses do not compare ({what}); draw one kind at a time")
    return shown, silent


def labels(shown: Runs) -> dict[str, str]:
    """What a picture calls each run: its arch where that tells it apart, else its name."""
    archs = [history.arch for history in shown.values()]
    return {
        name: history.arch if archs.count(history.arch) == 1 and history.arch not in GENERIC else name
        for name, history in shown.items()
    }


def table(shown: Runs, labels: Mapping[str, str]) -> str:
    """A Markdown table: a run's last and best validation, and what had been spent by the last."""
    rows = []
    for name, history in shown.items():
        losses = history.losses
        last, best = max(losses), min(losses, key=lambda updates: (losses[updates], updates))
        tokens, hours, flops = (float(history.at(axis, [last])[0]) for axis in AXES[1:])
        rows.append(
            {
                "run": labels[name],
                "pattern": history.pattern or NOTHING,
                "validations": f"{len(losses):,}",
                "updates": f"{last:,}",
                "tokens": _told(tokens, f"{tokens:,.0f}" if tokens < 1e6 else f"{tokens / 1e6:,.1f}M"),
                "hours": _told(hours, f"{hours:,.3f}"),
                "FLOPs": _told(flops, f"{flops:.2e}"),
                "last loss": f"{losses[last]:.3f}",
                "best loss": f"{losses[best]:.3f}",
                "at update": f"{best:,}",
            }
        )
    return markdown_table(rows, left=("pattern",))


def _told(value: float, shown: str) -> str:
    return NOTHING if np.isnan(value) else shown


def csv_rows(shown: Runs, training: bool = False) -> Iterator[dict[str, Any]]:
    """A row a validation, of the training loss too where asked for; what the log does not tell stays empty."""
    for name, history in shown.items():
        of_training = {"train": history.training} if training else {}
        for split, losses in {**of_training, **history.splits}.items():
            columns = {axis: history.at(axis, sorted(losses)) for axis in AXES[1:]}
            for place, updates in enumerate(sorted(losses)):
                known = {"run": name, "arch": history.arch, "pattern": history.pattern, "split": split}
                spent = {axis: _digits(values[place]) for axis, values in columns.items()}
                yield {**known, "updates": updates, **spent, "loss": losses[updates]}


def _digits(value: float) -> Any:
    return None if np.isnan(value) else float(f"{value:.6g}")


def draw(shown: Runs, labels: Mapping[str, str], axes: Sequence[str], path: Path, training: bool = False) -> None:
    """Loss against each of `axes` (of AXES), a panel each, to a PNG: of validation, and of training where asked for.

    A thin line stands where a phase ends.
    """
    style_of, drawn = styles(shown), {}
    with picture(path, 1, len(axes), (4.6 + 1 / len(axes), 4), sharey=True) as (panels,):
        for name, panel in zip(axes, panels, strict=True):
            for run, history in shown.items():
                losses, colour = history.losses, style_of[run]["color"]
                where = history.at(name, sorted(losses))
                if not np.isnan(where).all():
                    values = [losses[made] for made in sorted(losses)]
                    drawn[run], *_ = panel.plot(where, values, label=labels[run], markersize=4, **style_of[run])
                if training:
                    thin = {"color": colour, "alpha": 0.45, "linewidth": 0.8, "zorder": 1}
                    panel.plot(history.at(name, history.training), history.training.values(), **thin)
                for border in history.at(name, history.starts[1:]):
                    panel.axvline(border, color=colour, linewidth=0.8, linestyle="--")
            panel.set_xlim(left=0)
            panel.set_xlabel(LABELS[name])
            if name != "hours":
                panel.xaxis.set_major_formatter("{x:.2g}" if name == "flops" else EngFormatter(sep=""))
        measure = next(iter(shown.values())).measure
        panels[0].set_ylabel(f"{measure} (thin: of training)" if training else measure)
        if drawn:
            panels[0].legend(handles=list(drawn.values()))


def left_out(shown: Runs, axes: Sequence[str]) -> list[str]:
    """A sentence for each curve that a panel lacks, and why."""
    unknown = "the log does not tell tokens (wpb) or time (wall), which fairseq logs with each --log-interval"
    return [
        f"{name}: no curve against {axis}: {(axis == 'flops' and history.why_no_flops) or unknown}"
        for name, history in shown.items()
        for axis in axes
        if np.isnan(history.at(axis, history.losses)).all()
    ]
