"""The record of a run: ``run.json``, what decides its result, and ``metrics.jsonl``, how far it is.

Every trainer writes both into the folder of its checkpoints, and whatever plans, resumes, compares or reports reads
them there. Nothing reads a log.

``run.json`` is a :class:`RunRecord`, written before the first update and again whenever the run is started anew.
Each line of ``metrics.jsonl`` is a :class:`MetricsLine`: one per logging interval, validation and end of an epoch.
"""

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.atomic import atomic_file
from lazyformer_fairseq.storage.checked import Amount, Count, PositiveCount, as_type, parse_json
from lazyformer_fairseq.storage.in_place import own_file
from lazyformer_fairseq.storage.json_files import read_as, remembered, sha256_of, write_json
from lazyformer_fairseq.storage.run_lock import differences

logger = logging.getLogger(__name__)

RUN = "run.json"
METRICS = "metrics.jsonl"
REMEDY = "remove it; the run, started again, writes another"
QUICKLY_HASHED = 64 * 2**20  # bytes; hashes of larger files are remembered
BAR_AFTER = 3.0  # seconds


@dataclass(frozen=True)
class RunRecord:
    """Everything that decides the result of a run, resolved to values.

    Attributes:
        command: the words of the command line; empty for a run that a program started.
        model: the model's name, pattern, sizes and other options, by fairseq-train's names.
        parameters: the number of the model's weights.
        task: the objective's name and options, among them `data` and `seed`; and `vocab_size`, the dictionary's.
        criterion: the name of the loss and its options.
        data: the SHA-256 of each file of the data, by path.
        optimizer: `name`, and its options.
        schedule: `name`, `lr`, `max_update`, and its options.
        batch: how an update is made: `batch_size` (sequences) or `max_tokens`, `update_freq`, `clip_norm`.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        seed: the seed of weights, order and dropout.
        processes: the number of processes that share an update.
        machine: `device`, and its threads or the version of CUDA.
        versions: the versions of Python and the packages that affect results.
        trainer: other settings that decide the result, by the trainer's own names.
    """

    command: tuple[str, ...]
    model: dict[str, Any]
    parameters: PositiveCount
    task: dict[str, Any]
    criterion: dict[str, Any]
    data: dict[str, str]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    batch: dict[str, Any]
    precision: str
    seed: int
    processes: PositiveCount
    machine: dict[str, Any]
    versions: dict[str, str]
    trainer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricsLine:
    """Measurements at one moment of a run.

    Attributes:
        updates: the updates that the run has made.
        split: ``train``, or the name of the held-out split.
        seconds: seconds of training up to now, over all starts of the run.
        values: numbers by name, such as `loss`, `lr` or `tokens`; None for what is no finite number.
        epoch: the epoch, from 1; None where the trainer counts none.
    """

    updates: Count
    split: str
    seconds: Amount
    values: dict[str, Optional[float]]
    epoch: Optional[PositiveCount] = None


def write_run(folder: Path, record: RunRecord) -> None:
    """Write ``run.json``, and log with which values the run continues that differ from those it began with."""
    path = folder / RUN
    content = _as_json(record)
    if path.is_file():
        before = _as_json(read_run(folder))
        before["command"] = content["command"]
        changed = differences(_by_full_name(before), _by_full_name(content))
        if changed:
            logger.info("%s: the run continues with other values than it began with: %s", folder, changed)
    write_json(path, content)


def _by_full_name(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a record by names such as ``schedule.max_update``, without its command."""
    found: dict[str, Any] = {}
    for section, options in content.items():
        if isinstance(options, dict):
            found |= {f"{section}.{name}": value for name, value in options.items()}
        elif section != "command":
            found[section] = options
    return found


def _as_json(record: RunRecord) -> dict[str, Any]:
    """Return a record as it comes back from a file: tuples become lists, and what JSON lacks becomes a string."""
    return json.loads(json.dumps(asdict(record), default=str), parse_constant=str)


def read_run(folder: Path) -> RunRecord:
    """Read the ``run.json`` of a folder.

    Raises:
        UserError: there is none, or it is damaged.
    """
    return read_as(RunRecord, folder / RUN, REMEDY)


def named(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model, task or criterion with their ``_name``, as checkpoints call it, as `name`."""
    options = dict(section)
    return {"name": options.pop("_name"), **options}


def describe_here(device: Any) -> dict[str, dict[str, Any]]:
    """Return the fields `machine` and `versions` of a record, for a process that trains on this device."""
    return {"machine": describe_machine(device), "versions": describe_versions()}


def hash_data(folders: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of each plain file in the folders, by path; show a bar where it takes seconds.

    Hashes of large files are remembered between runs, by path, size and time of the last change.
    """
    paths = []
    for folder in folders:
        paths += [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    size = sum(path.stat().st_size for path in paths)
    hashes = {}
    with Progress(total=size, desc="hashing the data", unit="B", unit_scale=True, delay=BAR_AFTER) as progress:
        for path in paths:
            hashes[str(path)] = _hash(path)
            progress.update(path.stat().st_size)
    return hashes


def _hash(path: Path) -> str:
    status = path.stat()
    if status.st_size <= QUICKLY_HASHED:
        return sha256_of(path)
    key = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    return remembered("data_hashes.json", "sha256", key, lambda: sha256_of(path), lambda value: isinstance(value, str))


class MetricsLog:
    """The ``metrics.jsonl`` of a run, to which one process appends.

    Args:
        folder: the folder of the run's checkpoints.
        updates: the updates that the run has made; lines beyond them, of updates that are to be made again, are
            removed.
    """

    def __init__(self, folder: Path, updates: int = 0):
        self.path = folder / METRICS
        self.rewind(updates)

    def rewind(self, updates: int) -> None:
        """Remove the lines beyond a number of updates, when the run goes back to a checkpoint."""
        if not self.path.is_file():
            return
        lines = read_metrics(self.path.parent)
        kept = [line for line in lines if line.updates <= updates]
        with atomic_file(self.path) as file:
            for line in kept:
                file.write(_as_text(line))

    def append(self, line: MetricsLine) -> None:
        """Add a line; a full disk costs the line, not the run."""
        text = _as_text(line)
        try:
            with open(self.path, "ab", buffering=0, opener=own_file) as file:
                size = file.tell()
                if file.write(text) < len(text):
                    file.truncate(size)
        except OSError as error:
            logger.warning("%s: a line was not written (%s)", self.path, error.strerror)


def finite_values(values: Mapping[str, Any]) -> dict[str, Optional[float]]:
    """Return numbers, and tensors of one element, as the `values` of a line."""
    numbers = {name: float(value) for name, value in values.items()}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


def _as_text(line: MetricsLine) -> bytes:
    return (json.dumps(asdict(line), allow_nan=False) + "\n").encode()


def read_metrics(folder: Path, split: Optional[str] = None) -> Sequence[MetricsLine]:
    """Read the ``metrics.jsonl`` of a folder; a last line that a kill or a full disk cut off is left out.

    Args:
        folder: the folder of a run's checkpoints.
        split: the split whose lines to return; by default all.

    Raises:
        UserError: there is no such file, or a line of it is damaged; names the line.
    """
    path = folder / METRICS
    try:
        *texts, _ = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {REMEDY}") from None
    lines = []
    for number, text in enumerate(texts, 1):
        where = f"{path}, line {number}"
        try:
            content = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: is no JSON ({error}); {REMEDY}") from None
        line = as_type(MetricsLine, content, where, REMEDY)
        if split in (None, line.split):
            lines.append(line)
    return lines
