"""The history of a run, from its logs: validations against updates, tokens, hours and FLOPs, whatever was resumed.

Logs of fairseq-train are read line by line, of ``--log-format simple`` and ``json``, with the time and the logger's
name before each message (as in ``train.log`` and in what was sent to a file) or without them (``--log-file``).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import isfinite
from pathlib import Path
from typing import Optional, Union

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.costs.flops import count_flops
from lazyformer_fairseq.patterns.kinds import CausalSizes, EncoderSizes

AXES = ("updates", "tokens", "hours", "flops")
OF_TASK = {
    "full_sentences_masked_lm": "validation loss, bits a masked token",
    "stream_language_modeling": "validation loss, bits a token",
}
FORWARD_AND_BACKWARD = 3  # a backward pass is two forward passes
PHASE = re.compile(r"phase(\d+)")  # the folder of each phase of a run of several

Settings = Mapping[str, str]


@dataclass(frozen=True)
class Start:
    """A process begins to train. `sections`: its settings as text, by section of the config."""

    sections: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Loaded:
    """It goes on from a checkpoint of this update."""

    updates: int


@dataclass(frozen=True)
class Symbols:
    """The size of the dictionary, V."""

    count: int


@dataclass(frozen=True)
class Training:
    """Of the updates since the last such line: tokens an update; seconds since the process began to train; the loss.

    The summary of an epoch has no `loss` here: its mean is of all the epoch's updates.
    """

    updates: int
    tokens: Optional[float]
    seconds: Optional[float]
    loss: Optional[float] = None


@dataclass(frozen=True)
class Validation:
    """Loss of a split, as the criterion gives it: bits, in ours."""

    updates: int
    split: str
    loss: float


Event = Union[Start, Loaded, Symbols, Training, Validation]

CONFIG = "{'_name': None, 'common': {"
LOADED = re.compile(r"Loaded checkpoint .* \(epoch \d+ @ (\d+) updates\)")
SYMBOLS = re.compile(r"dictionary: (\d+) (?:symbols|types)")
INNER = re.compile(r"epoch \d+: +\d+ / \d+ (\w+=.*)")
SUMMARY = re.compile(r"epoch \d+ \| (?:valid on '(?P<split>[^']+)' subset \| )?(?P<numbers>loss .*)")
IN_JSON = re.compile(r"\{\"epoch\": .*\}\s*$")
SETTING = re.compile(r"'(\w+)': (?:'([^']*)'|([^',{}\[\]]+))")


def events(lines: Iterable[str]) -> Iterator[Event]:
    """Yields what lines of a log tell, in their order; other lines are passed over."""
    for line in lines:
        event = _event(line)
        if event is not None:
            yield event


def _event(line: str) -> Optional[Event]:
    if CONFIG in line:
        return Start(_sections(line[line.index(CONFIG) :]))
    if found := LOADED.search(line):
        return Loaded(int(found[1]))
    if found := SYMBOLS.search(line):
        return Symbols(int(found[1]))
    if found := SUMMARY.search(line):
        pairs = (word.strip().partition(" ")[::2] for word in found["numbers"].split("|"))
        return _measured(found["split"] or "train", dict(pairs))
    if found := INNER.search(line):
        return _measured("", dict(word.strip().partition("=")[::2] for word in found[1].split(",")))
    if found := IN_JSON.search(line):
        return _from_json(found[0])
    return None


def _from_json(text: str) -> Optional[Event]:
    """Names of a validation begin with its split, those of an epoch's summary with ``train_``."""
    try:
        values = json.loads(text)
    except ValueError:
        return None
    [prefix, *_] = [name.removesuffix("num_updates") for name in values if name.endswith("num_updates")] or [None]
    if prefix is None:
        return None
    split = prefix.rstrip("_")
    numbers = {name.removeprefix(prefix): str(value) for name, value in values.items() if name.startswith(prefix)}
    return _measured(split, numbers)


def _measured(split: str, numbers: Mapping[str, str]) -> Optional[Event]:
    """Of a validation split, of updates in training (""), or of an epoch's ("train")."""
    updates = _number(numbers.get("num_updates"))
    if updates is None or not isfinite(updates):
        return None
    loss = _number(numbers.get("loss"))
    if split in ("", "train"):
        tokens, seconds = _number(numbers.get("wpb")), _number(numbers.get("wall"))
        return Training(int(updates), tokens, seconds, None if split else loss)
    return None if loss is None else Validation(int(updates), split, loss)


def _number(text: Optional[str]) -> Optional[float]:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _sections(text: str) -> dict[str, dict[str, str]]:
    """The config as the log prints it: nearly, but not quite, a Python literal (values of an enum have no quotes)."""
    found = {}
    for match in re.finditer(r"'(\w+)': \{", text):
        end = _closing_brace(text, match.end())
        found.setdefault(
            match[1], {name: quoted or bare.strip() for name, quoted, bare in SETTING.findall(text[match.end() : end])}
        )
    return found


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return place
    return len(text)


