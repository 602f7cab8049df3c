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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from lazyformer_fairseq.corpus.clean_text import CleanText
from lazyformer_fairseq.corpus.duplicates import HELD_OUT, KEEP, REASONS, Fingerprint, draw, find_duplicates, threshold
from lazyformer_fairseq.corpus.executors import TaskProgress
from lazyformer_fairseq.corpus.readers.files import Piece, bytes_of
from lazyformer_fairseq.corpus.readers.inputs import InputFile, cut_file, find_inputs
from lazyformer_fairseq.corpus.sentences import SplitSentences
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.step import CorpusStep, ReadDocuments, TaskNotes
from lazyformer_fairseq.corpus.vocabulary import count_words, merge_counts, write_ids
from lazyformer_fairseq.corpus.wiki_markup import ExtractWikiMarkup
from lazyformer_fairseq.corpus.words import NormaliseWords, StoreWords, WordStore
from lazyformer_fairseq.data.text.interface import DICTIONARY_FILE
from lazyformer_fairseq.data.text.load_tokenizer import load_tokenizer
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.storage.atomic import atomic_file
from lazyformer_fairseq.storage.indexed_format import join_parts
from lazyformer_fairseq.storage.json_files import write_json

RESULT = "result"  # in the work folder; what becomes the corpus


class WorkPaths:
    """Where the stages keep their files; ``rank`` is a unit's number. ``tasks``: datatrove's, a folder a stage."""

    def __init__(self, root: Path):
        self.root, self.tasks, self.words = root, root / "tasks", root / "words"
        self.tokenizer, self.kept_words = root / "tokenizer", root / "kept_words.npy"
        self.vocabulary, self.result = root / "vocabulary.json", root / RESULT

    def stage(self, name: str) -> Path:
        return self.tasks / name

    def cut(self, number: int) -> Path:
        return self.root / "cut" / f"{number:05d}"

    def store(self, rank: int) -> Path:
        return self.words / f"{rank:05d}"

    def duplicates(self, rank: int) -> Path:
        return self.root / "duplicates" / f"{rank:05d}.npy"

    def counts(self, rank: int) -> Path:
        return self.root / "counts" / f"{rank:05d}"

    def ids(self, rank: int, split: str) -> Path:
        return self.root / "ids" / f"{rank:05d}.{split}"


@dataclass(frozen=True)
class Stage:
    """A stage: ``sizes`` has one entry per task, in bytes of input, or 1 each where there is no such size."""

    name: str
    sizes: Sequence[int]
    pipeline: list[PipelineStep]


def cut_stage(paths: WorkPaths, files: Sequence[InputFile], part_bytes: int, settings: CorpusSettings) -> Stage:
    """Cuts compressed files that cannot be read in pieces."""
    progress = TaskProgress(paths.stage("cut") / "progress")
    step = StageStep("cut", partial(cut_one, files, part_bytes, progress), paths, settings)
    return Stage("cut", [file.size for file in files], [step, TaskMeter()])


def later_stages(paths: WorkPaths, units: list[tuple[Piece, ...]], settings: CorpusSettings, shards: int):
    """All stages after the cutting, in order."""
    words: list[CorpusStep] = [
        ReadDocuments(units, settings.bad_files, TaskProgress(paths.stage("words") / "progress")),
        ExtractWikiMarkup(),
        CleanText(settings.min_line_words, settings.min_line_letters, settings.min_document_characters),
        Fingerprint(settings.near_duplicates),
        SplitSentences(settings.spacy_model, settings.min_words),
        NormaliseWords(settings.text),
        StoreWords(paths.words),
    ]
    notes = TaskNotes()
    for step in words:
        step.notes = notes
    yield Stage("words", [bytes_of(unit) for unit in units], [*words, TaskMeter()])
    count = len(units)
    for name, tasks, work in (
        ("duplicates", 1, mark_duplicates),
        ("count", count, count_words_of_unit),
        ("tokenizer", 1, train_tokenizer),
        ("ids", count, write_ids_of_unit),
        ("shards", shards, join_shard),
    ):
        step = StageStep(name, work, paths, settings, count)
        yield Stage(name, [1] * tasks, [step, TaskMeter()])


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


