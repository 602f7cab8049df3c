"""Counts words, in order to drop rare ones and to train the tokenizer, and encodes words as token ids.

Each unit's counts are stored in a folder:

    COUNTS/hashes.npy      uint64 (words,): xxh3_64 of each distinct word in the unit, sorted
    COUNTS/counts.npy      uint64 (words,): number of occurrences of each word
    COUNTS/vocabulary.bin  the words themselves, in hash order, in the format of a word store (see ``words.py``)

The counts of all units are merged by hash, which takes about 60 bytes of memory per distinct word. Two words with the
same 64-bit hash would count as one word; the probability that 10 million words contain such a pair is 3 in a million.

The token ids are stored in fairseq's memory-mapped format, one part per unit and split:

    PREFIX.bin  PREFIX.idx   one item per sentence, which ends with ``</s>``, and after each document one item with only
                             ``</s>``, just as fairseq-preprocess writes for an empty line after each document
    PREFIX.unigrams.npy      uint32 (2, ids): the ids that occur, except ``</s>``, and how often each of them occurs

Each distinct word in a unit is encoded only once; numpy then copies its ids to every place where the word occurs.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lazyformer_fairseq.corpus.words import VOCABULARY_FILE, SelectedWords, WordStore, join_words, split_words
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.normalisation import MASK
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import atomic_file, atomic_folder
from lazyformer_fairseq.storage.indexed_format import type_of_ids, write_items

MOST_WORDS_FOR_BPE = 1_000_000
ENTRIES_AT_ONCE = 4_000_000  # number of pending entries to merge in one sort


def smallest_kept_count(counts: np.ndarray, coverage: float) -> int:
    """Return the largest count such that words occurring at least that often make up ``coverage`` of the running text.

    Args:
        counts: number of occurrences of each distinct word, integers (words,).
        coverage: fraction of the running text to keep.
    """
    values, types = np.unique(counts, return_counts=True)
    running_words = values.astype(np.int64) * types  # with exactly this count
    kept = np.cumsum(running_words[::-1])  # with at least this count, from the largest count to the smallest
    first_sufficient = np.argmax(kept >= coverage * kept[-1])
    return int(values[::-1][first_sufficient])


def word_hashes(words: Sequence[str]) -> np.ndarray:
    """Return the xxh3_64 hash of each word's UTF-8 bytes, uint64 (words,)."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, words), dtype=np.uint64, count=len(words))


def count_words(store: WordStore, keep: np.ndarray, folder: Path) -> None:
    """Count the words in the selected documents of a unit, and write the counts to ``folder``.

    Args:
        store: the unit's words.
        keep: mask of the documents to count, bool (documents,).
        folder: receives the counts; it is written atomically.
    """
    vocabulary = store.vocabulary
    counts = np.bincount(store.select(keep).words, minlength=len(vocabulary)).astype(np.uint64)
    hashes = word_hashes(vocabulary)
    order = np.argsort(hashes)
    order = order[counts[order] > 0]
    with atomic_folder(folder, replace=True, durable=False) as unfinished:
        np.save(unfinished / "hashes.npy", hashes[order], allow_pickle=False)
        np.save(unfinished / "counts.npy", counts[order], allow_pickle=False)
        (unfinished / VOCABULARY_FILE).write_bytes(join_words([vocabulary[row] for row in order.tolist()]))


