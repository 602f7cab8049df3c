"""The history of a run, from its logs: validations against updates, tokens, hours and FLOPs, whatever was resumed.

Logs of fairseq-train are read line by line, of ``--log-format simple`` and ``json``, with the time and the logger's
name before each message (as in ``train.log`` and in what was sent to a file) or without them (``--log-file``).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import isfinite, nan
from pathlib import Path
from typing import Optional

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
CONFIG = "{'_name': None, 'common': {"
SECTION = re.compile(r"'(\w+)': \{([^{}]*)")
SETTING = re.compile(r"'(\w+)': (?:'([^']*)'|([^',{}\[\]]+))")
LOADED = re.compile(r"Loaded checkpoint .* \(epoch \d+ @ (\d+) updates\)")
SYMBOLS = re.compile(r"dictionary: (\d+) (?:symbols|types)")
# Numbers within an epoch, at the end of one or of a validation, and either in JSON.
INNER = re.compile(r"epoch \d+: +\d+ / \d+ (\w+=.*)")
SUMMARY = re.compile(r"epoch \d+ \| (?:valid on '([^']+)' subset \| )?(loss .*)")
IN_JSON = re.compile(r"\{\"epoch\": .*\}\s*$")
SPLIT = re.compile(
    r"(?:(.+)_)?num_updates"
)  # in JSON a name begins with the split, or in an epoch's summary with train

Settings = Mapping[str, str]


@dataclass
class Phase:
    """What the logs of a run tell, or those of one phase of it, whose updates count from zero.

    It replays them: where a process goes back to an update, what came after it is undone.

    Attributes:
        model, task: sections of the settings, values as text; empty where the log has none.
        symbols: of the dictionary.
        splits: validation split -> updates -> loss, as the criterion gives it: bits, in ours.
        training: updates -> the mean training loss of the updates since the line before it in the log.
        points: rows of updates, tokens and hours of training, increasing; the first is the start.
    """

    model: Settings = field(default_factory=dict)
    task: Settings = field(default_factory=dict)
    symbols: Optional[int] = None
    splits: dict[str, dict[int, float]] = field(default_factory=dict)
    training: dict[int, float] = field(default_factory=dict)
    points: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0, 0.0]])
    flops_of_token: Optional[float] = None
    why_no_flops: str = ""
    _base_hours: float = 0.0  # at which the process under way began
    _begins: bool = True  # it has not told an update yet

    @property
    def losses(self) -> Mapping[int, float]:
        """Of the split ``valid``, or else the first that was validated."""
        found = {split: losses for split, losses in self.splits.items() if losses}
        return found.get("valid") or next(iter(found.values()), {})

    @property
    def last_update(self) -> int:
        """The last one of which the log tells anything."""
        return max(int(self.points[-1][0]), *(updates for losses in self.splits.values() for updates in losses), 0)

    def at(self, axis: str, updates: np.ndarray) -> np.ndarray:
        """As :meth:`History.at`."""
        if axis == "updates":
            return updates
        if axis == "flops":
            return self.at("tokens", updates) * (np.nan if self.flops_of_token is None else self.flops_of_token)
        return interpolate(np.array(self.points), AXES.index(axis), updates)

    def hear(self, line: str) -> None:
        """A line of the log, in its order; one that tells nothing is passed over."""
        if CONFIG in line:  # a process begins
            sections: dict[str, Settings] = {}
            for name, settings in SECTION.findall(line[line.index(CONFIG) :]):
                found = {key: quoted or bare.strip() for key, quoted, bare in SETTING.findall(settings)}
                sections.setdefault(name, found)
            self.model, self.task, self._begins = sections.get("model", {}), sections.get("task", {}), True
        elif match := LOADED.search(line):
            self._resume(int(match[1]))
        elif match := SYMBOLS.search(line):
            self.symbols = int(match[1])
        elif match := SUMMARY.search(line):
            pairs = (word.strip().partition(" ")[::2] for word in match[2].split("|"))
            self._measured(match[1] or "train", dict(pairs))
        elif match := INNER.search(line):
            self._measured("", dict(word.strip().partition("=")[::2] for word in match[1].split(",")))
        elif match := IN_JSON.search(line):
            with suppress(ValueError):
                values = json.loads(match[0])
                for name in filter(SPLIT.fullmatch, list(values)):
                    prefix = name.removesuffix("num_updates")
                    self._measured(prefix[:-1], {key.removeprefix(prefix): value for key, value in values.items()})

    def _measured(self, split: str, numbers: Mapping[str, object]) -> None:
        """Of a validation split, of updates in training (""), or of an epoch's ("train"), whose loss is of them all."""
        updates, loss = _number(numbers.get("num_updates")), _number(numbers.get("loss"))
        if not isfinite(updates):
            return
        if split in ("", "train"):
            self._train(int(updates), _number(numbers.get("wpb")), _number(numbers.get("wall")))
            if not split and "loss" in numbers:
                self.training[int(updates)] = loss
        elif "loss" in numbers:
            self.splits.setdefault(split, {})[int(updates)] = loss

    def _resume(self, updates: int) -> None:
        """Hours that a killed process lost count for nothing: the clock goes on from the checkpoint's."""
        known, here = np.array(self.points), np.array([float(updates)])
        point = [float(updates), *(float(interpolate(known, column, here)[0]) for column in (1, 2))]
        self._forget(updates)
        if updates:
            self.points.append(point)
        self._base_hours, self._begins = self.points[-1][2], False

    def _train(self, updates: int, tokens: float, seconds: float) -> None:
        """`tokens` an update since the last such line; `seconds` since the process began to train."""
        self._forget(updates)
        before, tokens_before, hours = self.points[-1]
        if self._begins:  # no checkpoint was named: from the start, or the log has no such lines (--log-file)
            self._base_hours, self._begins = hours, False
        tokens_now = tokens_before + (updates - before) * tokens
        self.points.append([float(updates), tokens_now, self._base_hours + seconds / 3600])

    def _forget(self, updates: int) -> None:
        """The points from `updates` on, and the losses after it."""
        while len(self.points) > 1 and self.points[-1][0] >= updates:
            self.points.pop()
        for losses in (self.training, *self.splits.values()):
            for later in [made for made in losses if made > updates]:
                del losses[later]

    def count(self) -> None:
        """Finds the FLOPs of a token, or why they cannot be told."""
        if self.task.get("_name") not in OF_TASK:
            self.why_no_flops = f"no formula for --task {self.task.get('_name') or '(the log has no settings)'}"
        elif self.symbols is None:
            self.why_no_flops = "the log does not tell the size of the dictionary"
        else:
            try:
                self.flops_of_token = flops_of_token(self.model, self.task, self.symbols)
            except (KeyError, ValueError) as error:
                self.why_no_flops = f"the log's settings are of another kind of model ({error!r})"