class StageStep(CorpusStep):
    """A step that takes no documents: ``work(step, rank, tasks)`` reads earlier stages' files, writes its own whole."""

    def __init__(self, name: str, work: Callable, paths: WorkPaths, settings: CorpusSettings, units: int = 0):
        self.name, self.work, self.paths, self.settings, self.units = name, work, paths, settings, units
        super().__init__()

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        with self.track_core_time():
            self.work(self, rank, world_size)
        yield from ()


def cut_one(
    files: Sequence[InputFile], part_bytes: int, progress: TaskProgress, step: StageStep, rank: int, tasks: int
) -> None:
    """Cuts file ``rank`` into parts."""
    cut_file(files[rank], step.paths.cut(rank), part_bytes, step.settings.bad_files, partial(progress, rank))


def mark_duplicates(step: StageStep, rank: int, tasks: int) -> None:
    """Decides for every unit which of its documents to drop, and why, and which to hold out."""
    stores = [WordStore(step.paths.store(unit)) for unit in range(step.units)]
    marks = find_duplicates([store.fingerprints for store in stores], [store.bands for store in stores])
    draws = [draw(store.fingerprints, step.settings.seed) for store in stores]
    kept = [of_unit[mark == KEEP] for of_unit, mark in zip(draws, marks, strict=True)]
    highest = threshold(kept, step.settings.valid_share)
    for unit, (of_unit, mark) in enumerate(zip(draws, marks, strict=True)):
        mark[(mark == KEEP) & (of_unit < highest)] = HELD_OUT
        with atomic_file(step.paths.duplicates(unit), durable=False) as file:
            np.save(file, mark, allow_pickle=False)
        for split, documents in documents_of_splits(step, unit).items():
            step.stat_update(split, value=int(documents.sum()))
        for key, reason in REASONS.items():
            step.stat_update(f"dropped: {reason}", value=int((mark == key).sum()))


def count_words_of_unit(step: StageStep, rank: int, tasks: int) -> None:
    """Counts the words of the unit's training documents."""
    store = WordStore(step.paths.store(rank))
    count_words(store, documents_of_splits(step, rank)["train"], step.paths.counts(rank))


def train_tokenizer(step: StageStep, rank: int, tasks: int) -> None:
    """Words of all units -> those frequent enough -> the BPE, unless the user brings a tokenizer."""
    paths, settings = step.paths, step.settings
    merged = merge_counts(
        [paths.counts(unit) for unit in range(step.units)],
        paths.kept_words,
        settings.share_of_kept_words,
        settings.min_word_count,
        settings.text.special_tokens,
    )
    shutil.rmtree(paths.tokenizer, ignore_errors=True)  # of a run that was stopped
    if settings.tokenizer:
        load_tokenizer(settings.tokenizer).save(paths.tokenizer)
    else:
        Tokenizer.train_on_counts(merged.frequent, paths.tokenizer, settings.vocab_size, settings.text)
    write_json(paths.vocabulary, {**merged.summary, "size": settings.vocab_size})


def write_ids_of_unit(step: StageStep, rank: int, tasks: int) -> None:
    """The unit's words become ids, train and valid apart."""
    store = WordStore(step.paths.store(rank))
    kept_words = np.load(step.paths.kept_words, mmap_mode="r", allow_pickle=False)
    keep = documents_of_splits(step, rank)
    prefixes = {split: step.paths.ids(rank, split) for split in keep}
    counts = write_ids(store, keep, loaded_tokenizer(step.paths.tokenizer), kept_words, prefixes)
    write_json(step.paths.ids(rank, "json"), counts, durable=False)


def join_shard(step: StageStep, rank: int, tasks: int) -> None:
    """Joins the parts of every ``tasks``-th unit; the validation split is whole in the first shard."""
    folder = step.paths.result / f"shard{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    join_parts([step.paths.ids(unit, "train") for unit in range(rank, step.units, tasks)], folder / "train")
    if rank == 0:
        join_parts([step.paths.ids(unit, "valid") for unit in range(step.units)], folder / "valid")
    shutil.copyfile(step.paths.tokenizer / DICTIONARY_FILE, folder / DICTIONARY_FILE)


loaded_tokenizer = lru_cache(maxsize=1)(load_tokenizer)  # once per process, for any number of units


def documents_of_splits(step: StageStep, unit: int) -> dict[str, np.ndarray]:
    """For each split, the documents of a unit that are in it: bool (documents,)."""
    marks = np.load(step.paths.duplicates(unit), allow_pickle=False)
    return {"train": marks == KEEP, "valid": marks == HELD_OUT}
