"""Folders of prepared fine-tuning data (GLUE tasks, custom tasks and SQuAD), identified by their manifests.

A folder of labeled texts, as read by the task ``glue``, contains:

TASK/SPLIT.bin  TASK/SPLIT.idx     inputs, in fairseq's memory-mapped format
TASK/targets.SPLIT.npy             class indices (int64) or regression targets (float64), if the split has labels
TASK/targets.SPLIT.bin  .idx       for tagged words (see TaggedWordsDataset), instead of the .npy file; a copy of the
                                   original file is kept next to them
TASK/manifest.json                 the data's source and statistics
TASK/tokenizer/                    a copy of the tokenizer
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Optional, Self, Union

import numpy as np

from lazyformer_fairseq.data.glue import PUBLISHED
from lazyformer_fairseq.data.labelled_files import Example, TaskDescription
from lazyformer_fairseq.data.text.interface import TextTokenizer, cut_input, truncation_message
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import versions
from lazyformer_fairseq.storage.arrays import map_array
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.checked import Count, PositiveCount, as_type
from lazyformer_fairseq.storage.indexed_format import MappedItems, check_items, type_of_ids, write_items
from lazyformer_fairseq.storage.json_files import read_json, refuse_other_version, write_json

MANIFEST = "manifest.json"
# Packages listed with their versions in manifests.
PACKAGES = (
    "fairseq-fixed",
    "sacremoses",
    "sentencepiece",
    "torch",
)
SUBSET_SEED = 1
SENTENCES = "sentences"  # unit of truncated inputs in tagging tasks


@dataclass(frozen=True)
class SplitFacts:
    """Properties of a training or development split that are needed to interpret scores on it.

    Attributes:
        file: name of the split's file, for messages.
        is_train: whether the split is used for training.
        rows: number of rows used.
        cut: number of rows in the whole file that exceed `longest`.
        rows_in_file: number of rows in the whole file.
        longest: maximum number of tokens per model input.
        only_label: the label that all used rows share, or the tag that all words share; None if labels differ.
        unit: name of the truncated unit, for messages.
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
        """Return the properties as a JSON object."""
        return asdict(self)

    def warnings(self, model: str = "the model") -> list[str]:
        """Return warnings that affect the interpretation of scores on the split.

        Args:
            model: name of the model that truncates the inputs, for the messages.
        """
        said = []
        if self.cut:
            said.append(
                truncation_message(
                    self.cut,
                    self.rows_in_file,
                    self.longest,
                    f"{self.unit} of {self.file}",
                    model,
                )
            )
        if self.only_label is not None:
            consequence = "scores on them are meaningless"
            if self.is_train:
                consequence = "nothing can be learned from them"
            labels = f"all {self.rows:,} rows of {self.file} have the label"
            if self.unit == SENTENCES:
                labels = f"all words of {self.file} have the tag"
            said.append(f"{labels} {self.only_label!r}, so {consequence}")
        return said


