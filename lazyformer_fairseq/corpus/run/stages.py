"""The stages of ``lazyformer corpus``: for each, its tasks and the steps that a task goes through.

cut         big compressed files into parts (a task a file)
words       units of input -> stored words (a task a unit)
duplicates  which documents of which unit to drop (one task)
count       words of the training documents (a task a unit)
tokenizer   merged counts -> low-frequency filter -> BPE (one task)
ids         stored words -> ids of pieces (a task a unit)
shards      parts of units -> shards (a task a shard)
"""

import resource
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from lazyformer_fairseq.corpus.cleaning.clean_text import CleanText
from lazyformer_fairseq.corpus.cleaning.duplicates import KEEP, REASONS, find_duplicates
from lazyformer_fairseq.corpus.cleaning.fingerprint import Fingerprint
from lazyformer_fairseq.corpus.cleaning.held_out import is_held_out
from lazyformer_fairseq.corpus.cleaning.wiki_markup import ExtractWikiMarkup
from lazyformer_fairseq.corpus.readers.blocks import Piece
from lazyformer_fairseq.corpus.readers.inputs import InputFile, find_inputs
from lazyformer_fairseq.corpus.readers.read_documents import ReadDocuments
from lazyformer_fairseq.corpus.readers.units import bytes_of, cut_file
from lazyformer_fairseq.corpus.run.progress import TaskProgress
from lazyformer_fairseq.corpus.run.work_folder import RESULT
from lazyformer_fairseq.corpus.sentences.split import SplitSentences
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.step import CorpusStep, TaskNotes
from lazyformer_fairseq.corpus.words.normalise import NormaliseWords
from lazyformer_fairseq.corpus.words.piece_ids import write_ids
from lazyformer_fairseq.corpus.words.store_words import StoreWords
from lazyformer_fairseq.corpus.words.vocabulary import FrequencyFilter, count_words, merge_counts
from lazyformer_fairseq.corpus.words.word_store import WordStore
from lazyformer_fairseq.data.text.tokenizer import DICTIONARY_FILE, Tokenizer
from lazyformer_fairseq.files.indexed_format import join_parts
from lazyformer_fairseq.files.json_files import write_json
from lazyformer_fairseq.files.whole import whole_file


@dataclass(frozen=True)
class WorkPaths:
    """Where the stages keep their files; ``rank`` is a unit's number."""

    root: Path

    @property
    def tasks(self) -> Path:
        """datatrove's files of the tasks, a folder for each stage."""
        return self.root / "tasks"

    def stage(self, name: str) -> Path:
        return self.tasks / name

    def cut(self, number: int) -> Path:
        return self.root / "cut" / f"{number:05d}"

    @property
    def words(self) -> Path:
        return self.root / "words"

    def store(self, rank: int) -> Path:
        return self.words / f"{rank:05d}"

    def duplicates(self, rank: int) -> Path:
        return self.root / "duplicates" / f"{rank:05d}.npy"

    def counts(self, rank: int) -> Path:
        return self.root / "counts" / f"{rank:05d}"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def kept_words(self) -> Path:
        return self.root / "kept_words.npy"

    @property
    def vocabulary(self) -> Path:
        return self.root / "vocabulary.json"

    def ids(self, rank: int, split: str) -> Path:
        return self.root / "ids" / f"{rank:05d}.{split}"

    @property
    def result(self) -> Path:
        return self.root / RESULT


@dataclass(frozen=True)
class Stage:
    """A stage: ``sizes`` has one entry per task, in bytes of input, or 1 each where there is no such size."""

    name: str
    sizes: Sequence[int]
    pipeline: list[PipelineStep]


def cut_stage(paths: WorkPaths, files: Sequence[InputFile], part_bytes: int, settings: CorpusSettings) -> Stage:
    """Cuts compressed files that cannot be read in pieces."""
    step = CutFiles(paths, files, part_bytes, settings.bad_files, TaskProgress(paths.stage("cut") / "progress"))
    return Stage("cut", [file.size for file in files], [step, TaskMeter()])


