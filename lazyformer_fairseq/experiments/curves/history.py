"""The history of one run: its validations against updates, tokens, hours and FLOPs, over all processes that made it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.curves.flops import flops_of_token
from lazyformer_fairseq.experiments.curves.read_log import Event, Loaded, Start, Symbols, Training, events

AXES = ("updates", "tokens", "hours", "flops")
OF_TASK = {
    "full_sentences_masked_lm": "validation loss, bits a masked token",
    "stream_language_modeling": "validation loss, bits a token",
}


@dataclass(frozen=True)
class History:
    """What the logs of a run tell.

    Attributes:
        arch: as fairseq-train was given it; empty where the log has no settings.
        task: fairseq's name.
        pattern: of the model, empty for models of others.
        splits: validation split -> updates -> loss.
        training: updates -> the mean training loss of the updates since the line before it in the log.
        points: columns updates, tokens and hours of training, increasing; the first is the start.
        flops_of_token: None where `why_no_flops` says why.
    """

    arch: str
    task: str
    pattern: str
    splits: Mapping[str, Mapping[int, float]]
    points: np.ndarray
    flops_of_token: Optional[float]
    why_no_flops: str = ""
    training: Mapping[int, float] = field(default_factory=dict)

    @property
    def losses(self) -> Mapping[int, float]:
        """Of the split ``valid``, or else the first that was validated."""
        return self.splits.get("valid") or next(iter(self.splits.values()), {})

    @property
    def measure(self) -> str:
        return OF_TASK.get(self.task, "validation loss")

    @property
    def borders(self) -> list[int]:
        """Updates at which a phase ends and another begins: none, see `phases`."""
        return []

    @property
    def last_update(self) -> int:
        """The last one of which the log tells anything."""
        validated = (updates for losses in self.splits.values() for updates in losses)
        return max(int(self.points[-1][0]), *validated, 0)

    def at(self, axis: str, updates: Iterable[int]) -> np.ndarray:
        """Where these updates stand on one of AXES; tokens and hours between two lines of the log in proportion.

        NaN where the log does not tell.
        """
        wanted = np.array(list(updates), dtype=float)
        if axis == "updates":
            return wanted
        if axis == "flops":
            return self.at("tokens", wanted) * (np.nan if self.flops_of_token is None else self.flops_of_token)
        return interpolate(self.points, AXES.index(axis), wanted)


def interpolate(points: np.ndarray, column: int, updates: np.ndarray) -> np.ndarray:
    """A column of `points` at `updates`; beyond the last point it grows as between the last two."""
    known = points[~np.isnan(points[:, column])]
    if len(known) < 2:
        return np.full(len(updates), np.nan)
    (before, last) = known[-2], known[-1]
    slope = (last[column] - before[column]) / (last[0] - before[0])
    beyond = np.maximum(updates - last[0], 0) * slope
    return np.interp(updates, known[:, 0], known[:, column]) + beyond


@dataclass
class _Reader:
    """Replays a run: where a process goes back to an update, what came after it is undone."""

    points: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0, 0.0]])
    splits: dict[str, dict[int, float]] = field(default_factory=dict)
    training: dict[int, float] = field(default_factory=dict)
    sections: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    symbols: Optional[int] = None
    base_hours: float = 0.0  # at which the process under way began
    begins: bool = True  # it has not told an update yet

    def hear(self, event: Event) -> None:
        if isinstance(event, Start):
            self.sections, self.begins = event.sections, True
        elif isinstance(event, Symbols):
            self.symbols = event.count
        elif isinstance(event, Loaded):
            self._resume(event.updates)
        elif isinstance(event, Training):
            self._train(event)
        else:
            self.splits.setdefault(event.split, {})[event.updates] = event.loss

    def _resume(self, updates: int) -> None:
        """Hours that a killed process lost count for nothing: the clock goes on from the checkpoint's."""
        known, here = np.array(self.points), np.array([float(updates)])
        point = [float(updates), *(float(interpolate(known, column, here)[0]) for column in (1, 2))]
        self._forget(updates)
        if updates:
            self.points.append(point)
        self.base_hours, self.begins = self.points[-1][2], False

    def _train(self, event: Training) -> None:
        self._forget(event.updates)
        updates, tokens, hours = self.points[-1]
        if self.begins:  # no checkpoint was named: from the start, or the log has no such lines (--log-file)
            self.base_hours, self.begins = hours, False
        tokens += (event.updates - updates) * (np.nan if event.tokens is None else event.tokens)
        hours = np.nan if event.seconds is None else self.base_hours + event.seconds / 3600
        self.points.append([float(event.updates), tokens, hours])
        if event.loss is not None:
            self.training[event.updates] = event.loss

    def _forget(self, updates: int) -> None:
        """The points from `updates` on, and the losses after it."""
        while len(self.points) > 1 and self.points[-1][0] >= updates:
            self.points.pop()
        for losses in (self.training, *self.splits.values()):
            for later in [made for made in losses if made > updates]:
                del losses[later]


def read_history(logs: Sequence[Path]) -> History:
    """Reads the logs of one run, in the order in which they were written.

    Raises:
        UserError: a log cannot be read.
    """
    reader = _Reader()
    for path in logs:
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                for event in events(file):
                    reader.hear(event)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    model, task = (reader.sections.get(name, {}) for name in ("model", "task"))
    per_token, why = _flops(model, task, reader.symbols)
    return History(
        model.get("_name", ""),
        task.get("_name", ""),
        model.get("sublayer_pattern", ""),
        {split: losses for split, losses in reader.splits.items() if losses},
        np.array(reader.points),
        per_token,
        why,
        reader.training,
    )


def _flops(model: Mapping[str, str], task: Mapping[str, str], symbols: Optional[int]) -> tuple[Optional[float], str]:
    if task.get("_name") not in OF_TASK:
        return None, f"no formula for --task {task.get('_name') or '(the log has no settings)'}"
    if symbols is None:
        return None, "the log does not tell the size of the dictionary"
    try:
        return flops_of_token(model, task, symbols), ""
    except (KeyError, ValueError) as error:
        return None, f"the log's settings are of another kind of model ({error!r})"
