"""The base of the corpus pipeline's steps: each is a datatrove block that takes documents and passes them on."""

import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Optional

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

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
