"""Runs as a user names them, their history from their logs, and its table and picture.

A history is validations against updates, tokens, hours and FLOPs, whatever was resumed. Logs of fairseq-train are read
line by line, of ``--log-format simple`` and ``json``, with the time and the logger's name before each message (as in
``train.log`` and in what was sent to a file) or without them (``--log-file``).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, islice
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any, Optional

import numpy as np
from matplotlib.lines import Line2D

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_flops
from lazyformer_fairseq.options import computed_tokens, mask_shares
from lazyformer_fairseq.patterns.kinds import sizes_of
from lazyformer_fairseq.report.figures import label_cost, picture, styles
from lazyformer_fairseq.report.numbers import NOTHING
from lazyformer_fairseq.report.tables import markdown_table

AXES = ("updates", "tokens", "hours", "flops")
OF_TASK = {
    "full_sentences_masked_lm": "validation loss, bits per masked token",
    "masked_permuted_lm": "validation loss, bits per predicted token",
    "stream_language_modeling": "validation loss, bits per token",
}
FORWARD_AND_BACKWARD = 3  # a backward pass is two forward passes
PHASE = re.compile(r"phase(\d+)")  # the folder of each phase of a run of several
CONFIG = "{'_name': None, 'common': {"
SECTION = re.compile(r"'(\w+)': \{([^{}]*)")
SETTING = re.compile(r"'(\w+)': (?:'([^']*)'|([^',{}\[\]]+))")
# No pattern has `.*` before its end: on a long line that holds its beginning many times it would take quadratic time.
LOADED = "Loaded checkpoint "
AT_UPDATE = re.compile(r" \(epoch \d+ @ (\d{1,15}) updates\)")
SYMBOLS = re.compile(r"dictionary: (\d{1,15}) (?:symbols|types)")
# Numbers within an epoch, at the end of one or of a validation, and either in JSON.
INNER = re.compile(r"epoch \d+: +\d+ / \d+ (\w+=.*)")
SUMMARY = re.compile(r"epoch \d+ \| (?:valid on '([^']+)' subset \| )?(loss .*)")
IN_JSON = '{"epoch": '
TOLD = ("num_updates", "loss", "wpb", "wall")
SPLIT = re.compile(r"(?:(.+)_)?num_updates")  # in JSON a name begins with the split, or with train

Settings = Mapping[str, str]


@dataclass
class Phase:
    """A part of a run that trains in one way, such as PAR BERT's on 128 and then on 512 tokens.

    Attributes:
        points: rows of updates, tokens and hours, all of the run, increasing; the first is where it begins.
        flops: of the run before it.
        model, task: sections of the settings, values as text; empty where the log has none.
        symbols: of the dictionary.
        why_no_flops: in words; empty where they are known.
    """

    points: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0, 0.0]])
    flops: float = 0.0
    model: Settings = field(default_factory=dict)
    task: Settings = field(default_factory=dict)
    symbols: Optional[int] = None
    flops_of_token: float = nan
    why_no_flops: str = ""

    def at(self, axis: str, updates: np.ndarray) -> np.ndarray:
        """Return where updates of this phase stand on an axis; see :meth:`History.at`."""
        if axis == "updates":
            return updates
        if axis == "flops":
            return self.flops + (self.at("tokens", updates) - self.points[0][1]) * self.flops_of_token
        return interpolate(np.array(self.points), AXES.index(axis), updates)

    def count(self) -> None:
        """Find the FLOPs of a token, or why they cannot be counted."""
        if self.task.get("_name") not in OF_TASK:
            self.why_no_flops = f"no formula for --task {self.task.get('_name') or '(the log has no settings)'}"
        elif self.symbols is None:
            self.why_no_flops = "the log does not tell the size of the dictionary"
        else:
            try:
                self.flops_of_token = flops_of_token(self.model, self.task, self.symbols)
            except (KeyError, ValueError) as error:
                self.why_no_flops = f"the log's settings are of another kind of model ({error!r})"


class History:
    """The history of a run, read from its logs.

    It replays them: where a process goes back to an update, what came after it is undone. Each phase counts its updates
    from zero in its log; here they go on where the phase before ended.

    Attributes:
        phases: in their order.
        splits: validation split -> updates -> loss, as the criterion gives it: bits, in ours.
        training: updates -> the mean training loss of the updates since the line before it in the log.
        arch, pattern: of the first phase; empty where its log does not tell.
        measure: what the losses are, in words.
    """

    def __init__(self):
        self.phases = [Phase()]
        self.arch = ""
        self.pattern = ""
        self.measure = "validation loss"
        self.splits: dict[str, dict[int, float]] = {}
        self.training: dict[int, float] = {}
        self._base_hours = 0.0  # at which the process under way began
        self._begins = True  # it has not told an update yet

    @property
    def why_no_flops(self) -> str:
        """Why FLOPs cannot be counted, in words; empty where they are known."""
        return next(filter(None, (phase.why_no_flops for phase in self.phases)), "")

    @property
    def starts(self) -> list[int]:
        """The updates before each phase: except for the first, a border at which one ends and another begins."""
        return [int(phase.points[0][0]) for phase in self.phases]

    @property
    def losses(self) -> Mapping[int, float]:
        """The losses of the split ``valid``, or else of the first that was validated."""
        found = {split: losses for split, losses in self.splits.items() if losses}
        return found.get("valid") or next(iter(found.values()), {})

    @property
    def last_update(self) -> int:
        """The last update that the logs mention."""
        return max(int(self.phases[-1].points[-1][0]), *(made for losses in self.splits.values() for made in losses), 0)

    def at(self, axis: str, updates: Iterable[int]) -> np.ndarray:
        """Return where these updates stand on one of AXES; NaN where the log does not tell.

        Tokens and hours between two lines of the log are in proportion.
        """
        wanted = np.array(list(updates), dtype=float)
        found = self.phases[0].at(axis, wanted)
        for start, phase in zip(self.starts[1:], self.phases[1:], strict=True):
            found = np.where(wanted > start, phase.at(axis, wanted), found)
        return found

    def begin_phase(self) -> None:
        """Begin another phase, to which the following lines belong."""
        end = self.last_update
        spent = {axis: float(self.at(axis, [end])[0]) for axis in AXES[1:]}
        self.phases.append(Phase([[float(end), spent["tokens"], spent["hours"]]], spent["flops"]))
        self._begins = True

    def hear(self, line: str) -> None:
        """Read a line of the log, in its order; one that tells nothing is passed over."""
        phase = self.phases[-1]
        if CONFIG in line:  # a process begins
            sections: dict[str, Settings] = {}
            for name, settings in SECTION.findall(line[line.index(CONFIG) :]):
                found = {key: quoted or bare.strip() for key, quoted, bare in SETTING.findall(settings)}
                sections.setdefault(name, found)
            phase.model = sections.get("model", {})
            phase.task = sections.get("task", {})
            self._begins = True
            if len(self.phases) == 1:
                self.arch = phase.model.get("_name", "")
                self.pattern = phase.model.get("sublayer_pattern", "")
                self.measure = OF_TASK.get(phase.task.get("_name"), self.measure)
        elif made := AT_UPDATE.findall(line.partition(LOADED)[2]):
            self._resume(int(made[-1]))
        elif match := SYMBOLS.search(line):
            phase.symbols = int(match[1])
        elif match := SUMMARY.search(line):
            pairs = (word.strip().partition(" ")[::2] for word in match[2].split("|"))
            self._measured(match[1] or "train", dict(pairs))
        elif match := INNER.search(line):
            self._measured("", dict(word.strip().partition("=")[::2] for word in match[1].split(",")))
        elif (begin := line.find(IN_JSON)) >= 0:
            with suppress(ValueError, RecursionError):
                values = json.loads(line[begin:])
                for name in filter(SPLIT.fullmatch, list(values)):
                    prefix = name.removesuffix("num_updates")
                    told = {key: values[prefix + key] for key in TOLD if prefix + key in values}
                    self._measured(prefix[:-1], told)

    def _measured(self, split: str, numbers: Mapping[str, object]) -> None:
        """Take numbers of a validation split, of some updates in training (""), or of a whole epoch ("train")."""
        made = _number(numbers.get("num_updates"))
        loss = _number(numbers.get("loss"))
        if not isfinite(made):
            return
        updates = self.starts[-1] + int(made)
        if split in ("", "train"):
            self._train(updates, _number(numbers.get("wpb")), _number(numbers.get("wall")))
            if not split and "loss" in numbers:
                self.training[updates] = loss
        elif "loss" in numbers and (made or len(self.phases) == 1):  # else it would stand where the phase before ends
            losses = self.splits.setdefault(split, {})
            _forget_after(updates, losses)
            losses[updates] = loss

    def _resume(self, made: int) -> None:
        """Go back to a checkpoint: the clock goes on from its hours, so that those lost by a kill do not count."""
        points = self.phases[-1].points
        updates = float(self.starts[-1] + made)
        known = np.array(points)
        tokens, hours = (float(interpolate(known, column, np.array([updates]))[0]) for column in (1, 2))
        self._forget(updates)
        if made:
            points.append([updates, tokens, hours])
        self._base_hours = points[-1][2]
        self._begins = False

    def _train(self, updates: int, tokens: float, seconds: float) -> None:
        """Add a point: `tokens` per update since the one before, `seconds` since the process began to train."""
        self._forget(updates)
        points = self.phases[-1].points
        before, tokens_before, hours = points[-1]
        if self._begins:  # no checkpoint was named: from the start, or the log has no such lines (--log-file)
            self._base_hours = hours
            self._begins = False
        tokens_now = tokens_before + (updates - before) * tokens
        points.append([float(updates), tokens_now, self._base_hours + seconds / 3600])

    def _forget(self, updates: float) -> None:
        """Remove the points of this phase from `updates` on, and the losses after it."""
        points = self.phases[-1].points
        while len(points) > 1 and points[-1][0] >= updates:
            points.pop()
        for losses in (self.training, *self.splits.values()):
            _forget_after(updates, losses)


def _forget_after(updates: float, losses: dict[int, float]) -> None:
    """Remove the losses after an update; they are in the order of their updates."""
    while losses and next(reversed(losses)) > updates:
        losses.popitem()


def _number(value: object) -> float:
    """Return a number; NaN for what is none, such as JSON's ``true``."""
    try:
        if isinstance(value, bool):
            return nan
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return nan


