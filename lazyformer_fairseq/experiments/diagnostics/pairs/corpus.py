"""The documents of a prepared corpus, from all its splits and shards."""

from pathlib import Path

import numpy as np

from lazyformer_fairseq.data.datasets.sentence_pairs import Documents
from lazyformer_fairseq.data.text.interface import SETTINGS_FILE, TextTokenizer
from lazyformer_fairseq.data.text.load_tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.tasks.full_sentences_masked_lm import data_folders, tokenizer_of
from lazyformer_fairseq.storage.hashes import sha256_of
from lazyformer_fairseq.storage.indexed_format import MappedItems


class CorpusDocuments:
    """Documents as tokens without the ``</s>`` of their sentences.

    Args:
        corpus: what ``lazyformer corpus`` wrote.

    Attributes:
        tokenizer: the corpus's.
        sizes: tokens of each document, (documents,).
        sha256: of where sentences end, by file.

    Raises:
        UserError: no such data, or no tokenizer beside it.
    """

    def __init__(self, corpus: Path):
        folders = list(map(Path, data_folders(str(corpus))))
        tokenizer = tokenizer_of(str(folders[0]))
        if not (tokenizer / SETTINGS_FILE).is_file():
            raise UserError(f"{corpus}: no tokenizer beside the data; give what `lazyformer corpus` wrote, or raw text")
        self.tokenizer: TextTokenizer = load_tokenizer(tokenizer)
        prefixes = [folder / split for folder in folders for split in ("train", "valid")]
        prefixes = [prefix for prefix in prefixes if prefix.with_suffix(".idx").is_file()]
        if not prefixes:
            raise UserError(f"{corpus}: holds no train.idx; give what `lazyformer corpus` wrote, or raw text")
        self.sha256 = {str(prefix.relative_to(corpus)): sha256_of(prefix.with_suffix(".idx")) for prefix in prefixes}
        self._items = list(map(MappedItems, prefixes))
        self._documents = [Documents(items.sizes) for items in self._items]
        self._ends = np.cumsum(list(map(len, self._documents)))
        self.sizes = np.concatenate([each.size(each.starts, each.ends) for each in self._documents])

    def __len__(self) -> int:
        return len(self.sizes)

    def read(self, number: int) -> np.ndarray:
        """The tokens of a document, (T,)."""
        part = int(np.searchsorted(self._ends, number, side="right"))
        within = number - (int(self._ends[part - 1]) if part else 0)
        documents = self._documents[part]
        ids = self._items[part].read(int(documents.starts[within]), int(documents.ends[within]) - 1)
        return ids[ids != self.tokenizer.special.eos]
