"""The pipeline's steps, each a datatrove block that takes documents and passes them on: their base, and the first one.

Also a measure of texts, in letters and words of English, for scripts that write more with fewer signs.
"""

import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Literal, Optional

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from lazyformer_fairseq.corpus.readers.documents import read_piece
from lazyformer_fairseq.corpus.readers.files import BadInput, Piece, Watch, bytes_of

EXAMPLES = 3
EXAMPLE_LENGTH = 160


@dataclass
class TaskNotes:
    """A task's notes for the report, beside its numbers; the steps of one task share them.

    Attributes:
        examples: by step, pairs of text before and after, around the first place that the step changed.
        dropped: by reason, names of the first documents (or files) dropped.
        documents: by file, how many documents were read.
    """

    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    dropped: dict[str, list[str]] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)

    def add_example(self, step: str, before: str, after: str) -> None:
        examples = self.examples.setdefault(step, [])
        if len(examples) < EXAMPLES and before != after:
            place = len(commonprefix((before, after)))  # noqa: RUF071  of characters, not of folders
            window = slice(max(0, place - EXAMPLE_LENGTH // 4), place + EXAMPLE_LENGTH)
            examples.append((before[window], after[window]))

    def count_document(self, file: str) -> None:
        self.documents[file] = self.documents.get(file, 0) + 1

    def add_dropped(self, reason: str, name: str) -> None:
        names = self.dropped.setdefault(reason, [])
        if len(names) < EXAMPLES:
            names.append(name)


class CorpusStep(PipelineStep):
    """Counts and notes that all steps of a corpus share."""

    type = "corpus"

    def __init__(self):
        super().__init__()
        self.notes = TaskNotes()  # the steps of one task get one, see ``stages.py``

    @contextmanager
    def track_core_time(self) -> Iterator[None]:
        """Adds the block's core time to ``core seconds``; datatrove's ``track_time`` counts waiting too."""
        began = time.process_time()
        yield
        self.stat_update("core seconds", value=time.process_time() - began)


class DocumentStep(CorpusStep):
    """A step that changes a document's text in place, or drops the document for a reason.

    Its statistics: ``documents in`` = ``documents out`` + the sum of all ``dropped: REASON``; characters in, out;
    core seconds.
    A subclass writes :meth:`process`, and counts whatever else it likes with ``self.stat_update(label, value=n)``.
    """

    @abstractmethod
    def process(self, document: Document) -> Optional[str]:
        """Changes ``document`` in place. None: passes it on; a string: drops it for this reason."""

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        for document in data:
            before = document.text
            with self.track_core_time():
                reason = self.process(document)
            self.stat_update("documents in")
            self.stat_update("characters in", value=len(before))
            if reason is not None:
                self.stat_update(f"dropped: {reason}")
                self.notes.add_dropped(reason, document.id)
                continue
            self.stat_update("documents out")
            self.stat_update("characters out", value=len(document.text))
            self.notes.add_example(self.name, before, document.text)
            yield document


# Letters and marks of Chinese, Japanese and Korean. Their texts have a third to a half of the characters of an English
# one, and Chinese and Japanese no spaces: a sign counts for three letters, two signs for a word.
WIDE = re.compile("[\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff01-\uffdc\U00020000-\U0003ffff]")
LETTERS_OF_A_SIGN, SIGNS_OF_A_WORD = 3, 2


def length_in_letters(text: str) -> int:
    """Characters, each sign of Chinese, Japanese or Korean counted for three."""
    return len(text) + (LETTERS_OF_A_SIGN - 1) * _signs(text)


def has_words(text: str, at_least: int) -> bool:
    """Whether so many words are in ``text``: between spaces, and of two signs of Chinese, Japanese or Korean each."""
    words = len(text.split(maxsplit=at_least))
    return words >= at_least or words + _signs(text) // SIGNS_OF_A_WORD >= at_least


def _signs(text: str) -> int:
    return 0 if text.isascii() else len(WIDE.findall(text))


PROGRESS_BYTES = 1 << 18
NOT_UTF8 = "lines not UTF-8"


def report_to_nobody(rank: int, bytes_done: int) -> None:
    """A function with a name, because a lambda could not be sent to a worker."""


class ReadDocuments(CorpusStep):
    """Reads the unit whose number is the task's.

    A document's id is ``FILE:NUMBER`` (see :class:`~lazyformer_fairseq.corpus.readers.documents.RawDocument`), its
    metadata {"format": ...} and what the reader adds.

    Args:
        units: of each task, the pieces to read.
        bad_files: "stop" raises :class:`BadInput` at a damaged file; "skip" counts it, keeps the documents before the
        damage, and continues with the next file.
        progress: called now and then with the task's number, and the bytes on disk of its whole unit consumed so far.
    """

    name = "read"

    def __init__(
        self,
        units: Sequence[tuple[Piece, ...]],
        bad_files: Literal["stop", "skip"] = "stop",
        progress: Callable[[int, int], None] = report_to_nobody,
    ):
        super().__init__()
        self.units, self.bad_files, self.progress = units, bad_files, progress

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        bytes_before = 0
        for piece in self.units[rank]:
            size = bytes_of([piece])
            try:
                yield from self._documents(rank, piece, size, bytes_before)
                self.stat_update("pieces of files")
            except BadInput as error:
                if self.bad_files == "stop":
                    raise
                self.stat_update("files skipped")
                self.notes.add_dropped("bad file", str(error))
            bytes_before += size
            self.stat_update("bytes", value=size)
            self.progress(rank, bytes_before)

    def _documents(self, rank: int, piece: Piece, size: int, bytes_before: int) -> DocumentsPipeline:
        watch = Watch()
        reported = 0
        documents = read_piece(piece, watch)
        try:
            while True:
                with self.track_core_time():
                    raw = next(documents, None)
                if raw is None:
                    break
                self.stat_update("documents out")
                self.stat_update("characters out", value=len(raw.text))
                self.notes.count_document(piece.path)
                if watch.bytes_done >= reported + PROGRESS_BYTES:
                    reported = watch.bytes_done
                    self.progress(rank, bytes_before + min(reported, size))  # it reads ahead
                yield Document(raw.text, f"{piece.path}:{raw.number}", metadata={"format": piece.format} | raw.metadata)
        finally:
            if watch.lines_not_utf8:
                self.stat_update(NOT_UTF8, value=watch.lines_not_utf8)
                self.notes.add_dropped(NOT_UTF8, piece.path)
