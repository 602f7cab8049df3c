"""Folders of prepared data, by their manifest: of GLUE's tasks, of a user's own, of diagnostics, of SQuAD.

A folder of labelled texts, which task ``glue`` reads:

TASK/SPLIT.bin  TASK/SPLIT.idx     inputs, in fairseq's memory-mapped format
TASK/targets.SPLIT.npy             classes (int64) or scores (float64); not for splits without labels
TASK/manifest.json                 where it comes from, and what was counted
TASK/tokenizer/                    a copy of the tokenizer
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Optional, Self, Union

import numpy as np

from lazyformer_fairseq.data.glue import DIAGNOSTICS, TASKS
from lazyformer_fairseq.data.labelled_files import Example, TaskDescription
from lazyformer_fairseq.data.text.interface import TextTokenizer, cut_input, told_cut
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import versions
from lazyformer_fairseq.storage.arrays import map_array
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.checked import Count, PositiveCount, as_kind
from lazyformer_fairseq.storage.indexed_format import MappedItems, check_items, type_of_ids, write_items
from lazyformer_fairseq.storage.json_files import read_json, refuse_other_version, write_json

MANIFEST = "manifest.json"
PACKAGES = ("fairseq-fixed", "sacremoses", "sentencepiece", "torch")  # whose versions a manifest names


@dataclass(frozen=True)
class SplitFacts:
    """Facts on a training or development split without which its scores mislead.

    Attributes:
        file: its name in messages.
        rows: that are used.
        cut: rows of the whole file that are longer than `longest`.
        rows_in_file: of which `cut` are.
        longest: tokens of an input that the model reads.
        only_label: the label of all rows that are used, where they have one alone; else None.
        unit: rows are called, or what else is cut.
    """

    file: str
    is_train: bool
    rows: int
    cut: int
    rows_in_file: int
    longest: int
    only_label: Optional[str] = None
    unit: str = "rows"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def warnings(self, model: str = "the model") -> list[str]:
        """Return a sentence on each fact that the reader of a score must know.

        Args:
            model: whose inputs are cut, in words.
        """
        said = []
        if self.cut:
            said.append(told_cut(self.cut, self.rows_in_file, self.longest, f"{self.unit} of {self.file}", model))
        if self.only_label is not None:
            consequence = "nothing can be learnt from them" if self.is_train else "scores on them say nothing"
            said.append(f"all {self.rows:,} rows of {self.file} have the label {self.only_label!r}, so {consequence}")
        return said


@dataclass(frozen=True)
class Sizes:
    """Fields of manifests that others than the classes below read, of the right type where they are there."""

    max_length: PositiveCount = 1
    files: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedFolder(ABC):
    """A folder, whole and of this version. `manifest` is what prepare wrote; it holds all counts.

    Attributes:
        FORMAT, FORMAT_VERSION: the manifest's.
        SETTINGS: the fields of a manifest that decide the data.
        CONTENT: what the folder holds, in messages.
        COMMAND: what writes it.
    """

    folder: Path
    manifest: dict[str, Any]

    FORMAT: ClassVar[str]
    FORMAT_VERSION: ClassVar[int]
    SETTINGS: ClassVar[tuple[str, ...]]
    CONTENT: ClassVar[str]
    COMMAND: ClassVar[str]

    @classmethod
    def load(cls, folder: Union[str, Path]) -> Self:
        """Raises a UserError where prepare did not write the folder, or wrote it in another version."""
        folder = Path(folder)
        path = folder / MANIFEST
        manifest = read_json(path, f"run `{cls.COMMAND}`")
        if manifest.get("format") != cls.FORMAT:
            raise UserError(f"{path}: is not the manifest of {cls.CONTENT}; run `{cls.COMMAND}`")
        again = f"; remove {folder} and run `{cls.COMMAND}` again"
        refuse_other_version(path, manifest, cls.FORMAT_VERSION, again)
        try:
            as_kind(Sizes, manifest, path, "prepare the data again")
            is_whole = all(name in manifest for name in cls.SETTINGS) and cls.is_whole(manifest)
        except UserError as error:
            raise UserError(f"{path}: damaged ({error}){again}") from None
        if not is_whole:
            raise UserError(f"{path}: damaged{again}")
        return cls(folder, manifest)

    @staticmethod
    @abstractmethod
    def is_whole(manifest: dict[str, Any]) -> bool:
        """Whether a manifest that has all SETTINGS has every other field that is read."""

    @staticmethod
    def has_splits(manifest: dict[str, Any], known: Collection[str], counts: Collection[str]) -> bool:
        """Whether a manifest's splits are among the known ones, as they become files' names, and have these counts."""
        kind = make_dataclass("Counts", [(name, Count) for name in counts])
        splits = as_kind(dict[str, kind], manifest.get("splits"), MANIFEST, "prepare the data again")
        return set(splits) <= set(known)

    @staticmethod
    def is_at(folder: Union[str, Path]) -> bool:
        return (Path(folder) / MANIFEST).is_file()

    @property
    def sha256(self) -> str:
        """Hash of what decides the data: files, tokenizer, sizes."""
        return hashlib.sha256(json.dumps([self.manifest[name] for name in self.SETTINGS]).encode()).hexdigest()

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def longest(self) -> int:
        """Tokens of the longest input that there may be."""
        return self.manifest["max_length"]

    def size_of(self, split: str) -> tuple[int, int]:
        """Rows of a split, and tokens of their inputs."""
        counts = self.manifest["splits"][split]
        return counts["rows"], counts["kept_tokens"]

    @abstractmethod
    def count_cut(self, split: str, longest: int) -> int:
        """Return how many rows of a split are cut for a model that reads `longest` tokens, by prepare's cuts too."""

    def facts(self, split: str, longest: int, most_rows: Optional[int] = None) -> SplitFacts:
        """Return what the reader of a score must know of a split.

        Args:
            longest: tokens of an input that the model reads.
            most_rows: of the training split; None for all.
        """
        rows, _ = self.size_of(split)
        used = min(rows, most_rows or rows)
        cut = self.count_cut(split, longest)
        label = self.only_label(split, used)
        file = self.manifest["splits"][split].get("file", split)  # made data has no file
        return SplitFacts(file, split == "train", used, cut, rows, longest, label)

    def only_label(self, split: str, rows: int) -> Optional[str]:
        """Return the label of so many rows of a split, where all have the same; else None."""
        return None

    @classmethod
    def reuse(cls, folder: Path, settings: Mapping[str, Any]) -> Optional[Self]:
        """What was prepared there of the same settings; None where there is no folder; UserError for other settings."""
        if not folder.exists():
            return None
        prepared = cls.load(folder)
        different = [name.replace("_", " ") for name in cls.SETTINGS if prepared.manifest[name] != settings[name]]
        if different:
            raise UserError(
                f"{folder}: was prepared before with other {' and '.join(different)} (see {MANIFEST} there); "
                "remove it, give another --output, or use it as it is by leaving out --data"
            )
        return prepared

    @classmethod
    def write(
        cls,
        folder: Path,
        settings: Mapping[str, Any],
        tokenizer: TextTokenizer,
        write_splits: Callable[[Path], dict[str, Any]],
        **facts: Any,
    ) -> Self:
        """Writes a folder, whole or not at all.

        Args:
            settings: the values of SETTINGS.
            write_splits: writes the data of all splits into a folder; returns each one's entry in the manifest.
            facts: further fields of the manifest.
        """
        with atomic_folder(folder) as unfinished:
            splits = write_splits(unfinished)
            tokenizer.save(unfinished / "tokenizer")
            manifest = {"format": cls.FORMAT, **settings, **facts, "splits": splits, "versions": versions(PACKAGES)}
            write_json(unfinished / MANIFEST, manifest, durable=False)
        return cls(folder, manifest)


