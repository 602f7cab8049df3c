"""The steps that a unit's documents go through: what they share, and the first one.

Also a measure of texts, in letters and words of English, for scripts that write more with fewer signs.
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
    """A text on its way, one paragraph or sentence a line.

    Attributes:
        id: ``FILE:NUMBER``, see :class:`~lazyformer_fairseq.corpus.readers.formats.RawDocument`.
        metadata: {"format": ...}, what the reader adds, and from :class:`Fingerprint` on its numbers.
    """

    text: str
    id: str
    metadata: dict[str, Any] = field(default_factory=dict)


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
    documents: Counter[str] = field(default_factory=Counter)

    def add_example(self, step: str, before: str, after: str) -> None:
        """Keep the text before and after a step, around the first place that it changed."""
        examples = self.examples.setdefault(step, [])
        if len(examples) < EXAMPLES and before != after:
            place = len(commonprefix((before, after)))  # noqa: RUF071  of characters, not of folders
            window = slice(max(0, place - EXAMPLE_LENGTH // 4), place + EXAMPLE_LENGTH)
            examples.append((before[window], after[window]))

    def add_dropped(self, reason: str, name: str) -> None:
        """Keep the name of a document or file that was dropped."""
        names = self.dropped.setdefault(reason, [])
        if len(names) < EXAMPLES:
            names.append(name)


@dataclass
class DocumentStep:
    """A step that changes a document's text in place, or drops the document for a reason.

    Its ``counts``: ``documents in`` = ``documents out`` + the sum of all ``dropped: REASON``; characters in, out.
    A subclass writes :meth:`process`, and counts whatever else it likes.
    """

    name: ClassVar[str]
    counts: Counter[str] = field(default_factory=Counter, init=False)
    notes: TaskNotes = field(default_factory=TaskNotes, init=False)

    @abstractmethod
    def process(self, document: Document) -> Optional[str]:
        """Change ``document`` in place. None: passes it on; a string: drops it for this reason."""

    def run(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents that :meth:`process` passes on, and count."""
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


# Letters and marks of Chinese, Japanese and Korean. Their texts have a third to a half of the characters of an English
# one, and Chinese and Japanese no spaces: a sign counts for three letters, two signs for a word.
WIDE = re.compile("[\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff01-\uffdc\U00020000-\U0003ffff]")
LETTERS_OF_A_SIGN = 3
SIGNS_OF_A_WORD = 2


def length_in_letters(text: str) -> int:
    """Return the number of characters; a sign of Chinese, Japanese or Korean counts as three."""
    return len(text) + (LETTERS_OF_A_SIGN - 1) * _signs(text)


def has_words(text: str, at_least: int) -> bool:
    """Return whether ``text`` has so many words; two signs of Chinese, Japanese or Korean count as one."""
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
    """The first step: reads the pieces of a unit.

    Args:
        bad_input: "stop" raises a BadInputError at a broken record or a damaged file; "skip" drops and counts the
            record, and of the file keeps the documents before the damage.
    """

    name = "read"
    unit: Sequence[Piece]
    bad_input: Literal["stop", "skip"] = "stop"

    def run(self, documents: Iterable[Document] = ()) -> Iterator[Document]:  # noqa: ARG002  (the first step)
        """Yield the documents of the unit, and count."""
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
