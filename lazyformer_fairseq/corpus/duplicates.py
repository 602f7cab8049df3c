"""Finds documents that occur twice, or nearly, among any number of documents, in bounded memory; holds some out.

A hash of the text tells equal documents, and on request hashes that they share tell similar ones. The same hash decides
which documents are held out for validation.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from rensa import RMinHash

from lazyformer_fairseq.corpus.steps import Document, DocumentStep

# Punctuation outside ASCII: of Latin, general, of Chinese and Japanese, full-width.
PUNCTUATION = re.compile(
    "[\u0085\u00a0-\u00a9\u00ab-\u00b1\u00b4\u00b6-\u00b8\u00bb\u00bf\u1680\u2000-\u206f\u3000-\u3004\u3008-\u3020\uff00-\uff0f\uff1a-\uff20]+"
)
NOT_WORDS = bytes(c for c in range(128) if not chr(c).isalnum())
NOT_WORDS_TO_SPACES = bytes.maketrans(NOT_WORDS, b" " * len(NOT_WORDS))

SHINGLE = 5  # words
BANDS = 18
ROWS = 14
PERMUTATIONS = 256  # at least BANDS * ROWS = 252; rensa is quickest at powers of two
SEED = 1
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, made odd: a multiplier that spreads bits


@dataclass
class Fingerprint(DocumentStep):
    """Adds to a document's metadata ``fingerprint``: the (high, low) halves of a hash of its letters and digits.

    With ``near_duplicates`` also ``bands``: 18 integers of 64 bits (see :func:`bands`). The same text gives the same
    numbers on every machine; the bands may differ with another version of rensa.
    """

    name = "fingerprint"
    near_duplicates: bool = False

    def process(self, document: Document) -> None:
        """Add the hashes of a document to its metadata."""
        document.metadata["fingerprint"] = fingerprint(document.text)
        if self.near_duplicates:
            document.metadata["bands"] = bands(document.text)


def fingerprint(text: str) -> tuple[int, int]:
    """Return (high, low) 64 bits of xxh3-128 of the text's letters and digits; of the text itself where it has none.

    Case, spacing and punctuation do not count: other line breaks, curly quotes or an extra space make no difference.
    """
    letters = _folded(text).translate(None, NOT_WORDS)
    digest = xxhash.xxh3_128_intdigest(letters or "".join(text.split()).encode())
    return digest >> 64, digest & 0xFFFFFFFFFFFFFFFF


def bands(text: str) -> list[int]:
    """Return BANDS integers of 64 bits; similar texts share one or more.

    They are hashes of 14 MinHash values each (Broder 1997) of the set of runs of 5 words. Two texts whose sets have
    Jaccard similarity s share a band with chance 1 - (1 - s^14)^18: 1% at s = 0.6, 12% at 0.7, 55% at 0.8, 99% at 0.9.
    """
    words = _folded(text).translate(NOT_WORDS_TO_SPACES).split()
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, words), dtype=np.uint64, count=len(words))
    runs = max(1, len(words) - SHINGLE + 1)  # a text of fewer words is one run
    shingles = np.zeros(runs, dtype=np.uint64)
    for place in range(min(SHINGLE, len(words))):
        shingles = shingles * SPREAD + hashes[place : place + runs]
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(shingles, [0, runs], PERMUTATIONS, SEED)
    values = np.array(matrix.to_rows()[0][: BANDS * ROWS], dtype="<u4").reshape(BANDS, ROWS)
    return [xxhash.xxh3_64_intdigest(row.tobytes()) for row in values]


def _folded(text: str) -> bytes:
    """Return UTF-8 of the text, case-folded, with spaces for punctuation outside ASCII."""
    if text.isascii():
        return text.lower().encode()
    return PUNCTUATION.sub(" ", text.casefold()).encode()


def threshold(draws: Sequence[np.ndarray], valid_share: float) -> float:
    """Return the :func:`draw` below which documents are held out.

    It is the share, or, if no draw is that low, just above the lowest one.

    Args:
        draws: of the documents of each unit.
        valid_share: expected share of the documents; 0 for none.
    """
    lowest = min((unit.min() for unit in draws if len(unit)), default=1.0)
    several = sum(map(len, draws)) > 1
    if several and 0 < valid_share <= lowest:
        return np.nextafter(lowest, 1)
    return valid_share


def draw(fingerprints: np.ndarray, seed: int) -> np.ndarray:
    """Return a number in [0, 1) for each document, which depends on its text and the seed, never on its place.

    Args:
        seed: decides, with the text, which number a document gets.
        fingerprints: uint64 (documents, 2), or (2,) of one document.

    Returns:
        float64 (documents,), or one number.
    """
    fingerprints = np.asarray(fingerprints, dtype=np.uint64)
    mixed = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) ^ fingerprints[..., 0])
    mixed = _mix(mixed ^ fingerprints[..., 1]).reshape(fingerprints.shape[:-1])
    return (mixed >> np.uint64(11)) * 2.0**-53  # 53 bits: exact as a float


def _mix(values: np.ndarray) -> np.ndarray:
    """Return 64 bits mixed by a bijection that leaves no pattern; overflow is intended.

    Source: splitmix64 (Steele, Lea and Flood, 2014).
    """
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


KEEP, DUPLICATE, NEAR_DUPLICATE, HELD_OUT = range(4)
REASONS = {DUPLICATE: "duplicate", NEAR_DUPLICATE: "near duplicate"}
DOCUMENTS_PER_PARTITION = 4_000_000


def find_duplicates(
    fingerprints: Sequence[np.ndarray],
    bands: Sequence[np.ndarray] = (),
    documents_at_once: int = DOCUMENTS_PER_PARTITION,
) -> list[np.ndarray]:
    """Decide which documents to drop. The order is that of the units, and within a unit that of its documents.

    A document is a DUPLICATE if an earlier one has its fingerprint; else a NEAR_DUPLICATE if an earlier one, itself
    kept or not, has its hash in the same band. So the first of equal documents stays, and every one that
    has no similar one before it. How documents are divided into units makes no difference, nor ``documents_at_once``.

    Args:
        fingerprints: an item per unit, uint64 (documents, 2); memory-mapped if they are many.
        bands: an item per unit, uint64 (documents, bands); none, or with 0 columns, for exact duplicates alone.
        documents_at_once: bounds the memory: about 80 bytes for each of these, and 1 byte for each of all documents;
            equal ones stay together.

    Returns:
        an item per unit, uint8 (documents,): KEEP, DUPLICATE or NEAR_DUPLICATE.
    """
    decisions = [np.full(len(unit), KEEP, dtype=np.uint8) for unit in fingerprints]
    assert not bands or list(map(len, bands)) == list(map(len, fingerprints))
    _mark_repeated(fingerprints, decisions, DUPLICATE, documents_at_once)
    columns = max((unit.shape[1] for unit in bands), default=0)
    bands = [unit if len(unit) else np.empty((0, columns), np.uint64) for unit in bands]  # stored with none
    for band in range(columns):
        _mark_repeated(
            [unit[:, band : band + 1] for unit in bands],
            decisions,
            NEAR_DUPLICATE,
            documents_at_once,
        )
    return decisions


def _mark_repeated(
    units: Sequence[np.ndarray],
    decisions: list[np.ndarray],
    mark: int,
    at_once: int,
) -> None:
    """Mark every row, not marked yet, that equals an earlier row. Units: uint64 (documents, columns)."""
    partitions = np.uint64(-(-sum(map(len, units)) // at_once))
    for partition in range(int(partitions)):
        # By the top 32 bits of a hash, which are spread evenly.
        places = [
            np.flatnonzero((unit[:, 0] >> np.uint64(32)) * partitions >> np.uint64(32) == partition) for unit in units
        ]
        rows = np.concatenate([unit[found] for unit, found in zip(units, places, strict=True)])
        candidates = _may_be_repeated(rows[:, -1])
        order = candidates[np.lexsort(rows[candidates].T)]  # stable: of equal rows the earliest comes first
        repeated = np.zeros(len(rows), dtype=bool)
        repeated[order[1:]] = (rows[order[1:]] == rows[order[:-1]]).all(axis=1)
        ends = np.cumsum([len(found) for found in places])[:-1]
        for of_unit, found, again in zip(decisions, places, np.split(repeated, ends), strict=True):
            marked = found[again]
            of_unit[marked[of_unit[marked] == KEEP]] = mark


def _may_be_repeated(hashes: np.ndarray) -> np.ndarray:
    """Return the places of all hashes that occur more than once; sorting whole rows takes several times as long."""
    order = np.argsort(hashes)
    in_order = hashes[order]
    equals_next = in_order[1:] == in_order[:-1]
    is_repeated = np.zeros(len(hashes), dtype=bool)
    is_repeated[1:] = equals_next
    is_repeated[:-1] |= equals_next
    return np.sort(order[is_repeated])
