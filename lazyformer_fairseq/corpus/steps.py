"""The interface of the steps that process a unit's documents, and the first step, which reads them.

The module also measures the length of text, converted to the number of letters and words that English would need,
because some scripts need fewer characters for the same content.
"""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any, ClassVar, Literal, Optional

from lazyformer_fairseq.corpus.readers.files import BadInputError, Piece, Watch, bytes_of
from lazyformer_fairseq.corpus.readers.formats import read_piece

EXAMPLES = 3
EXAMPLE_LENGTH = 160


@dataclass
class Document:
    """A document that passes through the steps, with one paragraph or sentence per line.

    Attributes:
        text: the text as changed by the steps so far.
        id: ``FILE:NUMBER``, see :class:`~lazyformer_fairseq.corpus.readers.formats.RawDocument`.
        metadata: ``format`` and the fields that the reader adds; after :class:`Fingerprint`, also the text's hashes.
    """

    text: str
    id: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class TaskNotes:
    """A task's notes for the report, in addition to its counts; they are shared by the task's steps.

    Attributes:
        examples: for each step, pairs of text before and after the step, cropped to the part around the first change.
        dropped: for each reason, the names of the first documents (or files) that were dropped.
        documents: the number of documents read from each file.
    """

    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    dropped: dict[str, list[str]] = field(default_factory=dict)
    documents: Counter[str] = field(default_factory=Counter)

    def add_example(self, step: str, before: str, after: str) -> None:
        """Keep the text before and after a step as an example, unless it is unchanged or there are enough examples."""
        examples = self.examples.setdefault(step, [])
        if len(examples) < EXAMPLES and before != after:
            place = len(commonprefix((before, after)))  # noqa: RUF071  texts, not paths
            window = slice(max(0, place - EXAMPLE_LENGTH // 4), place + EXAMPLE_LENGTH)
            examples.append((before[window], after[window]))

    def add_dropped(self, reason: str, name: str) -> None:
        """Keep the name of a dropped document or file, unless there are enough names for that reason."""
        names = self.dropped.setdefault(reason, [])
        if len(names) < EXAMPLES:
            names.append(name)


@dataclass
class DocumentStep:
    """A step that changes a document's text in place, or drops the document for a reason.

    In its ``counts``, ``documents in`` equals ``documents out`` plus the sum of all ``dropped: REASON``; there are also
    ``characters in`` and ``characters out``. Subclasses implement :meth:`process` and may add their own counts.
    """

    name: ClassVar[str]
    counts: Counter[str] = field(default_factory=Counter, init=False)
    notes: TaskNotes = field(default_factory=TaskNotes, init=False)

    @abstractmethod
    def process(self, document: Document) -> Optional[str]:
        """Change ``document`` in place; return None to pass it on, or the reason to drop it."""

    def run(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents that :meth:`process` passes on, and count documents and characters."""
        counts = self.counts
        for document in documents:
            before = document.text
            reason = self.process(document)
            counts["documents in"] += 1
            counts["characters in"] += len(before)
            if reason is not None:
                counts[f"dropped: {reason}"] += 1
                self.notes.add_dropped(reason, document.id)
                continue
            counts["documents out"] += 1
            counts["characters out"] += len(document.text)
            self.notes.add_example(self.name, before, document.text)
            yield document


# Chinese, Japanese and Korean characters. A text in these scripts has a third to half as many characters as its English
# translation, and Chinese and Japanese have no spaces. One character therefore counts as three letters, and two
# characters count as one word.
WIDE = re.compile("[\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff01-\uffdc\U00020000-\U0003ffff]")
LETTERS_OF_A_SIGN = 3
SIGNS_OF_A_WORD = 2


def length_in_letters(text: str) -> int:
    """Return the length of ``text`` in characters; a Chinese, Japanese or Korean character counts as three."""
    return len(text) + (LETTERS_OF_A_SIGN - 1) * _signs(text)


def has_words(text: str, at_least: int) -> bool:
    """Return whether a text has this many words or more; two Chinese, Japanese or Korean characters count as a word."""
    words = len(text.split(maxsplit=at_least))
    return words >= at_least or words + _signs(text) // SIGNS_OF_A_WORD >= at_least


def _signs(text: str) -> int:
    if text.isascii():
        return 0
    return len(WIDE.findall(text))


NOT_UTF8 = "lines not UTF-8"
BAD_RECORD = "bad record"
DAMAGED_FILE = "damaged file"


@dataclass
class ReadDocuments(DocumentStep):
    """The first step, which reads the pieces of a unit.

    Args:
        unit: the pieces to read, in order.
        bad_input: "stop" raises a BadInputError at a broken record or a damaged file; "skip" drops and counts broken
            records, and keeps the documents before the damage in a damaged file.
    """

    name = "read"
    unit: Sequence[Piece]
    bad_input: Literal["stop", "skip"] = "stop"

    def run(self, documents: Iterable[Document] = ()) -> Iterator[Document]:  # noqa: ARG002  (the first step)
        """Yield the unit's documents, and count them."""
        for piece in self.unit:
            watch = Watch()
            skip = None
            if self.bad_input == "skip":
                skip = self._skip_record
            try:
                for raw in read_piece(piece, watch, skip):
                    self.counts["documents out"] += 1
                    self.counts["characters out"] += len(raw.text)
                    self.notes.documents[piece.path] += 1
                    of_piece = {
                        "format": piece.format,
                        "left_out_namespaces": piece.left_out_namespaces,
                    }
                    yield Document(
                        raw.text,
                        f"{piece.path}:{raw.number}",
                        of_piece | raw.metadata,
                    )
                self.counts["pieces of files"] += 1
            except BadInputError as error:
                if self.bad_input == "stop":
                    raise
                self.counts[f"{DAMAGED_FILE}s"] += 1
                self.notes.add_dropped(DAMAGED_FILE, str(error))

            self.counts["bytes"] += bytes_of([piece])
            if watch.lines_not_utf8:
                self.counts[NOT_UTF8] += watch.lines_not_utf8
                self.notes.add_dropped(NOT_UTF8, piece.path)

    def _skip_record(self, error: BadInputError) -> None:
        self.counts[f"dropped: {BAD_RECORD}"] += 1
        self.notes.add_dropped(BAD_RECORD, str(error))