@dataclass(frozen=True)
class PreparedFolder(ABC):
    """A complete folder of prepared data in the current format.

    Attributes:
        folder: path of the folder.
        manifest: contents of the manifest, including all counts.
        FORMAT: name of the manifest's format.
        FORMAT_VERSION: version of that format.
        SETTINGS: manifest fields that determine the data.
        CONTENT: description of the folder's contents, for messages.
        COMMAND: command that writes the folder.
        CHECKED_FIELDS: dataclass of the manifest fields that are read.
    """

    folder: Path
    manifest: dict[str, Any]

    FORMAT: ClassVar[str]
    FORMAT_VERSION: ClassVar[int]
    SETTINGS: ClassVar[tuple[str, ...]]
    CONTENT: ClassVar[str]
    COMMAND: ClassVar[str]
    CHECKED_FIELDS: ClassVar[type]

    @classmethod
    def load(cls, folder: Union[str, Path]) -> Self:
        """Load a prepared folder by reading its manifest.

        Raises:
            UserError: the folder has no manifest, an unsupported format version or a damaged manifest.
        """
        folder = Path(folder)
        path = folder / MANIFEST
        manifest = read_json(path, f"run `{cls.COMMAND}`")
        if manifest.get("format") != cls.FORMAT:
            raise UserError(f"{path}: not a manifest of {cls.CONTENT}; run `{cls.COMMAND}`")
        again = f"remove {folder} and run `{cls.COMMAND}` again"
        refuse_other_version(path, manifest, cls.FORMAT_VERSION, f"; {again}")
        try:
            as_type(cls.CHECKED_FIELDS, manifest, path, "prepare the data again")
            cls.check(manifest)
        except UserError as error:
            raise UserError(f"{path}: the manifest is damaged ({error}); {again}") from None
        return cls(folder, manifest)

    @classmethod
    def check(cls, manifest: dict[str, Any]) -> None:  # noqa: ARG003  for subclasses
        """Check constraints on the manifest that the field types cannot express.

        Raises:
            UserError: a field has an invalid value.
        """
        return

    @staticmethod
    def is_at(folder: Union[str, Path]) -> bool:
        """Return True if a folder contains prepared data."""
        return (Path(folder) / MANIFEST).is_file()

    @property
    def sha256(self) -> str:
        """Hash of all settings that determine the data, such as files, tokenizer and sizes."""
        settings = json.dumps([self.manifest[name] for name in self.SETTINGS])
        return hashlib.sha256(settings.encode()).hexdigest()

    @property
    def tokenizer_folder(self) -> Path:
        """Path of the copied tokenizer."""
        return self.folder / "tokenizer"

    @property
    def longest(self) -> int:
        """Maximum number of tokens per input."""
        return self.manifest["max_length"]

    def size_of(self, split: str) -> tuple[int, int]:
        """Return a split's number of rows and the total number of tokens in their inputs."""
        counts = self.manifest["splits"][split]
        return counts["rows"], counts["kept_tokens"]

    @abstractmethod
    def count_cut(self, split: str, longest: int) -> int:
        """Return the number of rows truncated during preparation or by a model that reads `longest` tokens."""

    def facts(self, split: str, longest: int, most_rows: Optional[int] = None) -> SplitFacts:
        """Return the properties of a split that are needed to interpret scores on it.

        Args:
            split: name of the split.
            longest: maximum number of tokens per model input.
            most_rows: maximum number of rows to use; None for all.
        """
        rows, _ = self.size_of(split)
        used = min(rows, most_rows or rows)
        return SplitFacts(
            file=self.manifest["splits"][split].get("file", split),  # generated data has no file
            is_train=split == "train",
            rows=used,
            cut=self.count_cut(split, longest),
            rows_in_file=rows,
            longest=longest,
        )

    @classmethod
    def reuse(cls, folder: Path, settings: Mapping[str, Any]) -> Optional[Self]:
        """Load an existing prepared folder if its settings match; return None if it does not exist.

        Raises:
            UserError: the folder was prepared with different settings.
        """
        if not folder.exists():
            return None
        prepared = cls.load(folder)
        different = []
        for name in cls.SETTINGS:
            if prepared.manifest[name] != settings[name]:
                different.append(name.replace("_", " "))
        if different:
            raise UserError(
                f"{folder} was already prepared with different {' and '.join(different)} (see its {MANIFEST}); "
                "remove the folder, use another --output, or omit --data to use the prepared data as it is"
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
        """Write a folder atomically.

        Args:
            folder: folder to write.
            settings: values of SETTINGS.
            tokenizer: the data's tokenizer, which is copied into the folder.
            write_splits: function that writes all splits to a folder and returns the manifest entries by split.
            **facts: additional manifest fields.
        """
        with atomic_folder(folder) as unfinished:
            splits = write_splits(unfinished)
            tokenizer.save(unfinished / "tokenizer")
            manifest = {
                "format": cls.FORMAT,
                **settings,
                **facts,
                "splits": splits,
                "versions": versions(PACKAGES),
            }
            write_json(unfinished / MANIFEST, manifest, durable=False)
        return cls(folder, manifest)


@dataclass(frozen=True)
class EncodedExamples:
    """Encoded examples for training or evaluation.

    Attributes:
        inputs: token ids of each example.
        targets: see :func:`targets_of`.
        cut: number of truncated inputs.
    """

    inputs: Sequence[np.ndarray]
    targets: Optional[np.ndarray]
    cut: int = 0


class MappedInputs(Sequence[np.ndarray]):
    """Memory-mapped inputs, truncated to `longest` ids on access.

    Attributes:
        sizes: number of ids per input after truncation, (N,).
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

    def __getitem__(self, index: int) -> np.ndarray:  # type: ignore[override]  # no slices
        ids = self._items[index]
        if self._longest is None:
            return ids
        return cut_input(ids, self._longest, self._eos)


@dataclass(frozen=True)
class TaskCounts:
    """The relevant fields of a split's entry in a task manifest."""

    rows: Count
    bytes: Count
    kept_tokens: Count
    truncated: Count = 0


@dataclass(frozen=True)
class TaskManifest:
    """The relevant fields of a task manifest."""

    task: str
    max_length: PositiveCount
    tokenizer: dict[str, str]
    files: dict[str, Any]
    splits: dict[str, TaskCounts]


class PreparedTask(PreparedFolder):
    """The prepared folder of a published task.

    Attributes:
        TABLE: supported tasks by name.
    """

    FORMAT = "lazyformer glue task"
    FORMAT_VERSION = 1
    SETTINGS: ClassVar[tuple[str, ...]] = ("format_version", "task", "max_length", "tokenizer", "files")
    CONTENT = "a GLUE task"
    COMMAND = "lazyformer finetune"
    CHECKED_FIELDS: ClassVar[type] = TaskManifest
    TABLE: ClassVar[Mapping[str, TaskDescription]] = PUBLISHED

    @classmethod
    def task_from_manifest(cls, manifest: dict[str, Any]) -> TaskDescription:
        """Return the task named in a manifest; raise a UserError if there is no such task."""
        if manifest["task"] not in cls.TABLE:
            raise UserError(f"there is no task called {manifest['task'][:40]!r}")
        return cls.TABLE[manifest["task"]]

    @classmethod
    def check(cls, manifest: dict[str, Any]) -> None:
        """Check that all splits belong to the task, because their names become file names."""
        strange = set(manifest["splits"]) - set(cls.task_from_manifest(manifest).splits)
        if strange:
            raise UserError(f"the task has no split {min(strange)[:40]!r}")

    @cached_property
    def task(self) -> TaskDescription:
        """The task's description."""
        return self.task_from_manifest(self.manifest)

    def read(self, split: str, longest: Optional[int], eos: int) -> EncodedExamples:
        """Memory-map a split.

        Args:
            split: name of the split.
            longest: maximum number of ids per input, in addition to the limit used in preparation; None for no further
                truncation.
            eos: id of ``</s>``.

        Raises:
            UserError: the split did not exist when the task was prepared, or its data is missing or damaged.
        """
        if split not in self.manifest["splits"]:
            if split in self.task.splits:
                file = self.task.splits[split].file
            else:
                file = f"split {split!r}"
            raise UserError(
                f"{self.folder}: {file} did not exist when {self.task.name} was prepared; put it next to the other "
                f"files, remove {self.folder} and run `{self.COMMAND}` again"
            )

        counts = self.manifest["splits"][split]
        prefix = self.folder / split
        targets: Any = None
        try:
            check_items(prefix, vocab_size=None, eos=None)
            items = MappedItems(prefix)
            if self.task.tags_words:
                check_items(self.folder / f"targets.{split}", vocab_size=None, eos=None)
                targets = MappedItems(self.folder / f"targets.{split}")
            elif self.task.splits[split].label is not None:
                dtypes = "i"
                if self.task.is_regression:
                    dtypes = "f"
                targets = map_array(
                    self.folder / f"targets.{split}.npy",
                    "prepare the data again",
                    dtypes,
                    ndim=1 + self.task.is_multi_label,
                )

            has_rows = len(items) == counts["rows"]
            has_targets = targets is None or len(targets) == counts["rows"]
            has_bytes = (self.folder / f"{split}.bin").stat().st_size == counts["bytes"]
            if not (has_rows and has_targets and has_bytes):
                raise UserError(
                    f"it does not have the {counts['rows']:,} rows and {counts['bytes']:,} bytes listed in {MANIFEST}"
                )
        except UserError as error:
            raise UserError(
                f"{prefix}.*: the data is damaged ({error}); remove {self.folder} and run `{self.COMMAND}` again"
            ) from error

        longest_input = self.longest if longest is None else longest
        cut = self.count_cut(split, longest_input)
        return EncodedExamples(MappedInputs(items, longest, eos), targets, cut)

    def count_cut(self, split: str, longest: int) -> int:
        """Return the number of rows that are truncated for a model that reads `longest` tokens."""
        if longest >= self.longest:
            return self.manifest["splits"][split].get("truncated", 0)  # generated data is never truncated
        return int((MappedItems(self.folder / split).sizes > longest).sum())

    def count_cut_words(self, split: str, longest: int) -> int:
        """Return the number of tagged words that are truncated for a model that reads `longest` tokens."""
        sizes = np.minimum(MappedItems(self.folder / split).sizes, longest)
        targets = MappedItems(self.folder / f"targets.{split}")
        cut = 0
        for places_and_tags, size in zip(targets, sizes, strict=True):
            places = places_and_tags[::2]
            cut += int((places >= size - 1).sum())
        return cut

    def facts(self, split: str, longest: int, most_rows: Optional[int] = None) -> SplitFacts:
        """Return the properties of a split, including the label that all rows share, if any."""
        facts = super().facts(split, longest, most_rows)
        if self.task.tags_words:
            facts = replace(facts, unit=SENTENCES)
        return replace(facts, only_label=self._only_label(split, facts.rows))

    def _only_label(self, split: str, rows: int) -> Optional[str]:
        examples = self.read(split, None, 0)
        if examples.targets is None:
            return None
        if split == "train":
            examples = sample_examples(examples, rows)
        targets: Any = examples.targets
        if self.task.tags_words:
            targets = np.concatenate([places_and_tags[1::2] for places_and_tags in targets])
        if len(np.unique(targets, axis=0)) > 1:
            return None
        return self.task.word_of(targets[0])


@dataclass(frozen=True)
class CustomTaskManifest(TaskManifest):
    """The relevant fields of a custom task's manifest."""

    description: dict[str, Any]


class PreparedCustomTask(PreparedTask):
    """The prepared folder of a custom task, with the task's description in its manifest."""

    FORMAT = "lazyformer custom task"
    SETTINGS = (*PreparedTask.SETTINGS, "description")
    CONTENT = "a custom task"
    CHECKED_FIELDS = CustomTaskManifest

    @classmethod
    def task_from_manifest(cls, manifest: dict[str, Any]) -> TaskDescription:
        """Return the task described in a manifest."""
        return TaskDescription.from_json(manifest["description"], MANIFEST)


def load_prepared(folder: Union[str, Path]) -> PreparedTask:
    """Load the prepared folder of a GLUE task or a custom task.

    Raises:
        UserError: the folder contains neither.
    """
    manifest = read_json(Path(folder) / MANIFEST, f"run `{PreparedTask.COMMAND}`")
    is_custom = manifest.get("format") == PreparedCustomTask.FORMAT
    prepared_class = PreparedTask
    if is_custom:
        prepared_class = PreparedCustomTask
    return prepared_class.load(folder)


def write_split(folder: Path, split: str, examples: EncodedExamples, vocab_size: int) -> None:
    """Write a split's inputs and targets.

    Inputs are written to SPLIT.bin and SPLIT.idx. Targets, if any, are written to targets.SPLIT.npy, or to
    targets.SPLIT.bin and .idx if they are a list of arrays.
    """
    ids = np.concatenate(examples.inputs)
    sizes = np.array([len(each) for each in examples.inputs])
    write_items(folder / split, type_of_ids(vocab_size), [(ids, sizes)], durable=False)
    if isinstance(examples.targets, list):
        targets = np.concatenate(examples.targets)
        sizes = np.array([len(each) for each in examples.targets])
        write_items(folder / f"targets.{split}", np.int32, [(targets, sizes)], durable=False)
    elif examples.targets is not None:
        np.save(folder / f"targets.{split}.npy", examples.targets)


def targets_of(task: TaskDescription, examples: list[Example]) -> Optional[np.ndarray]:
    """Return a split's targets as an array, or None for a split without labels.

    The targets are class indices (N,), regression targets (N,) or, for multi-label tasks, a 0 or 1 per label (N, L).
    Regression targets are float64 because fairseq would convert float32 to the model's fp16 or bf16.
    """
    if examples[0].target is None:
        return None
    return np.array(
        [example.target for example in examples],
        dtype=np.float64 if task.is_regression else np.int64,
    )


def sample_examples(examples: EncodedExamples, count: int) -> EncodedExamples:
    """Sample at most `count` examples, preserving their order; the result does not depend on a run's seed."""
    if count >= len(examples.inputs):
        return examples
    chosen = sample_row_indices(len(examples.inputs), count)
    targets = examples.targets
    if isinstance(targets, MappedItems):
        targets = [targets[index] for index in chosen]
    elif targets is not None:
        targets = targets[chosen]
    return EncodedExamples([examples.inputs[index] for index in chosen], targets, examples.cut)


def sample_row_indices(total: int, count: int) -> np.ndarray:
    """Sample the sorted indices of at most `count` of `total` rows."""
    if count >= total:
        return np.arange(total)
    rng = np.random.default_rng(SUBSET_SEED)
    return np.sort(rng.choice(total, count, replace=False))
