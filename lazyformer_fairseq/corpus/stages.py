"""The stages of ``lazyformer corpus``: the tasks in each stage and how they are run.

cut         large compressed files -> parts (one task per file)
words       units of input -> stored words (one task per unit)
duplicates  fingerprints -> documents to drop or to hold out (one task)
count       stored words -> word counts of the training documents (one task per unit)
tokenizer   merged counts -> low-frequency filter -> BPE (one task)
ids         stored words -> token ids (one task per unit)
shards      parts of units -> shards (one task per shard)

Tasks run in this process or on an executor, with a progress bar. A task is done once its counts have been written to
``tasks/STAGE/NNNNN.json``. A resumed run executes the remaining tasks.
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

RESULT = "result"  # the subfolder of the work folder that becomes the corpus
Counts = dict[str, Counter]  # a task's counts, by step


class WorkPaths:
    """The paths in a work folder; `tasks` contains the tasks' counts, in one folder per stage."""

    def __init__(self, root: Path):
        self.root = root
        self.tasks = root / "tasks"
        self.tokenizer = root / "tokenizer"
        self.kept_words = root / "kept_words.npy"
        self.vocabulary = root / "vocabulary.json"
        self.result = root / RESULT

    def of(self, name: str, number: int, ending: str = "") -> Path:
        """Return the path of a task's output.

        Args:
            name: ``words``, ``duplicates``, ``counts`` or ``ids`` for a unit, or ``cut`` for the parts of a file.
            number: number of the unit or file.
            ending: suffix after the number.
        """
        return self.root / name / f"{number:05d}{ending}"


@dataclass(frozen=True)
class Job:
    """The settings and paths that every task needs, which are sent to the workers."""

    paths: WorkPaths
    settings: CorpusSettings
    unit_bytes: int
    to_cut: Sequence[InputFile]
    units: Sequence[tuple[Piece, ...]] = ()
    shards: int = 1

    def documents_of_splits(self, unit: int) -> dict[str, np.ndarray]:
        """Return, for each split, a mask of the documents in a unit that belong to it, bool (documents,)."""
        marks = np.load(self.paths.of("duplicates", unit, ".npy"), allow_pickle=False)
        return {"train": marks == KEEP, "valid": marks == HELD_OUT}

    def unit_paths(self, name: str, ending: str = "") -> list[Path]:
        """Return the path of every unit's output; see :meth:`WorkPaths.of` for the arguments."""
        return [self.paths.of(name, unit, ending) for unit in range(len(self.units))]


def cut_one(job: Job, rank: int) -> None:
    """Cut into parts a compressed file that does not support random access."""
    cut_file(job.to_cut[rank], job.paths.of("cut", rank), job.unit_bytes, job.settings.bad_input)


def store_words(job: Job, rank: int) -> Counts:
    """Run a unit's documents through all steps, from reading the input to storing the words."""
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
    for _ in run_steps(steps):
        pass
    return {step.name: step.counts for step in steps}


def run_steps(steps: Iterable[DocumentStep]) -> Iterator[Document]:
    """Run documents through a chain of steps that share their notes, and yield the documents that are not dropped."""
    documents: Iterable[Document] = ()
    notes = TaskNotes()
    for step in steps:
        step.notes = notes
        documents = step.run(documents)
    yield from documents


def clean_documents(inputs: Sequence[str]) -> Iterator[Document]:
    """Yield the cleaned documents of ``inputs``, each with one paragraph per line and a fingerprint."""
    unit = [Piece(file.path, file.format) for file in find_inputs(inputs)]
    return run_steps([ReadDocuments(unit), ExtractWikiMarkup(), CleanText(), Fingerprint()])


def mark_duplicates(job: Job, _rank: int) -> Counts:
    """Mark the duplicates to drop and the documents to hold out, and store the marks per unit."""
    counts: Counter[str] = Counter()
    stores = [WordStore(folder) for folder in job.unit_paths("words")]
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
    """Count the words in a unit's training documents."""
    store = WordStore(job.paths.of("words", rank))
    count_words(store, job.documents_of_splits(rank)["train"], job.paths.of("counts", rank))


def train_tokenizer(job: Job, _rank: int) -> None:
    """Merge the word counts of all units, and train BPE on the frequent words unless the user provides a tokenizer.

    If no vocabulary size is set and the text is too small for the default, the size is the largest power of two that is
    at most half of the maximum for this text. At the maximum, most words would be single symbols, each seen only a few
    times.
    """
    paths = job.paths
    settings = job.settings
    folders = job.unit_paths("counts")
    always_kept = settings.text.special_tokens
    summary, frequent = merge_counts(folders, paths.kept_words, settings.share_of_kept_words, always_kept)
    shutil.rmtree(paths.tokenizer, ignore_errors=True)  # left by a stopped run
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
            except UserError:  # the text has more distinct characters than that
                train(error.largest)

    size = len(load_tokenizer(paths.tokenizer).symbols)
    write_json(paths.vocabulary, {**summary, "size": size})


