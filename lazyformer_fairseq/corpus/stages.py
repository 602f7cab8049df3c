"""The stages of ``lazyformer corpus``: what a task of each does.

cut         big compressed files into parts (a task a file)
words       units of input -> stored words (a task a unit)
duplicates  which documents of which unit to drop (one task)
count       words of the training documents (a task a unit)
tokenizer   merged counts -> low-frequency filter -> BPE (one task)
ids         stored words -> ids of pieces (a task a unit)
shards      parts of units -> shards (a task a shard)
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Optional

import numpy as np

from lazyformer_fairseq.corpus.clean_text import CleanText
from lazyformer_fairseq.corpus.duplicates import HELD_OUT, KEEP, REASONS, Fingerprint, draw, find_duplicates, threshold
from lazyformer_fairseq.corpus.readers.files import Piece, bytes_of
from lazyformer_fairseq.corpus.readers.inputs import InputFile, cut_file, find_inputs
from lazyformer_fairseq.corpus.sentences import SplitSentences
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.corpus.steps import Document, DocumentStep, ReadDocuments, TaskNotes
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
Counts = dict[str, Counter]  # of a task, by step


class WorkPaths:
    """Where the stages keep their files; ``rank`` is a unit's number. ``tasks``: their counts, a folder a stage."""

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
class Job:
    """What every task is told; it travels to the workers."""

    paths: WorkPaths
    settings: CorpusSettings
    unit_bytes: int
    to_cut: Sequence[InputFile]
    units: Sequence[tuple[Piece, ...]] = ()
    shards: int = 1

    def documents_of_splits(self, unit: int) -> dict[str, np.ndarray]:
        """For each split, the documents of a unit that are in it: bool (documents,)."""
        marks = np.load(self.paths.duplicates(unit), allow_pickle=False)
        return {"train": marks == KEEP, "valid": marks == HELD_OUT}


def cut_one(job: Job, rank: int) -> None:
    """Cuts a compressed file that cannot be read in pieces."""
    cut_file(job.to_cut[rank], job.paths.cut(rank), job.unit_bytes, job.settings.bad_files)


def store_words(job: Job, rank: int) -> Counts:
    """Reads a unit, and stores its words."""
    settings = job.settings
    steps = [
        ReadDocuments(job.units[rank], settings.bad_files),
        ExtractWikiMarkup(),
        CleanText(settings.min_line_words, settings.min_line_letters, settings.min_document_characters),
        Fingerprint(settings.near_duplicates),
        SplitSentences(settings.spacy_model, settings.min_words),
        NormaliseWords(settings.text),
        StoreWords(job.paths.store(rank)),
    ]
    for _ in through(steps):
        pass
    return {step.name: step.counts for step in steps}


def through(steps: Iterable[DocumentStep]) -> Iterator[Document]:
    """What the last step passes on; all steps share their notes."""
    documents: Iterable[Document] = ()
    notes = TaskNotes()
    for step in steps:
        step.notes = notes
        documents = step.run(documents)
    yield from documents


def clean_documents(inputs: Sequence[str]) -> Iterator[Document]:
    """The documents of ``inputs`` as the first steps leave them: clean paragraphs, one a line, and a fingerprint."""
    unit = [Piece(file.path, file.format) for file in find_inputs(inputs)]
    return through([ReadDocuments(unit), ExtractWikiMarkup(), CleanText(), Fingerprint()])


def mark_duplicates(job: Job, rank: int) -> Counts:
    """Decides for every unit which of its documents to drop, and why, and which to hold out."""
    counts: Counter[str] = Counter()
    stores = [WordStore(job.paths.store(unit)) for unit in range(len(job.units))]
    marks = find_duplicates([store.fingerprints for store in stores], [store.bands for store in stores])
    draws = [draw(store.fingerprints, job.settings.seed) for store in stores]
    kept = [of_unit[mark == KEEP] for of_unit, mark in zip(draws, marks, strict=True)]
    highest = threshold(kept, job.settings.valid_share)
    for unit, (of_unit, mark) in enumerate(zip(draws, marks, strict=True)):
        mark[(mark == KEEP) & (of_unit < highest)] = HELD_OUT
        with atomic_file(job.paths.duplicates(unit), durable=False) as file:
            np.save(file, mark, allow_pickle=False)
        for split, documents in job.documents_of_splits(unit).items():
            counts[split] += int(documents.sum())
        for key, reason in REASONS.items():
            counts[f"dropped: {reason}"] += int((mark == key).sum())
    return {"duplicates": counts}


def count_words_of_unit(job: Job, rank: int) -> None:
    """Counts the words of the unit's training documents."""
    count_words(WordStore(job.paths.store(rank)), job.documents_of_splits(rank)["train"], job.paths.counts(rank))


def train_tokenizer(job: Job, rank: int) -> None:
    """Words of all units -> those frequent enough -> the BPE, unless the user brings a tokenizer."""
    paths, settings = job.paths, job.settings
    folders = [paths.counts(unit) for unit in range(len(job.units))]
    summary, frequent = merge_counts(
        folders, paths.kept_words, settings.share_of_kept_words, settings.text.special_tokens
    )
    shutil.rmtree(paths.tokenizer, ignore_errors=True)  # of a run that was stopped
    if settings.tokenizer:
        load_tokenizer(settings.tokenizer).save(paths.tokenizer)
    else:
        Tokenizer.train_on_counts(frequent, paths.tokenizer, settings.vocab_size, settings.text)
    write_json(paths.vocabulary, {**summary, "size": settings.vocab_size})


def write_ids_of_unit(job: Job, rank: int) -> None:
    """The unit's words become ids, train and valid apart."""
    kept_words = np.load(job.paths.kept_words, mmap_mode="r", allow_pickle=False)
    keep = job.documents_of_splits(rank)
    prefixes = {split: job.paths.ids(rank, split) for split in keep}
    counts = write_ids(
        WordStore(job.paths.store(rank)), keep, loaded_tokenizer(job.paths.tokenizer), kept_words, prefixes
    )
    write_json(job.paths.ids(rank, "json"), counts, durable=False)


loaded_tokenizer = lru_cache(maxsize=1)(load_tokenizer)  # once per process, for any number of units


def join_shard(job: Job, rank: int) -> None:
    """Joins the parts of every so many-th unit; the validation split is whole in the first shard."""
    folder, units = job.paths.result / f"shard{rank}", len(job.units)
    folder.mkdir(parents=True, exist_ok=True)
    join_parts([job.paths.ids(unit, "train") for unit in range(rank, units, job.shards)], folder / "train")
    if rank == 0:
        join_parts([job.paths.ids(unit, "valid") for unit in range(units)], folder / "valid")
    shutil.copyfile(job.paths.tokenizer / DICTIONARY_FILE, folder / DICTIONARY_FILE)


def _one_a_unit(job: Job) -> list[int]:
    return [1] * len(job.units)


# After the cutting, in order: what a task does, and the size of each: bytes of input, or 1.
STAGES: Mapping[str, tuple[Callable[[Job, int], Optional[Counts]], Callable[[Job], list[int]]]] = {
    "words": (store_words, lambda job: [bytes_of(unit) for unit in job.units]),
    "duplicates": (mark_duplicates, lambda job: [1]),
    "count": (count_words_of_unit, _one_a_unit),
    "tokenizer": (train_tokenizer, lambda job: [1]),
    "ids": (write_ids_of_unit, _one_a_unit),
    "shards": (join_shard, lambda job: [1] * job.shards),
}