def merge_counts(
    folders: Sequence[Path],
    kept_file: Path,
    coverage: float,
    always_kept: Sequence[str] = (),
    most_frequent: int = MOST_WORDS_FOR_BPE,
) -> tuple[dict[str, float], list[tuple[str, int]]]:
    """Merge the counts that :func:`count_words` wrote for each unit, and write the hashes of the kept words.

    Args:
        folders: folders of the units' counts.
        kept_file: receives the sorted hashes of the kept words, uint64 (kept words,), as .npy; it exists only after a
            successful merge.
        coverage: see :func:`smallest_kept_count`; rarer words become ``<unk>``.
        always_kept: words to keep even if they are rare.
        most_frequent: maximum number of words to return; words with the same count are returned together or not at all.

    Returns:
        a summary for the manifest, and the most frequent kept words with their counts, sorted by decreasing count and
        then alphabetically.

    Raises:
        UserError: the training documents contain no words.
    """
    hashes, counts = _merged(folders)
    if not len(hashes):
        raise UserError("the training documents contain no words; use more documents, or hold out fewer of them")
    min_count = smallest_kept_count(counts, coverage)
    is_kept = (counts >= min_count) | np.isin(hashes, word_hashes(always_kept))
    with atomic_file(kept_file) as file:
        np.save(file, hashes[is_kept], allow_pickle=False)

    least = min_count
    if len(counts) > most_frequent:
        first_left_out = -most_frequent - 1
        count_left_out = int(np.partition(counts, first_left_out)[first_left_out])
        least = max(min_count, count_left_out + 1)
    is_frequent = counts >= least
    words = _find_words(hashes[is_frequent], folders)
    frequent = zip(words, counts[is_frequent].tolist(), strict=True)

    kept_words = int(is_kept.sum())
    summary = {
        "words": len(hashes),
        "kept_words": kept_words,
        "min_count": min_count,
        "dropped_types_share": 1 - kept_words / len(hashes),
        "dropped_tokens_share": 1 - int(counts[is_kept].sum()) / int(counts.sum()),
    }
    return summary, sorted(frequent, key=lambda pair: (-pair[1], pair[0]))


