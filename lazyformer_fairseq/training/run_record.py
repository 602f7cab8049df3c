"""The record of a run: everything that determines its result (``run.json``), and its progress (``metrics.jsonl``).

Every trainer writes both files into its checkpoint folder. All code that plans, resumes, compares or reports on runs
reads these files instead of parsing logs.

``run.json`` is a :class:`RunRecord`, written before the first update and again whenever the run is resumed. Each line
of ``metrics.jsonl`` is a :class:`MetricsLine`, written once per logging interval, validation and epoch.
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
from lazyformer_fairseq.storage.json_files import cached, read_as, sha256_of, write_json
from lazyformer_fairseq.storage.run_lock import differences
from lazyformer_fairseq.training.trackers import Trackers

logger = logging.getLogger(__name__)

RUN = "run.json"
METRICS = "metrics.jsonl"
REMEDY = "remove it and restart the run to write a new one"
QUICKLY_HASHED = 64 * 2**20  # bytes; the hashes of larger files are cached
BAR_AFTER = 3.0  # seconds until a progress bar appears


@dataclass(frozen=True)
class RunRecord:
    """Everything that determines the result of a run, with all defaults filled in.

    Attributes:
        command: the words of the command line; empty for a run started from Python.
        model: the model's name, pattern, sizes and other options, under fairseq-train's names.
        parameters: the number of parameters in the model.
        task: the objective's name and options, including `data` and `seed`, and the dictionary's `vocab_size`.
        criterion: the name of the loss and its options.
        data: the SHA-256 of each data file, by path.
        optimizer: the optimizer's `name` and options.
        schedule: the schedule's `name` and options, `lr` and `max_update`.
        batch: the settings of an update: `batch_size` (sequences) or `max_tokens`, `update_freq` and `clip_norm`.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        seed: the seed for the initial weights, data order and dropout.
        processes: the number of processes that contribute to each update.
        machine: the `device`, and the number of threads or the CUDA version.
        versions: the versions of Python and of the packages that affect results.
        trainer: other settings that determine the result, under the trainer's own names.
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
    """Metrics at one point of a run.

    Attributes:
        updates: the number of updates completed so far.
        split: ``train`` or the name of the held-out split.
        seconds: the training time so far in seconds, including the time before the run was resumed.
        values: numbers by name, such as `loss`, `lr` or `tokens`; non-finite numbers are replaced with None.
        epoch: the epoch, from 1; None if the trainer does not count epochs.
    """

    updates: Count
    split: str
    seconds: Amount
    values: dict[str, Optional[float]]
    epoch: Optional[PositiveCount] = None


def write_run(folder: Path, record: RunRecord) -> None:
    """Write ``run.json``. If one exists, log the settings that have changed."""
    path = folder / RUN
    content = _as_json(record)
    if path.is_file():
        before = _as_json(read_run(folder))
        before["command"] = content["command"]
        changed = differences(_by_full_name(before), _by_full_name(content))
        if changed:
            logger.info("%s: the run continues with different settings than it started with: %s", folder, changed)
    write_json(path, content)


def _by_full_name(content: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a record, except its command, into options with names such as ``schedule.max_update``."""
    found: dict[str, Any] = {}
    for section, options in content.items():
        if isinstance(options, dict):
            found |= {f"{section}.{name}": value for name, value in options.items()}
        elif section != "command":
            found[section] = options
    return found


def _as_json(record: RunRecord) -> dict[str, Any]:
    """Convert a record to JSON types: tuples become lists, and unsupported values become strings."""
    return json.loads(json.dumps(asdict(record), default=str), parse_constant=str)


def read_run(folder: Path) -> RunRecord:
    """Read a folder's ``run.json``.

    Raises:
        UserError: the file is missing or damaged.
    """
    return read_as(RunRecord, folder / RUN, REMEDY)


def named(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model, task or criterion, renaming the checkpoint key ``_name`` to `name`."""
    options = dict(section)
    return {"name": options.pop("_name"), **options}


def describe_here(device: Any) -> dict[str, dict[str, Any]]:
    """Return the record fields `machine` and `versions` for a process that trains on this device."""
    return {"machine": describe_machine(device), "versions": describe_versions()}


def hash_data(folders: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of each regular, non-hidden file in the folders, by path.

    A progress bar appears if hashing takes more than a few seconds. The hashes of large files are cached across runs by
    path, size and modification time.
    """
    paths = []
    for folder in folders:
        for path in sorted(folder.iterdir()):
            is_hidden = path.name.startswith(".")
            if path.is_file() and not is_hidden:
                paths.append(path)
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
    return cached("data_hashes.json", "sha256", key, lambda: sha256_of(path), lambda value: isinstance(value, str))


class MetricsLog:
    """A run's ``metrics.jsonl``, which a single process appends to.

    Args:
        folder: the run's checkpoint folder.
        updates: the number of updates completed so far. Lines for later updates, which will be repeated, are removed.
        report_to: the names of experiment trackers to send every line and ``run.json`` to; ``run.json`` must exist.
    """

    def __init__(self, folder: Path, updates: int = 0, report_to: Sequence[str] = ()):
        self.path = folder / METRICS
        self.rewind(updates)
        self._trackers = Trackers(report_to, folder, updates)
        self.close = self._trackers.close

    def rewind(self, updates: int) -> None:
        """Remove all lines after update `updates`, because the run has rolled back to a checkpoint."""
        if not self.path.is_file():
            return
        lines = read_metrics(self.path.parent)
        kept = [line for line in lines if line.updates <= updates]
        with atomic_file(self.path) as file:
            for line in kept:
                file.write(_as_text(line))

    def append(self, line: MetricsLine) -> None:
        """Append a line. If it cannot be written, such as when the disk is full, log a warning and continue."""
        text = _as_text(line)
        try:
            with open(self.path, "ab", buffering=0, opener=own_file) as file:
                size = file.tell()
                if file.write(text) < len(text):
                    file.truncate(size)
        except OSError as error:
            logger.warning("%s: could not write a line (%s)", self.path, error.strerror)
        self._trackers.log(line.updates, line.split, {**line.values, "seconds": line.seconds})


def finite_values(values: Mapping[str, Any]) -> dict[str, Optional[float]]:
    """Convert numbers and one-element tensors to a line's `values`, replacing non-finite numbers with None."""
    numbers = {name: float(value) for name, value in values.items()}
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


def _as_text(line: MetricsLine) -> bytes:
    return (json.dumps(asdict(line), allow_nan=False) + "\n").encode()


def read_metrics(folder: Path, split: Optional[str] = None) -> Sequence[MetricsLine]:
    """Read a folder's ``metrics.jsonl``, ignoring an incomplete last line left by a killed run or a full disk.

    Args:
        folder: the run's checkpoint folder.
        split: the split to return lines for; None for all splits.

    Raises:
        UserError: the file is missing or one of its lines is damaged; the message includes the line number.
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
            raise UserError(f"{where}: this line is not JSON ({error}); {REMEDY}") from None
        line = as_type(MetricsLine, content, where, REMEDY)
        if split in (None, line.split):
            lines.append(line)
    return lines
