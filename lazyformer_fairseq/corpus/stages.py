"""The stages of ``lazyformer corpus``: what a task of each does, and how the tasks of a stage run.

cut         big compressed files into parts (a task a file)
words       units of input -> stored words (a task a unit)
duplicates  which documents of which unit to drop (one task)
count       words of the training documents (a task a unit)
tokenizer   merged counts -> low-frequency filter -> BPE (one task)
ids         stored words -> ids of pieces (a task a unit)
shards      parts of units -> shards (a task a shard)

Tasks run in this process or where an executor puts them, and show their progress. A task is done once its counts lie
in the stage's folder, ``tasks/STAGE/NNNNN.json``. Whoever resumes does the others.
"""

import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.corpus.clean_text import CleanText
from lazyformer_fairseq.corpus.duplicates import HELD_OUT, KEEP, REASONS, Fingerprint, draw, find_duplicates, threshold
from lazyformer_fairseq.corpus.readers.files import BadInputError, Piece, bytes_of
from lazyformer_fairseq.corpus.readers.inputs import InputFile, cut_file, find_inputs
from lazyformer_fairseq.corpus.sentences import SplitSentences
from lazyformer_fairseq.corpus.settings import VOCAB_SIZE, CorpusSettings
from lazyformer_fairseq.corpus.steps import Document, DocumentStep, ReadDocuments, TaskNotes
from lazyformer_fairseq.corpus.vocabulary import count_words, merge_counts, write_ids
from lazyformer_fairseq.corpus.wiki_markup import ExtractWikiMarkup
from lazyformer_fairseq.corpus.words import NormaliseWords, StoreWords, WordStore
from lazyformer_fairseq.data.text.interface import DICTIONARY_FILE
from lazyformer_fairseq.data.text.tokenizer import Tokenizer, TooLargeVocabularyError, load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.interface import Call, Executor, LostError, run_calls
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.atomic import OUT_OF_SPACE, atomic_file, copy_file
from lazyformer_fairseq.storage.in_place import own_file
from lazyformer_fairseq.storage.indexed_format import join_parts
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import file_lock

RESULT = "result"  # in the work folder; what becomes the corpus
Counts = dict[str, Counter]  # of a task, by step


class WorkPaths:
    """Paths of the stages' files; `tasks` holds the counts of their tasks, a folder per stage."""

    def __init__(self, root: Path):
        self.root = root
        self.tasks = root / "tasks"
        self.tokenizer = root / "tokenizer"
        self.kept_words = root / "kept_words.npy"
        self.vocabulary = root / "vocabulary.json"
        self.result = root / RESULT

    def of(self, name: str, number: int, ending: str = "") -> Path:
        """Return the path of what a task keeps: a unit's ``words``, ``duplicates``, ``counts``, ``ids``; ``cut``."""
        return self.root / name / f"{number:05d}{ending}"


@dataclass(frozen=True)
class Job:
    """The settings and paths of every task, which travel to the workers."""

    paths: WorkPaths
    settings: CorpusSettings
    unit_bytes: int
    to_cut: Sequence[InputFile]
    units: Sequence[tuple[Piece, ...]] = ()
    shards: int = 1

    def documents_of_splits(self, unit: int) -> dict[str, np.ndarray]:
        """Return, by split, the documents of a unit that are in it: bool (documents,)."""
        marks = np.load(self.paths.of("duplicates", unit, ".npy"), allow_pickle=False)
        return {"train": marks == KEEP, "valid": marks == HELD_OUT}


def cut_one(job: Job, rank: int) -> None:
    """Cut a compressed file that cannot be read in pieces."""
    cut_file(job.to_cut[rank], job.paths.of("cut", rank), job.unit_bytes, job.settings.bad_input)


def store_words(job: Job, rank: int) -> Counts:
    """Read a unit, and store its words."""
    settings = job.settings
    steps = [
        ReadDocuments(job.units[rank], settings.bad_input),
        ExtractWikiMarkup(),
        CleanText(settings.min_line_words, settings.min_line_letters, settings.min_document_characters),
        Fingerprint(settings.near_duplicates),
        SplitSentences(settings.spacy_model),
        NormaliseWords(settings.text),
        StoreWords(job.paths.of("words", rank)),
    ]
    for _ in through(steps):
        pass
    return {step.name: step.counts for step in steps}