def _merged(folders: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct hashes of all units in sorted order, and their counts; one sort merges several units."""
    merged = np.empty((2, 0), dtype=np.uint64)
    waiting: list[np.ndarray] = []
    for folder in folders:
        waiting.append(np.stack([_mapped(folder, "hashes"), _mapped(folder, "counts")]))
        entries_waiting = sum(unit.shape[1] for unit in waiting)
        if folder != folders[-1] and entries_waiting < max(ENTRIES_AT_ONCE, merged.shape[1]):
            continue
        entries = np.concatenate([merged, *waiting], axis=1)
        waiting = []
        entries = entries[:, np.argsort(entries[0])]
        hashes, counts = entries
        starts = np.flatnonzero(np.diff(hashes, prepend=~hashes[:1]))
        merged = np.stack([hashes[starts], np.add.reduceat(counts, starts)])
    return merged[0], merged[1]


def _find_words(wanted: np.ndarray, folders: Sequence[Path]) -> list[str]:
    """Return the words with the given sorted hashes, each from the first unit that contains it."""
    words = [""] * len(wanted)
    missing = np.ones(len(wanted), dtype=bool)
    for folder in folders:
        hashes = np.array(_mapped(folder, "hashes"))
        places = lookup(hashes, wanted)
        rows = np.flatnonzero(places >= 0)
        rows = rows[missing[places[rows]]]
        places = places[rows]
        if len(rows):
            vocabulary = split_words((folder / VOCABULARY_FILE).read_bytes())
            for row, place in zip(rows.tolist(), places.tolist(), strict=True):
                words[place] = vocabulary[row]
            missing[places] = False
    assert not missing.any()
    return words


def lookup(hashes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the index of each hash in the sorted ``table``, or -1 if it is not there."""
    if not len(table):
        return np.full(len(hashes), -1)
    places = np.minimum(np.searchsorted(table, hashes), len(table) - 1)
    return np.where(table[places] == hashes, places, -1)


def _mapped(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)


def write_ids(
    store: WordStore,
    keep: Mapping[str, np.ndarray],
    tokenizer: TextTokenizer,
    frequent: np.ndarray,
    prefix: Path,
) -> dict[str, dict[str, Any]]:
    """Write a unit's part of each split to files ``PREFIX.SPLIT.*``, each of which is written atomically.

    Args:
        store: the unit's words.
        keep: for each split, a mask of its documents, bool (documents,).
        tokenizer: encodes the words.
        frequent: sorted hashes of the words that are frequent enough, uint64. In the training split, each of the
            remaining words becomes a single ``<unk>``. In the validation split, all words are encoded as tokens, as
            they are when the model is used for GLUE or ``fill_mask``.
        prefix: path without the split and the suffix.

    Returns:
        for each split, counts that can be summed over units: ``documents``, ``sentences``, ``words`` (separated by
        spaces, before normalization), ``tokens`` (without ``</s>``) and ``unknown`` (``<unk>`` tokens).
    """
    hashes = word_hashes(store.vocabulary)
    special_hashes = word_hashes(tokenizer.settings.special_tokens)
    is_frequent = (lookup(hashes, frequent) >= 0) | np.isin(hashes, special_hashes)
    counts = {}
    for split, documents in keep.items():
        selected = store.select(documents)
        spelt = np.bincount(selected.words, minlength=len(hashes)) > 0
        if split == "train":
            spelt &= is_frequent
        pieces = WordPieces(store.vocabulary, tokenizer, spelt)
        counts[split] = _write_part(selected, pieces, tokenizer, f"{prefix}.{split}")
        counts[split]["words"] = int(store.running_words[documents].sum(dtype=np.int64))
    return counts


class WordPieces:
    """The token ids of every word in a unit's vocabulary, with ``</s>`` as an additional last word.

    Args:
        vocabulary: the words.
        tokenizer: encodes the words.
        spelt: mask of the words to encode, bool (words,); each of the remaining words becomes ``<unk>``.

    Attributes:
        ids: the concatenated ids of all words, in the integer type that fairseq stores.
        lengths: number of ids per word, (words + 1,).
        starts: index of each word's first id, (words + 1,).
    """

    def __init__(self, vocabulary: list[str], tokenizer: TextTokenizer, spelt: np.ndarray):
        # Only the task may mask, so "<mask>" in a text is encoded as plain text.
        plain_mask = f"{MASK[0]} {MASK[1:-1]} {MASK[-1]}"
        words = [plain_mask if word == MASK else word for word in vocabulary]
        spelt_words = [word for word, is_spelt in zip(words, spelt, strict=True) if is_spelt]
        ids, lengths = tokenizer.encode_words(spelt_words)

        spelt = spelt.copy()
        spelt[spelt] = lengths > 0  # a word that consists of sentencepiece's space symbol has no tokens
        self.lengths = np.ones(len(words) + 1, dtype=np.int32)
        self.lengths[:-1][spelt] = lengths[lengths > 0]
        self.starts = np.cumsum(self.lengths) - self.lengths

        dtype = type_of_ids(len(tokenizer.symbols))
        self.ids = np.full(self.lengths.sum(), tokenizer.special.unk, dtype)
        is_of_spelt_word = np.repeat(np.append(spelt, False), self.lengths)
        self.ids[is_of_spelt_word] = ids
        self.ids[-1] = tokenizer.special.eos

    def items(self, selected: SelectedWords) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of all items in the selected documents, and the length of each item."""
        eos_word = len(self.lengths) - 1
        sentence_ends = np.cumsum(selected.sentence_lengths, dtype=np.int64)
        document_ends = sentence_ends[np.cumsum(selected.document_sentences, dtype=np.int64) - 1]
        words = np.insert(selected.words, np.concatenate([sentence_ends, document_ends]), eos_word)
        lengths = self.lengths[words]
        ends = np.cumsum(lengths, dtype=np.int64)
        # A word whose ids end before index e of the result starts at index e - length. Index i of the result therefore
        # receives the id at index starts + i - (e - length).
        source = np.repeat(self.starts[words] - (ends - lengths), lengths)
        source += np.arange(len(source))
        item_ends = ends[words == eos_word]
        return self.ids[source], np.diff(item_ends, prepend=0)


def _write_part(
    selected: SelectedWords,
    pieces: WordPieces,
    tokenizer: TextTokenizer,
    prefix: str,
) -> dict[str, Any]:
    ids, sizes = pieces.items(selected)
    unigrams = np.bincount(ids, minlength=len(tokenizer.symbols))
    unigrams[tokenizer.special.eos] = 0
    found = np.flatnonzero(unigrams)
    with atomic_file(f"{prefix}.unigrams.npy", durable=False) as file:
        occurrences = np.stack([found, unigrams[found]]).astype(np.uint32)
        np.save(file, occurrences, allow_pickle=False)
    write_items(prefix, ids.dtype, [(ids, sizes)], durable=False)
    return {
        "documents": len(selected.document_sentences),
        "sentences": len(selected.sentence_lengths),
        "tokens": int(unigrams.sum()),
        "unknown": int(unigrams[tokenizer.special.unk]),
    }


def load_unigrams(prefixes: Iterable[Path], symbols: int) -> np.ndarray:
    """Return the number of occurrences of each id in all parts together, int64 (symbols,)."""
    total = np.zeros(symbols, dtype=np.int64)
    for prefix in prefixes:
        ids, counts = np.load(f"{prefix}.unigrams.npy", allow_pickle=False)
        total[ids] += counts
    return total