def _number(value: object) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return nan


@dataclass(frozen=True)
class History:
    """A run: one phase, or several such as PAR BERT's of 128 and of 512 tokens, one after the other.

    Attributes:
        parts: in their order. Arch, pattern and task are those of the first.
    """

    parts: tuple[Phase, ...]

    @property
    def arch(self) -> str:
        return self.parts[0].model.get("_name", "")

    @property
    def task(self) -> str:
        return self.parts[0].task.get("_name", "")

    @property
    def pattern(self) -> str:
        return self.parts[0].model.get("sublayer_pattern", "")

    @property
    def measure(self) -> str:
        return OF_TASK.get(self.task, "validation loss")

    @property
    def why_no_flops(self) -> str:
        return next(filter(None, (part.why_no_flops for part in self.parts)), "")

    @property
    def starts(self) -> list[int]:
        """Updates before each part; but for the first, a border at which a phase ends and another begins."""
        return [0, *accumulate(part.last_update for part in self.parts[:-1])]

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


def read_history(logs: Sequence[Path]) -> History:
    """Reads the logs of one run: of one phase, or of several, each in the order in which they were written.

    Raises:
        UserError: a log cannot be read.
    """

    def phase_of(log: Path) -> int:
        found = PHASE.fullmatch(log.absolute().parent.name)
        return int(found[1]) if found else 0

    parts = []
    for _, same in groupby(sorted(logs, key=phase_of), key=phase_of):
        parts.append(Phase())
        for path in same:
            try:
                with path.open(encoding="utf-8", errors="replace") as file:
                    for line in file:
                        parts[-1].hear(line)
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        parts[-1].count()
    return History(tuple(parts))


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