def through(steps: Iterable[DocumentStep]) -> Iterator[Document]:
    """Return what the last step passes on; all steps share their notes."""
    documents: Iterable[Document] = ()
    notes = TaskNotes()
    for step in steps:
        step.notes = notes
        documents = step.run(documents)
    yield from documents


def clean_documents(inputs: Sequence[str]) -> Iterator[Document]:
    """Yield the documents of ``inputs`` after the first steps: clean paragraphs, one a line, and a fingerprint."""
    unit = [Piece(file.path, file.format) for file in find_inputs(inputs)]
    return through([ReadDocuments(unit), ExtractWikiMarkup(), CleanText(), Fingerprint()])


def mark_duplicates(job: Job, _rank: int) -> Counts:
    """Decide for every unit which of its documents to drop, and why, and which to hold out."""
    counts: Counter[str] = Counter()
    stores = [WordStore(job.paths.of("words", unit)) for unit in range(len(job.units))]
    marks = find_duplicates([store.fingerprints for store in stores], [store.bands for store in stores])
    draws = [draw(store.fingerprints, job.settings.seed) for store in stores]
    kept = [of_unit[mark == KEEP] for of_unit, mark in zip(draws, marks, strict=True)]
    highest = threshold(kept, job.settings.valid_share)
    for unit, (of_unit, mark) in enumerate(zip(draws, marks, strict=True)):
        mark[(mark == KEEP) & (of_unit < highest)] = HELD_OUT
        with atomic_file(job.paths.of("duplicates", unit, ".npy"), durable=False) as file:
            np.save(file, mark, allow_pickle=False)
        for split, documents in job.documents_of_splits(unit).items():
            counts[split] += int(documents.sum())
        for key, reason in REASONS.items():
            counts[f"dropped: {reason}"] += int((mark == key).sum())
    return {"duplicates": counts}


def count_words_of_unit(job: Job, rank: int) -> None:
    """Count the words of the unit's training documents."""
    store = WordStore(job.paths.of("words", rank))
    count_words(store, job.documents_of_splits(rank)["train"], job.paths.of("counts", rank))


def train_tokenizer(job: Job, _rank: int) -> None:
    """Merge the words of all units, and train BPE on the frequent ones unless the user brings a tokenizer.

    Where nobody asked for a number of symbols and the text is too small for the default, it is a power of two below
    half of what the text has: with all of it most words would be a symbol each, seen a few times.
    """
    paths = job.paths
    settings = job.settings
    folders = [paths.of("counts", unit) for unit in range(len(job.units))]
    always_kept = settings.text.special_tokens
    summary, frequent = merge_counts(folders, paths.kept_words, settings.share_of_kept_words, always_kept)
    shutil.rmtree(paths.tokenizer, ignore_errors=True)  # of a run that was stopped
    if settings.tokenizer:
        load_tokenizer(settings.tokenizer).save(paths.tokenizer)
    else:
        train = partial(Tokenizer.train_on_counts, frequent, paths.tokenizer, settings=settings.text)
        try:
            train(settings.vocab_size or VOCAB_SIZE)
        except TooLargeVocabularyError as error:
            if settings.vocab_size is not None:
                raise
            try:
                train(2 ** int(math.log2(error.largest / 2)))
            except UserError:  # fewer than the text's characters
                train(error.largest)
    write_json(paths.vocabulary, {**summary, "size": len(load_tokenizer(paths.tokenizer).symbols)})


def write_ids_of_unit(job: Job, rank: int) -> None:
    """Turn the unit's words into ids, train and valid apart."""
    counts = write_ids(
        WordStore(job.paths.of("words", rank)),
        keep=job.documents_of_splits(rank),
        tokenizer=loaded_tokenizer(job.paths.tokenizer),
        frequent=np.load(job.paths.kept_words, mmap_mode="r", allow_pickle=False),
        prefix=job.paths.of("ids", rank),
    )
    write_json(job.paths.of("ids", rank, ".json"), counts, durable=False)


loaded_tokenizer = lru_cache(maxsize=1)(load_tokenizer)  # once per process, for any number of units


def join_shard(job: Job, rank: int) -> None:
    """Join the parts of every so many-th unit; the validation split is whole in the first shard."""
    folder = job.paths.result / f"shard{rank}"
    units = len(job.units)
    folder.mkdir(parents=True, exist_ok=True)
    join_parts([job.paths.of("ids", unit, ".train") for unit in range(rank, units, job.shards)], folder / "train")
    if rank == 0:
        join_parts([job.paths.of("ids", unit, ".valid") for unit in range(units)], folder / "valid")
    copy_file(job.paths.tokenizer / DICTIONARY_FILE, folder / DICTIONARY_FILE)


