"""A task's folder of memory-mapped data, as ``lazyformer glue prepare`` writes it and task ``glue`` reads it.

TASK/SPLIT.bin  TASK/SPLIT.idx     inputs, in fairseq's memory-mapped format
TASK/targets.SPLIT.npy             classes (int64) or scores (float64); not for splits without labels
TASK/manifest.json                 where it comes from, and what was counted
TASK/tokenizer/                    a copy of the tokenizer
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Optional, Union

import numpy as np

from lazyformer_fairseq.data.glue.task_table import DIAGNOSTICS, TASKS, TaskDescription
from lazyformer_fairseq.data.glue.tsv import Example
from lazyformer_fairseq.data.prepared_folder import MANIFEST, PreparedFolder
from lazyformer_fairseq.data.text.interface import cut_input
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import MappedItems, check_items, type_of_ids, write_items
from lazyformer_fairseq.storage.json_files import read_json

SUBSET_SEED = 1


@dataclass(frozen=True)
class EncodedExamples:
    """Examples to train or test on: inputs, and targets (N,) where the split has labels."""

    inputs: Sequence[np.ndarray]
    targets: Optional[np.ndarray]


class MappedInputs(Sequence):
    """Inputs on disk, cut to `longest` ids when they are read.

    Attributes:
        sizes: ids of each as it is read, (N,).
    """

    def __init__(self, items: MappedItems, longest: Optional[int], eos: int):
        self._items = items
        self._longest = longest
        self._eos = eos
        self.sizes = items.sizes.astype(np.int64)
        if longest is not None:
            self.sizes = np.minimum(self.sizes, longest)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> np.ndarray:
        ids = self._items[index]
        return ids if self._longest is None else cut_input(ids, self._longest, self._eos)


class PreparedTask(PreparedFolder):
    """The folder of a task.

    Attributes:
        TABLE: the tasks that it may hold.
    """

    FORMAT, FORMAT_VERSION = "lazyformer glue task", 1
    SETTINGS = ("format_version", "task", "max_length", "tokenizer", "files")
    CONTENT, COMMAND = "a GLUE task", "lazyformer glue prepare"
    TABLE: ClassVar[Mapping[str, TaskDescription]] = TASKS

    @classmethod
    def is_whole(cls, manifest: dict[str, Any]) -> bool:
        name, splits = manifest["task"], manifest.get("splits")
        return (
            isinstance(name, str)
            and name in cls.TABLE
            and isinstance(splits, dict)
            and all(
                split in cls.TABLE[name].splits  # it becomes a file's name
                and isinstance(counts, dict)
                and all(type(counts.get(count)) is int for count in ("rows", "bytes"))
                for split, counts in splits.items()
            )
        )

    @property
    def task(self) -> TaskDescription:
        return self.TABLE[self.manifest["task"]]

    def read(self, split: str, longest: Optional[int], eos: int) -> EncodedExamples:
        """A split, still on disk.

        Args:
            longest: cut inputs to this many ids, on top of prepare's cuts.

        Raises:
            UserError: the official files had no such split, or its data is gone or damaged.
        """
        if split not in self.manifest["splits"]:
            file = self.task.splits[split].file if split in self.task.splits else f"split {split!r}"
            raise UserError(
                f"{self.folder}: {file} was not there when {self.task.name} was prepared; put it with the other "
                f"files, remove {self.folder} and run `{self.COMMAND}` again"
            )
        gone = [path for path in (self.folder / f"{split}.bin", self.folder / f"{split}.idx") if not path.is_file()]
        if gone:
            raise self._damaged(split, f"{gone[0].name} is gone")
        try:
            check_items(self.folder / split, vocab_size=None, eos=None)
            items = MappedItems(self.folder / split)
            targets = None
            if self.task.splits[split].label is not None:
                targets = np.load(self.folder / f"targets.{split}.npy", allow_pickle=False)
        except Exception as error:  # numpy may raise anything for a damaged header
            raise self._damaged(split, str(error)) from error
        rows, written = (self.manifest["splits"][split][name] for name in ("rows", "bytes"))
        found = (self.folder / f"{split}.bin").stat().st_size
        if len(items) != rows or found != written or (targets is not None and len(targets) != rows):
            raise self._damaged(split, f"not the {rows:,} rows and {written:,} bytes that {MANIFEST} names")
        return EncodedExamples(MappedInputs(items, longest, eos), targets)

    def _damaged(self, split: str, reason: str) -> UserError:
        return UserError(
            f"{self.folder / split}.*: damaged ({reason}); remove {self.folder} and run `{self.COMMAND}` again"
        )


class PreparedDiagnostic(PreparedTask):
    """The folder of a diagnostic with long inputs: made, not official, so it is never prepared from files."""

    FORMAT, FORMAT_VERSION = "lazyformer diagnostic", 1
    SETTINGS = ("format_version", "task", "settings", "tokenizer")
    CONTENT, COMMAND = "a diagnostic", "lazyformer tasks"
    TABLE = DIAGNOSTICS

    @classmethod
    def is_whole(cls, manifest: dict[str, Any]) -> bool:
        return super().is_whole(manifest) and set(manifest["splits"]) == {"train", "valid", "test"}


def load_prepared(folder: Union[str, Path]) -> PreparedTask:
    """What is prepared in a folder, a GLUE task or a diagnostic; UserError where neither is."""
    manifest = read_json(Path(folder) / MANIFEST, f"run `{PreparedTask.COMMAND}`")
    kind = PreparedDiagnostic if manifest.get("format") == PreparedDiagnostic.FORMAT else PreparedTask
    return kind.load(folder)


def write_split(folder: Path, split: str, examples: EncodedExamples, vocab_size: int) -> None:
    """Writes SPLIT.bin, .idx and, where there are targets, theirs."""
    prefix = folder / split
    ids, sizes = np.concatenate(examples.inputs), np.array([len(ids) for ids in examples.inputs])
    write_items(prefix, type_of_ids(vocab_size), [(ids, sizes)], durable=False)
    if examples.targets is not None:
        np.save(folder / f"targets.{split}.npy", examples.targets)


def targets_of(task: TaskDescription, examples: list[Example]) -> Optional[np.ndarray]:
    """Classes or scores (N,), None for a split without labels.

    Scores are float64, which fairseq leaves alone: with fp16 and bf16 it makes float32 as coarse as the weights.
    """
    if examples[0].target is None:
        return None
    return np.array([example.target for example in examples], dtype=np.float64 if task.is_regression else np.int64)


def draw_rows(examples: EncodedExamples, count: int) -> EncodedExamples:
    """`count` of the examples in their order, the same ones whatever a run's seed; all if there are no more."""
    if count >= len(examples.inputs):
        return examples
    chosen = np.sort(np.random.default_rng(SUBSET_SEED).choice(len(examples.inputs), count, replace=False))
    targets = None if examples.targets is None else examples.targets[chosen]
    return EncodedExamples([examples.inputs[index] for index in chosen], targets)