def later_stages(paths: WorkPaths, units: list[tuple[Piece, ...]], settings: CorpusSettings, shards: int):
    """All stages after the cutting, in order."""
    notes = TaskNotes()
    words: list[PipelineStep] = [
        ReadDocuments(units, settings.bad_files, TaskProgress(paths.stage("words") / "progress"), notes),
        ExtractWikiMarkup(notes=notes),
        CleanText(notes=notes),
        Fingerprint(settings.near_duplicates, notes=notes),
        SplitSentences(settings.spacy_model, settings.min_words, notes=notes),
        NormaliseWords(settings.text, notes=notes),
        StoreWords(paths.words, notes=notes),
    ]
    count = len(units)
    yield Stage("words", [bytes_of(unit) for unit in units], [*words, TaskMeter()])
    yield Stage("duplicates", [1], [MarkDuplicates(paths, count, settings), TaskMeter()])
    yield Stage("count", [1] * count, [CountWords(paths, settings), TaskMeter()])
    yield Stage("tokenizer", [1], [TrainTokenizer(paths, count, settings), TaskMeter()])
    yield Stage("ids", [1] * count, [WriteIds(paths, settings), TaskMeter()])
    yield Stage("shards", [1] * shards, [JoinShards(paths, count), TaskMeter()])


def clean_documents(inputs: Sequence[str]) -> Iterator[Document]:
    """The documents of ``inputs`` as the first steps leave them: clean paragraphs, one a line, and a fingerprint."""
    units = [tuple(Piece(file.path, file.format, 0, None) for file in find_inputs(inputs))]
    documents = ReadDocuments(units).run()
    for step in (ExtractWikiMarkup(), CleanText(), Fingerprint()):
        documents = step.run(documents)
    return documents


class TaskMeter(PipelineStep):
    """Ends a task: pulls all documents through the steps before it, and notes the task's cost."""

    type, name = "corpus", "task"

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        began = time.process_time()
        deque(data, maxlen=0)
        self.stat_update("core seconds", value=time.process_time() - began)
        in_bytes = 1 if sys.platform == "darwin" else 1024
        self.stat_update("peak memory", value=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * in_bytes)
        yield from ()


class StageStep(CorpusStep, ABC):
    """A step that takes no documents: it reads the previous stage's files."""

    def __init__(self, paths: WorkPaths):
        super().__init__()
        self.paths = paths

    @abstractmethod
    def work(self, rank: int, world_size: int) -> None:
        """Does the task; writes its files whole or not at all."""

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        with self.track_core_time():
            self.work(rank, world_size)
        yield from ()


class CutFiles(StageStep):
    """Cuts file ``rank`` into parts."""

    name = "cut"

    def __init__(
        self, paths: WorkPaths, files: Sequence[InputFile], part_bytes: int, bad_files: str, progress: TaskProgress
    ):
        super().__init__(paths)
        self.files, self.part_bytes, self.bad_files, self.progress = files, part_bytes, bad_files, progress

    def work(self, rank: int, world_size: int) -> None:
        cut_file(self.files[rank], self.paths.cut(rank), self.part_bytes, self.bad_files, partial(self.progress, rank))


class MarkDuplicates(StageStep):
    """Decides for every unit which of its documents to drop, and why."""

    name = "duplicates"

    def __init__(self, paths: WorkPaths, units: int, settings: CorpusSettings):
        super().__init__(paths)
        self.units, self.settings = units, settings

    def work(self, rank: int, world_size: int) -> None:
        stores = [WordStore.open(self.paths.store(unit)) for unit in range(self.units)]
        marks = find_duplicates([store.fingerprints for store in stores], [store.bands for store in stores])
        for unit, (store, mark) in enumerate(zip(stores, marks, strict=True)):
            save_array(self.paths.duplicates(unit), mark)
            held_out = is_held_out(store.fingerprints, self.settings.valid_share, self.settings.seed)
            self.stat_update("valid", value=int((held_out & (mark == KEEP)).sum()))
            self.stat_update("train", value=int((~held_out & (mark == KEEP)).sum()))
            for key, reason in REASONS.items():
                self.stat_update(f"dropped: {reason}", value=int((mark == key).sum()))


