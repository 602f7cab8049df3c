"""Stored words -> ids in fairseq's memory-mapped format, one part for each unit and split.

    PREFIX.bin  PREFIX.idx   a sentence an item, ending ``</s>``; an item of ``</s>`` alone after each document: what
                             fairseq-preprocess writes for lines of pieces with an empty line after each document
    PREFIX.unigrams.npy      uint32 (2, ids): the ids that occur, ``</s>`` left out, and how often each of them does

Each distinct word of the unit is encoded once; numpy does the rest.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lazyformer_fairseq.corpus.words.vocabulary import place_of, word_hashes
from lazyformer_fairseq.corpus.words.word_store import SelectedWords, WordStore
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.normalisation import MASK
from lazyformer_fairseq.storage.atomic import atomic_file
from lazyformer_fairseq.storage.indexed_format import type_of_ids, write_items

# Of length histograms: 1, 2, ... 8, 10, 11, 13, 16, ... 2 ** 26, four bins to a doubling.
LENGTH_EDGES = np.unique(np.round(2 ** (np.arange(4 * 26 + 1) / 4)).astype(np.int64))


def write_ids(
    store: WordStore,
    keep: Mapping[str, np.ndarray],
    tokenizer: TextTokenizer,
    frequent: np.ndarray,
    prefixes: Mapping[str, Path],
) -> dict[str, dict[str, Any]]:
    """Writes a unit's part of each split, each file whole or not at all.

    Args:
        keep: by split, bool (documents,): those that are in it.
        frequent: uint64, sorted: the hashes of the words that are frequent enough (see ``vocabulary.py``). In the
            training split every other word becomes one ``<unk>``. The validation split asks what a model in use is
            asked, in GLUE and in ``fill_mask``: there pieces spell every word.

    Returns:
        by split, counts that may be added up over units: ``documents``; ``sentences``; ``tokens``, ``</s>`` left out;
        ``unknown`` ones among these; ``lengths``: for "words per sentence", "words per document" and "sentences per
        document" the counts of the bins between ``LENGTH_EDGES``.
    """
    hashes = word_hashes(store.vocabulary)
    is_frequent = (place_of(hashes, frequent) >= 0) | np.isin(hashes, word_hashes(tokenizer.settings.special_tokens))
    counts = {}
    for split, documents in keep.items():
        selected = store.select(documents)
        spelt = np.bincount(selected.words, minlength=len(hashes)) > 0
        pieces = WordPieces(store.vocabulary, tokenizer, spelt & is_frequent if split == "train" else spelt)
        counts[split] = _write_part(selected, pieces, tokenizer, prefixes[split])
    return counts


class WordPieces:
    """The ids of every word of a unit's vocabulary, with ``</s>`` as one more word at the end.

    Args:
        spelt: bool (words,): the words that become pieces; each other one becomes ``<unk>``.

    Attributes:
        ids: of all words, one word after the other, in the type that fairseq stores them in.
        lengths: (words + 1,): number of ids of each word.
        starts: (words + 1,): place of each word's first id.
    """

    def __init__(self, vocabulary: list[str], tokenizer: TextTokenizer, spelt: np.ndarray):
        # Only the task masks; a text about masks is text.
        words = [f"{MASK[0]} {MASK[1:-1]} {MASK[-1]}" if word == MASK else word for word in vocabulary]
        ids, lengths = tokenizer.encode_words([word for word, is_spelt in zip(words, spelt, strict=True) if is_spelt])
        spelt = spelt.copy()
        spelt[spelt] = lengths > 0  # a word made of sentencepiece's space sign has none
        self.lengths = np.ones(len(words) + 1, dtype=np.int32)
        self.lengths[:-1][spelt] = lengths[lengths > 0]
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.ids = np.full(self.lengths.sum(), tokenizer.special.unk, dtype=type_of_ids(len(tokenizer.symbols)))
        self.ids[np.repeat(np.append(spelt, False), self.lengths)] = ids
        self.ids[-1] = tokenizer.special.eos

    def items(self, selected: SelectedWords) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all items of some documents, one item after the other, and the number of ids of each item."""
        eos_word = len(self.lengths) - 1
        sentence_ends = np.cumsum(selected.sentence_lengths, dtype=np.int64)
        document_ends = sentence_ends[np.cumsum(selected.document_sentences, dtype=np.int64) - 1]
        words = np.insert(selected.words, np.concatenate([sentence_ends, document_ends]), eos_word)
        lengths = self.lengths[words]
        ends = np.cumsum(lengths, dtype=np.int64)
        # Id number i of a word whose ids end before place e of the result: starts + i, with i = place - (e - length).
        source = np.repeat(self.starts[words] - (ends - lengths), lengths)
        source += np.arange(len(source))
        return self.ids[source], np.diff(ends[words == eos_word], prepend=0)


def _write_part(selected: SelectedWords, pieces: WordPieces, tokenizer: TextTokenizer, prefix: Path) -> dict[str, Any]:
    ids, sizes = pieces.items(selected)
    unigrams = np.bincount(ids, minlength=len(tokenizer.symbols))
    unigrams[tokenizer.special.eos] = 0
    found = np.flatnonzero(unigrams)
    with atomic_file(f"{prefix}.unigrams.npy", durable=False) as file:
        np.save(file, np.stack([found, unigrams[found]]).astype(np.uint32), allow_pickle=False)
    write_items(prefix, ids.dtype, [(ids, sizes)], durable=False)
    sentences = selected.document_sentences.astype(np.int64)
    starts = np.cumsum(sentences) - sentences
    words = np.add.reduceat(selected.sentence_lengths, starts, dtype=np.int64) if len(starts) else starts
    return {
        "documents": len(sentences),
        "sentences": len(selected.sentence_lengths),
        "tokens": int(unigrams.sum()),
        "unknown": int(unigrams[tokenizer.special.unk]),
        "lengths": {
            "words per sentence": length_histogram(selected.sentence_lengths),
            "words per document": length_histogram(words),
            "sentences per document": length_histogram(sentences),
        },
    }


def load_unigrams(prefixes: Iterable[Path], symbols: int) -> np.ndarray:
    """How often each id occurs in some parts together: int64 (symbols,)."""
    total = np.zeros(symbols, dtype=np.int64)
    for prefix in prefixes:
        ids, counts = np.load(f"{prefix}.unigrams.npy", allow_pickle=False)
        total[ids] += counts
    return total


def length_histogram(lengths: np.ndarray) -> list[int]:
    """How many of the lengths (1 or more) fall into each bin between LENGTH_EDGES; the last bin has no end."""
    counts, _ = np.histogram(np.minimum(lengths, LENGTH_EDGES[-1]), LENGTH_EDGES)
    return counts.tolist()