@dataclass(frozen=True)
class Phase:
    """What the logs of a run tell, or those of one phase of it, whose updates count from zero.

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
    def last_update(self) -> int:
        """The last one of which the log tells anything."""
        validated = (updates for losses in self.splits.values() for updates in losses)
        return max(int(self.points[-1][0]), *validated, 0)

    def at(self, axis: str, updates: np.ndarray) -> np.ndarray:
        """As :meth:`History.at`."""
        if axis == "updates":
            return updates
        if axis == "flops":
            return self.at("tokens", updates) * (np.nan if self.flops_of_token is None else self.flops_of_token)
        return interpolate(self.points, AXES.index(axis), updates)


@dataclass(frozen=True)
class History:
    """A run: one phase, or several such as PAR BERT's of 128 and of 512 tokens, one after the other.

    Attributes:
        parts: in their order. Arch, pattern and task are those of the first.
    """

    parts: tuple[Phase, ...]

    @property
    def arch(self) -> str:
        return self.parts[0].arch

    @property
    def task(self) -> str:
        return self.parts[0].task

    @property
    def pattern(self) -> str:
        return self.parts[0].pattern

    @property
    def measure(self) -> str:
        return OF_TASK.get(self.task, "validation loss")

    @property
    def why_no_flops(self) -> str:
        return next(filter(None, (part.why_no_flops for part in self.parts)), "")

    @property
    def starts(self) -> list[int]:
        """Updates before each part."""
        return [0, *accumulate(part.last_update for part in self.parts[:-1])]

    @property
    def borders(self) -> list[int]:
        """Updates at which a phase ends and another begins."""
        return self.starts[1:]

    @property
    def last_update(self) -> int:
        return self.starts[-1] + self.parts[-1].last_update

    @property
    def losses(self) -> Mapping[int, float]:
        return self._joined(lambda part: part.losses)

    @property
    def training(self) -> Mapping[int, float]:
        return self._joined(lambda part: part.training)

    @property
    def splits(self) -> Mapping[str, Mapping[int, float]]:
        names = dict.fromkeys(name for part in self.parts for name in part.splits)
        return {name: self._joined(lambda part, name=name: part.splits.get(name, {})) for name in names}

    def _joined(self, losses_of: Callable[[Phase], Mapping[int, float]]) -> dict[int, float]:
        """Without what is measured before a later phase's first update: it would stand where the one before ends."""
        return {
            start + updates: loss
            for start, part in zip(self.starts, self.parts, strict=True)
            for updates, loss in losses_of(part).items()
            if updates or not start
        }

    def at(self, axis: str, updates: Iterable[int]) -> np.ndarray:
        """Where these updates stand on one of AXES; tokens and hours between two lines of the log in proportion.

        That is what all earlier phases took, and what the phase of an update took by then. NaN where the log does not
        tell.
        """
        wanted = np.array(list(updates), dtype=float)
        if len(self.parts) == 1:
            return self.parts[0].at(axis, wanted)
        total = np.zeros(len(wanted))
        for start, part in zip(self.starts, self.parts, strict=True):
            within = wanted - start if part is self.parts[-1] else np.minimum(wanted - start, part.last_update)
            total += np.where(within > 0, part.at(axis, np.maximum(within, 0)), 0)
        return total


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
    """Reads the logs of one run: of one phase, or of several, each in the order in which they were written.

    Raises:
        UserError: a log cannot be read.
    """
    groups = groupby(sorted(logs, key=phase_of), key=phase_of)
    return History(tuple(_read_phase(list(same)) for _, same in groups))


def phase_of(log: Path) -> int:
    """The number of the phase by the log's folder; 0 for a run of one."""
    found = PHASE.fullmatch(log.absolute().parent.name)
    return int(found[1]) if found else 0


def _read_phase(logs: Sequence[Path]) -> Phase:
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
    return Phase(
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


def flops_of_token(model: Settings, task: Settings, symbols: int) -> float:
    """Of forward and backward pass, a sequence's FLOPs shared by its tokens.

    Args:
        model, task: the sections of the config, values as text.
        symbols: of the dictionary.

    Raises:
        KeyError, ValueError: the settings are those of another package's model or task.
    """
    if "encoder_embed_dim" in model:
        length = int(task["tokens_per_sample"])
        predicted, memory = round(float(task["mask_prob"]) * length), 0
        widths = (int(model[f"encoder_{name}"]) for name in ("embed_dim", "ffn_embed_dim", "attention_heads"))
        positions, buckets = int(model["max_positions"]), int(model["relative_position_buckets"])
        sizes = EncoderSizes(symbols, *widths, positions, buckets)
    else:
        length, memory, predicted = int(task["tgt_len"]), int(model["mem_len"]), None
        widths = (int(model[f"decoder_{name}"]) for name in ("embed_dim", "ffn_embed_dim", "attention_heads"))
        cutoffs = tuple(int(cutoff) for cutoff in model["adaptive_softmax_cutoff"].split(",") if cutoff)
        sizes = CausalSizes(symbols, *widths, cutoffs, int(model["adaptive_softmax_factor"]))
    forward = count_flops(model["sublayer_pattern"], sizes, length, memory, predicted=predicted)
    return FORWARD_AND_BACKWARD * forward / length