class CountWords(StageStep):
    """Counts the words of the unit's training documents."""

    name = "count"

    def __init__(self, paths: WorkPaths, settings: CorpusSettings):
        super().__init__(paths)
        self.settings = settings

    def work(self, rank: int, world_size: int) -> None:
        store = WordStore.open(self.paths.store(rank))
        count_words(
            store, documents_of_splits(self.paths, store, rank, self.settings)["train"], self.paths.counts(rank)
        )


class TrainTokenizer(StageStep):
    """Words of all units -> those frequent enough -> the BPE."""

    name = "tokenizer"

    def __init__(self, paths: WorkPaths, units: int, settings: CorpusSettings):
        super().__init__(paths)
        self.units, self.settings = units, settings

    def work(self, rank: int, world_size: int) -> None:
        settings = self.settings
        coverage = None if settings.min_word_count else settings.word_coverage
        merged = merge_counts(
            [self.paths.counts(unit) for unit in range(self.units)],
            self.paths.kept_words,
            FrequencyFilter(settings.min_word_count, coverage),
            settings.text.special_tokens,
        )
        shutil.rmtree(self.paths.tokenizer, ignore_errors=True)  # of a run that was stopped
        Tokenizer.train_on_counts(merged.frequent, self.paths.tokenizer, settings.vocab_size, settings.text)
        write_json(self.paths.vocabulary, {**merged.summary(), "size": settings.vocab_size})


class WriteIds(StageStep):
    """The unit's words become ids, train and valid apart."""

    name = "ids"

    def __init__(self, paths: WorkPaths, settings: CorpusSettings):
        super().__init__(paths)
        self.settings = settings

    def work(self, rank: int, world_size: int) -> None:
        store = WordStore.open(self.paths.store(rank))
        splits = documents_of_splits(self.paths, store, rank, self.settings)
        counts = write_ids(
            store,
            splits["train"],
            splits["valid"],
            load_tokenizer(self.paths.tokenizer),
            np.load(self.paths.kept_words, mmap_mode="r", allow_pickle=False),
            self.paths.ids(rank, "train"),
            self.paths.ids(rank, "valid"),
        )
        write_json(self.paths.ids(rank, "json"), counts, durable=False)


class JoinShards(StageStep):
    """Joins the parts of every ``world_size``-th unit; the validation split is whole in the first shard."""

    name = "shards"

    def __init__(self, paths: WorkPaths, units: int):
        super().__init__(paths)
        self.units = units

    def work(self, rank: int, world_size: int) -> None:
        folder = self.paths.result / f"shard{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        train = range(rank, self.units, world_size)
        join_parts([self.paths.ids(unit, "train") for unit in train], folder / "train")
        if rank == 0:
            join_parts([self.paths.ids(unit, "valid") for unit in range(self.units)], folder / "valid")
        shutil.copyfile(self.paths.tokenizer / DICTIONARY_FILE, folder / DICTIONARY_FILE)


@lru_cache(maxsize=1)
def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads it once per process, for any number of units."""
    return Tokenizer.load(folder)


def documents_of_splits(
    paths: WorkPaths, store: WordStore, rank: int, settings: CorpusSettings
) -> dict[str, np.ndarray]:
    """For each split, the documents of a unit that are in it: bool (documents,)."""
    kept = np.load(paths.duplicates(rank), allow_pickle=False) == KEEP
    held_out = is_held_out(store.fingerprints, settings.valid_share, settings.seed)
    return {"train": kept & ~held_out, "valid": kept & held_out}


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes an .npy file whole or not at all."""
    with whole_file(path, durable=False) as file:
        np.save(file, array, allow_pickle=False)
