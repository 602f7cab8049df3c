"""The last step of a unit: its words become a store on disk (``word_store.py``)."""

import json
from array import array
from collections import defaultdict
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Optional

import numpy as np
from datatrove.data import Document, DocumentsPipeline

from lazyformer_fairseq.corpus.step import DocumentStep, TaskNotes
from lazyformer_fairseq.corpus.words.word_store import save_store
from lazyformer_fairseq.files.whole import whole_folder

NOTES_FILE = "notes.json"


class StoreWords(DocumentStep):
    """Writes ``folder/RANK/``, whole or not at all, after the last document, and the unit's notes with it.

    Takes documents of one sentence a line, words divided by single spaces; their metadata hold ``fingerprint``, two
    numbers of 64 bits, and perhaps ``bands``, as many such numbers for every document.
    """

    name = "store"

    def __init__(self, folder: Path, notes: Optional[TaskNotes] = None):
        super().__init__(notes)
        self.folder = Path(folder)

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        self._unit = _Unit()
        yield from super().run(data, rank, world_size)
        with (
            self.track_core_time(),
            whole_folder(self.folder / f"{rank:05d}", replace=True, durable=False) as unfinished,
        ):
            self._unit.save(unfinished)
            (unfinished / NOTES_FILE).write_text(json.dumps(asdict(self.notes), indent=1) + "\n", encoding="utf-8")
        del self._unit

    def process(self, document: Document) -> Optional[str]:
        if not document.text:
            return "no sentence"
        self._unit.add(document)
        return None


class _Unit:
    """The words of the documents so far. 4 bytes a word, and the distinct ones."""

    def __init__(self):
        self.ids: defaultdict[str, int] = defaultdict(count().__next__)  # a new word gets the next number
        self.words = array("I")
        self.sentence_lengths = array("I")
        self.document_sentences = array("I")
        self.fingerprints = array("Q")
        self.bands = array("Q")

    def add(self, document: Document) -> None:
        sentences = document.text.split("\n")
        for sentence in sentences:
            words = sentence.split(" ")
            self.words.extend(map(self.ids.__getitem__, words))
            self.sentence_lengths.append(len(words))
        self.document_sentences.append(len(sentences))
        self.fingerprints.extend(document.metadata["fingerprint"])
        self.bands.extend(document.metadata.get("bands", ()))

    def save(self, folder: Path) -> None:
        assert "" not in self.ids, "words must be divided by single spaces"
        vocabulary = sorted(self.ids)  # by code points, which is the order of the UTF-8 bytes too
        sorted_id = np.empty(len(vocabulary), dtype=np.uint32)
        sorted_id[[self.ids[word] for word in vocabulary]] = np.arange(len(vocabulary), dtype=np.uint32)
        documents = len(self.document_sentences)
        arrays = {
            "words": sorted_id[np.frombuffer(self.words, dtype=np.uint32)],
            "sentence_lengths": np.frombuffer(self.sentence_lengths, dtype=np.uint32),
            "document_sentences": np.frombuffer(self.document_sentences, dtype=np.uint32),
            "fingerprints": np.frombuffer(self.fingerprints, dtype=np.uint64).reshape(documents, 2),
            "bands": np.frombuffer(self.bands, dtype=np.uint64).reshape(
                documents, len(self.bands) // max(documents, 1)
            ),
        }
        save_store(folder, arrays, vocabulary)
