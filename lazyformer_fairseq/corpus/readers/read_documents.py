"""The pipeline's first step: documents of a unit's files."""

from collections.abc import Callable, Sequence
from typing import Literal

from datatrove.data import Document, DocumentsPipeline

from lazyformer_fairseq.corpus.readers.blocks import Piece, Watch
from lazyformer_fairseq.corpus.readers.compressed import BadInput
from lazyformer_fairseq.corpus.readers.documents import read_piece
from lazyformer_fairseq.corpus.readers.units import bytes_of
from lazyformer_fairseq.corpus.step import CorpusStep

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