def interpolate(points: np.ndarray, column: int, updates: np.ndarray) -> np.ndarray:
    """Return a column of `points` at `updates`; beyond the last point it grows as between the last two."""
    known = points[~np.isnan(points[:, column])]
    if len(known) < 2:
        return np.full(len(updates), np.nan)
    before = known[-2]
    last = known[-1]
    slope = (last[column] - before[column]) / (last[0] - before[0])
    beyond = np.maximum(updates - last[0], 0) * slope
    return np.interp(updates, known[:, 0], known[:, column]) + beyond


def read_history(logs: Sequence[Path]) -> History:
    """Read the logs of one run: of one phase, or of several, each in the order in which they were written.

    Raises:
        UserError: a log cannot be read.
    """

    def phase_of(log: Path) -> int:
        found = PHASE.fullmatch(log.absolute().parent.name)
        if found:
            return int(found[1])
        return 0

    history = History()
    for number, (_, same) in enumerate(groupby(sorted(logs, key=phase_of), key=phase_of)):
        if number:
            history.begin_phase()
        for path in same:
            for line in _lines(path):
                history.hear(line)
        history.phases[-1].count()
    return history


def _lines(log: Path) -> Iterator[str]:
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            yield from file
    except OSError as error:
        raise UserError(f"{log}: cannot be read ({error.strerror})") from None