SUBSET_SEED = 1


@dataclass(frozen=True)
class EncodedExamples:
    """Examples to train or test on: inputs, targets (N,) where the split has labels, and how many inputs were cut."""

    inputs: Sequence[np.ndarray]
    targets: Optional[np.ndarray]
    cut: int = 0


class MappedInputs(Sequence):
    """Inputs on disk, cut to `longest` ids when they are read.

    Attributes:
        sizes: ids of each as it is read, (N,).
    """

    def __init__(self, items: MappedItems, longest: Optional[int], eos: int):
        self._items, self._longest, self._eos = items, longest, eos
        sizes = items.sizes.astype(np.int64)
        self.sizes = sizes if longest is None else np.minimum(sizes, longest)

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
    CONTENT, COMMAND = "a GLUE task", "lazyformer finetune"
    COUNTS: ClassVar[tuple[str, ...]] = ("rows", "bytes", "kept_tokens")
    TABLE: ClassVar[Mapping[str, TaskDescription]] = TASKS

    @classmethod
    def row_of(cls, manifest: dict[str, Any]) -> Optional[TaskDescription]:
        """The task that a manifest names, None for one that is not known."""
        name = manifest["task"]
        return cls.TABLE.get(name) if isinstance(name, str) else None

    @classmethod
    def is_whole(cls, manifest: dict[str, Any]) -> bool:
        task = cls.row_of(manifest)
        return task is not None and cls.has_splits(manifest, task.splits, cls.COUNTS)

    @cached_property
    def task(self) -> TaskDescription:
        return self.row_of(self.manifest)

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
        rows, written = (self.manifest["splits"][split][name] for name in ("rows", "bytes"))
        try:
            if gone := [end for end in ("bin", "idx") if not (self.folder / f"{split}.{end}").is_file()]:
                raise FileNotFoundError(f"{split}.{gone[0]} is gone")
            check_items(self.folder / split, vocab_size=None, eos=None)
            items = MappedItems(self.folder / split)
            is_labelled = self.task.splits[split].label is not None
            kinds = "f" if self.task.is_regression else "i"
            path = self.folder / f"targets.{split}.npy"
            targets = map_array(path, "prepare them again", kinds, ndim=1) if is_labelled else None
            found = (self.folder / f"{split}.bin").stat().st_size
            if len(items) != rows or found != written or (targets is not None and len(targets) != rows):
                raise ValueError(f"not the {rows:,} rows and {written:,} bytes that {MANIFEST} names")
        except Exception as error:  # numpy may raise anything for a damaged header
            raise UserError(
                f"{self.folder / split}.*: damaged ({error}); remove {self.folder} and run `{self.COMMAND}` again"
            ) from error
        cut = self.count_cut(split, self.longest if longest is None else longest)
        return EncodedExamples(MappedInputs(items, longest, eos), targets, cut)

    def count_cut(self, split: str, longest: int) -> int:
        if longest >= self.longest:
            return self.manifest["splits"][split].get("truncated", 0)  # nothing is cut where data is made
        return int((MappedItems(self.folder / split).sizes > longest).sum())

    def only_label(self, split: str, rows: int) -> Optional[str]:
        targets = self.read(split, None, 0).targets
        if targets is None:
            return None
        if split == "train":
            targets = targets[drawn_rows(len(targets), rows)]
        if len(np.unique(targets)) > 1:
            return None
        return f"{targets[0]:g}" if self.task.is_regression else self.task.labels[int(targets[0])]


