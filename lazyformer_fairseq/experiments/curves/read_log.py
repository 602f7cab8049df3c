"""What a log of fairseq-train says, line by line: where a process starts, what it resumes from, losses and speeds.

Both ``--log-format simple`` and ``json``, with the time and the logger's name before each message (as in ``train.log``
and in what was sent to a file) or without them (``--log-file``).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Optional, Union


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