Task = Callable[[Job, int], Optional[Counts]]
# After the cutting, in order: what a task does, and the size of each: bytes of input, or 1.
STAGES: Mapping[str, tuple[Task, Callable[[Job], list[int]]]] = {
    "words": (store_words, lambda job: [bytes_of(unit) for unit in job.units]),
    "duplicates": (mark_duplicates, lambda _job: [1]),
    "count": (count_words_of_unit, lambda job: [1] * len(job.units)),
    "tokenizer": (train_tokenizer, lambda _job: [1]),
    "ids": (write_ids_of_unit, lambda job: [1] * len(job.units)),
    "shards": (join_shard, lambda job: [1] * job.shards),
}

WORKERS_LOCK = "workers.lock"
SECONDS_FILE = "seconds"


def run_tasks(
    task: Callable[[int], Any],
    sizes: Sequence[int],
    folder: Path,
    executor: Optional[Executor] = None,
    keeps_counts: bool = False,
) -> None:
    """Run ``task(rank)`` for each rank below ``len(sizes)``, but for those that an earlier run completed.

    Args:
        task: returns its counts by step, or None where it is one step and counts nothing; can be pickled.
        sizes: in bytes of input, for the bar; 1 each where there is no such size.
        folder: receives the counts, and the seconds that passed.
        executor: the place where tasks run side by side; None for this process.
        keeps_counts: whether the task keeps its counts itself and returns its rank; it needs no folder of the command.

    Raises:
        UserError: a task failed for a reason that the user can fix; finished work stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [rank for rank in range(len(sizes)) if not (folder / f"{rank:05d}.json").exists()]
    scale = {"unit": " tasks"}
    if max(sizes) > 1:
        scale = {"unit": "B", "unit_scale": True}
    done = sum(sizes) - sum(sizes[rank] for rank in waiting)
    run = task
    begins_in = "/"
    if not keeps_counts:
        run = partial(run_task, task, folder)
        begins_in = os.getcwd()
    if executor is None or (executor.is_here and len(waiting) < 2):
        finished: Iterable[int] = map(run, waiting)
    else:
        finished = _elsewhere(run, waiting, executor, begins_in)
    began = time.monotonic()
    try:
        with Progress(total=sum(sizes), initial=done, desc=folder.name, **scale) as bar:
            for rank in finished:
                bar.update(sizes[rank])
    except BadInputError as error:
        raise UserError(f"{error}; or leave out all that is broken: --bad-input skip") from None
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        raise UserError(
            f"{error.filename or folder}: cannot be written ({error.strerror}). What was finished stays: make room and "
            "run the same command again"
        ) from None
    finally:
        with open(folder / SECONDS_FILE, "a", opener=own_file) as file:  # of this run; a resumed run adds a line
            file.write(f"{time.monotonic() - began}\n")


def run_task(task: Callable[[int], Optional[Counts]], folder: Path, rank: int) -> int:
    """Run one task in this process, write its counts, and return its rank.

    Whoever resumes after a kill waits for the tasks that are still under way.
    """
    with at_work(folder.parent):
        write_json(folder / f"{rank:05d}.json", task(rank) or {}, durable=False)
    return rank


def at_work(tasks: Path) -> AbstractContextManager[None]:
    """Return a block for which :func:`wait_for_workers` waits."""
    return file_lock(tasks / WORKERS_LOCK, shared=True)


def _elsewhere(run: Callable[[int], int], ranks: Sequence[int], executor: Executor, begins_in: str) -> Iterator[int]:
    """Yield ranks as their tasks end where an executor put them."""
    rank_of = {Call(run, (rank,), begins_in): rank for rank in ranks}
    for ended in run_calls(list(rank_of), executor):
        if ended is None or ended.is_tried_again:
            continue
        if isinstance(ended.error, LostError):
            raise UserError(
                f"a worker died: {ended.error}, from outside or by the system for want of memory. What was "
                "finished stays: run the same command again, with fewer --workers if memory was short"
            )
        if ended.error is not None:
            raise ended.error
        yield rank_of[ended.call]


def wait_for_workers(folder: Path) -> None:
    """Wait until the tasks of a killed run have ended; its processes exit by themselves within seconds."""
    folder.mkdir(exist_ok=True)
    with file_lock(folder / WORKERS_LOCK):
        pass