class PreparedCustomTask(PreparedTask):
    """The folder of a user's own task, whose row its manifest holds."""

    FORMAT, FORMAT_VERSION = "lazyformer custom task", 1
    SETTINGS = (*PreparedTask.SETTINGS, "description")
    CONTENT = "a task of one's own"

    @classmethod
    def row_of(cls, manifest: dict[str, Any]) -> TaskDescription:
        return TaskDescription.from_json(manifest["description"], MANIFEST)


class PreparedDiagnostic(PreparedTask):
    """The folder of a diagnostic with long inputs: made, not official, so it is never prepared from files."""

    FORMAT, FORMAT_VERSION = "lazyformer diagnostic", 1
    SETTINGS = ("format_version", "task", "settings", "tokenizer")
    CONTENT, COMMAND = "a diagnostic", "lazyformer diagnostics"
    COUNTS = ("rows", "bytes", "tokens", "longest")
    TABLE = DIAGNOSTICS

    @classmethod
    def is_whole(cls, manifest: dict[str, Any]) -> bool:
        return super().is_whole(manifest) and set(manifest["splits"]) == {"train", "valid", "test"}

    @property
    def longest(self) -> int:
        return max(counts["longest"] for counts in self.manifest["splits"].values())

    def size_of(self, split: str) -> tuple[int, int]:
        counts = self.manifest["splits"][split]
        return counts["rows"], counts["tokens"]


def load_prepared(folder: Union[str, Path]) -> PreparedTask:
    """What is prepared in a folder: a GLUE task, a user's own or a diagnostic; UserError where none is."""
    manifest = read_json(Path(folder) / MANIFEST, f"run `{PreparedTask.COMMAND}`")
    kinds = {kind.FORMAT: kind for kind in (PreparedCustomTask, PreparedDiagnostic)}
    return kinds.get(manifest.get("format"), PreparedTask).load(folder)


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
    chosen = drawn_rows(len(examples.inputs), count)
    targets = None if examples.targets is None else examples.targets[chosen]
    return EncodedExamples([examples.inputs[index] for index in chosen], targets, examples.cut)


def drawn_rows(total: int, count: int) -> np.ndarray:
    """Return the places of `count` of `total` rows, in their order; of all rows where there are no more."""
    if count >= total:
        return np.arange(total)
    return np.sort(np.random.default_rng(SUBSET_SEED).choice(total, count, replace=False))