def write_ids_of_unit(job: Job, rank: int) -> None:
    """Encode a unit's words as token ids, separately for each split."""
    counts = write_ids(
        WordStore(job.paths.of("words", rank)),
        keep=job.documents_of_splits(rank),
        tokenizer=loaded_tokenizer(job.paths.tokenizer),
        frequent=np.load(job.paths.kept_words, mmap_mode="r", allow_pickle=False),
        prefix=job.paths.of("ids", rank),
    )
    write_json(job.paths.of("ids", rank, ".json"), counts, durable=False)


loaded_tokenizer = lru_cache(maxsize=1)(load_tokenizer)  # once per process, for any number of units


def write_shard(job: Job, rank: int) -> None:
    """Concatenate the parts of the units in a shard; the first shard also contains the whole validation split."""
    folder = job.paths.result / f"shard{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    train = job.unit_paths("ids", ".train")
    join_parts(train[rank :: job.shards], folder / "train")
    if rank == 0:
        join_parts(job.unit_paths("ids", ".valid"), folder / "valid")
    copy_file(job.paths.tokenizer / DICTIONARY_FILE, folder / DICTIONARY_FILE)


Task = Callable[[Job, int], Optional[Counts]]
# For each stage after "cut", in order: the function that runs a task, and each task's size (bytes of input, or 1).
STAGES: Mapping[str, tuple[Task, Callable[[Job], list[int]]]] = {
    "words": (store_words, lambda job: [bytes_of(unit) for unit in job.units]),
    "duplicates": (mark_duplicates, lambda _job: [1]),
    "count": (count_words_of_unit, lambda job: [1] * len(job.units)),
    "tokenizer": (train_tokenizer, lambda _job: [1]),
    "ids": (write_ids_of_unit, lambda job: [1] * len(job.units)),
    "shards": (write_shard, lambda job: [1] * job.shards),
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
    """Run ``task(rank)`` for each rank below ``len(sizes)``, except for tasks that an earlier run completed.

    Args:
        task: a picklable function that returns its counts by step, or None if it counts nothing.
        sizes: bytes of input per task, for the progress bar; 1 per task if the sizes are unknown.
        folder: receives the tasks' counts and the duration of the run in seconds.
        executor: runs tasks in parallel; None to run them sequentially in this process.
        keeps_counts: whether the task writes its counts itself and returns its rank; such a task must not depend on the
            working directory.

    Raises:
        UserError: a task failed for a reason that the user can fix; finished work is kept.
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
        finished = _run_on_executor(run, waiting, executor, begins_in)

    began = time.monotonic()
    try:
        with Progress(total=sum(sizes), initial=done, desc=folder.name, **scale) as bar:
            for rank in finished:
                bar.update(sizes[rank])
    except BadInputError as error:
        raise UserError(f"{error}; or skip all broken input with --bad-input skip") from None
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        raise UserError(
            f"{error.filename or folder}: cannot be written ({error.strerror}). Finished work is kept; free up "
            "disk space and run the same command again"
        ) from None
    finally:
        with open(folder / SECONDS_FILE, "a", opener=own_file) as file:  # one line per run
            file.write(f"{time.monotonic() - began}\n")


def run_task(task: Callable[[int], Optional[Counts]], folder: Path, rank: int) -> int:
    """Run one task in this process, write its counts, and return its rank.

    If the command is killed, a resumed run first waits for tasks that are still running; see :func:`wait_for_workers`.
    """
    with worker_lock(folder.parent):
        write_json(folder / f"{rank:05d}.json", task(rank) or {}, durable=False)
    return rank


def worker_lock(tasks: Path) -> AbstractContextManager[None]:
    """Return a context manager that makes :func:`wait_for_workers` wait for the end of its block."""
    return file_lock(tasks / WORKERS_LOCK, shared=True)


def _run_on_executor(
    run: Callable[[int], int], ranks: Sequence[int], executor: Executor, begins_in: str
) -> Iterator[int]:
    """Run the tasks with the given ranks on an executor, and yield each rank when its task has finished."""
    rank_of = {Call(run, (rank,), begins_in): rank for rank in ranks}
    for ended in run_calls(list(rank_of), executor):
        if ended is None or ended.is_tried_again:
            continue
        if isinstance(ended.error, LostError):
            raise UserError(
                f"a worker died: {ended.error}. It was killed from outside, or by the system for lack of memory. "
                "Finished work is kept; run the same command again, with fewer --workers if memory ran out"
            )
        if ended.error is not None:
            raise ended.error
        yield rank_of[ended.call]


def wait_for_workers(folder: Path) -> None:
    """Wait until the tasks of a killed run have ended; its processes exit on their own within seconds."""
    folder.mkdir(exist_ok=True)
    with file_lock(folder / WORKERS_LOCK):
        pass