def flops_of_token(model: Settings, task: Settings, symbols: int) -> float:
    """Return the FLOPs of a token in forward and backward pass, which share those of a sequence.

    Args:
        model, task: the sections of the config, values as text.
        symbols: of the dictionary.

    Raises:
        KeyError, ValueError: the settings are those of another package's model or task.
    """
    if "encoder_embed_dim" in model:
        length = int(task["tokens_per_sample"])
        memory = 0
        predicted = round(sum(mask_shares(task["mask_prob"])) / 2 * length)
    else:
        length = int(task["tgt_len"])
        memory = int(model["mem_len"])
        predicted = None
    sizes = sizes_of(model, symbols)
    computed = computed_tokens(task, length, predicted or 0)
    forward = count_flops(model["sublayer_pattern"], sizes, computed, memory, predicted=predicted)
    return FORWARD_AND_BACKWARD * forward / length


LOGS = "*.log"
LOGS_OF_PHASES = "phase[0-9]*/*.log"
STAMP = re.compile(r"^\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
STAMPED_WITHIN = 20  # lines; before them stands what a launcher prints
GENERIC = ("", "lazyformer", "lazyformer_lm")  # as a YAML file has it, which sets pattern and sizes one by one
Runs = Mapping[str, History]  # by name


def logs_of_runs(given: Iterable[str]) -> dict[str, list[Path]]:
    """Return logs by run, from words ``[NAME=]RUN``: a folder that holds ``*.log``, or a log; one NAME is one run.

    A folder that holds ``phase1``, ``phase2``, ... with logs is a run of these phases.
    A name that is not given is the folder's, or the file's without ``.log``, and stands in brackets.

    Raises:
        UserError: there is no such file, no log in the folder, or two runs of the same name.
    """
    runs: dict[str, list[Path]] = {}
    for word in given:
        name, equals, place = word.partition("=")
        if not equals or "/" in name:
            name = ""
            place = word
        path = Path(place)
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; give a folder of checkpoints, or a log")
        logs = [path]
        if path.is_dir():
            logs = list(path.glob(LOGS_OF_PHASES)) or list(path.glob(LOGS))
        if not logs:
            raise UserError(
                f"{path}: holds no {LOGS}; our runs write train.log there. Where the output went to a file, give it"
            )
        place = path.absolute()
        chosen = name or (place.name if path.is_dir() else place.stem)
        if chosen in runs and not name:
            raise UserError(f"{word}: a run is called {chosen} already; give NAME={word}")
        runs.setdefault(chosen, []).extend(logs)
    return {name: sorted(logs, key=_begun) for name, logs in runs.items()}


def _begun(log: Path) -> tuple[str, str]:
    """Return when its first line was written; without times, logs follow each other by name."""
    for line in islice(_lines(log), STAMPED_WITHIN):
        if found := STAMP.match(line):
            return found[1], log.name
    return "", log.name


def histories(runs: Mapping[str, list[Path]]) -> tuple[dict[str, History], list[str]]:
    """Return the runs that were validated, by name, and a sentence for each that was not.

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
    """Return what a picture calls each run: its arch where that tells it apart, else its name."""
    archs = [history.arch for history in shown.values()]
    return {
        name: history.arch if archs.count(history.arch) == 1 and history.arch not in GENERIC else name
        for name, history in shown.items()
    }


def table(shown: Runs, labels: Mapping[str, str]) -> str:
    """Return a Markdown table: each run's last and best validation, and what had been spent by the last."""
    rows = []
    for name, history in shown.items():
        losses = history.losses
        last = max(losses)
        best = min(losses, key=lambda updates: (isnan(losses[updates]), losses[updates], updates))
        tokens, hours, flops = (float(history.at(axis, [last])[0]) for axis in AXES[1:])
        spent = {"tokens": f"{tokens:,.0f}" if tokens < 1e6 else f"{tokens / 1e6:,.1f}M"}
        spent |= {"hours": f"{hours:,.3f}", "FLOPs": f"{flops:.2e}"}
        rows.append(
            {
                "run": labels[name],
                "pattern": history.pattern or NOTHING,
                "validations": f"{len(losses):,}",
                "updates": f"{last:,}",
                **{axis: NOTHING if "nan" in told else told for axis, told in spent.items()},
                "last loss": f"{losses[last]:.3f}",
                "best loss": f"{losses[best]:.3f}",
                "at update": f"{best:,}",
            }
        )
    return markdown_table(rows, left=("pattern",))


def csv_rows(shown: Runs, training: bool = False) -> Iterator[dict[str, Any]]:
    """Yield a row per validation, and per training loss where asked for; what the log does not tell stays empty."""
    for name, history in shown.items():
        if training:
            of_training = {"train": history.training}
        else:
            of_training = {}
        for split, losses in {**of_training, **history.splits}.items():
            columns = {axis: history.at(axis, sorted(losses)) for axis in AXES[1:]}
            for place, updates in enumerate(sorted(losses)):
                known = {"run": name, "arch": history.arch, "pattern": history.pattern, "split": split}
                there = {axis: float(f"{values[place]:.6g}") for axis, values in columns.items()}
                spent = {axis: None if isnan(value) else value for axis, value in there.items()}
                yield {**known, "updates": updates, **spent, "loss": losses[updates]}


def draw(shown: Runs, labels: Mapping[str, str], axes: Sequence[str], path: Path, training: bool = False) -> None:
    """Draw validation loss against each of `axes` (of AXES), a panel each, to a PNG; training loss where asked for.

    A dashed line stands where a phase ends.
    """
    style_of = styles(shown)
    drawn = {}
    legend = []
    with picture(path, 1, len(axes), (4.6 + 1 / len(axes), 4), legend=legend, sharey=True) as (panels,):
        for name, panel in zip(axes, panels, strict=True):
            for run, history in shown.items():
                losses = history.losses
                colour = style_of[run]["color"]
                where = history.at(name, sorted(losses))
                if not np.isnan(where).all():
                    values = [losses[made] for made in sorted(losses)]
                    drawn[run], *_ = panel.plot(where, values, label=labels[run], markersize=4, **style_of[run])
                if training:
                    thin = {"color": colour, "alpha": 0.45, "linewidth": 0.8, "zorder": 1}
                    panel.plot(history.at(name, history.training), history.training.values(), **thin)
                for border in history.at(name, history.starts[1:]):
                    panel.axvline(border, color=colour, linewidth=0.8, linestyle="--")
            label_cost(panel, name)
        measure = next(iter(shown.values())).measure
        panels[0].set_ylabel(f"{measure} (thin: of training)" if training else measure)
        legend += drawn.values()
        if any(len(history.starts) > 1 for history in shown.values()):
            legend.append(Line2D([], [], color="0.4", linewidth=0.8, linestyle="--", label="a phase ends"))


def left_out(shown: Runs, axes: Sequence[str]) -> list[str]:
    """Return a sentence for each curve that a panel lacks, and why."""
    unknown = "the log does not tell tokens (wpb) or time (wall), which fairseq logs with each --log-interval"
    return [
        f"{name}: no curve against {axis}: {(axis == 'flops' and history.why_no_flops) or unknown}"
        for name, history in shown.items()
        for axis in axes
        if np.isnan(history.at(axis, history.losses)).all()
    ]
