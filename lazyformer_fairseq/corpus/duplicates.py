"""Finds duplicate and near-duplicate documents, using little memory even for many documents.

Identical documents have the same text hash. Similar documents, which are detected only on request, share at least one
of several additional hashes. The text hash also determines which documents are held out for validation.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from rensa import RMinHash

from lazyformer_fairseq.corpus.steps import Document, DocumentStep
from lazyformer_fairseq.corpus.vocabulary import word_hashes

# Non-ASCII punctuation: Latin, general, Chinese and Japanese, full-width.
PUNCTUATION = re.compile(
    "[\u0085\u00a0-\u00a9\u00ab-\u00b1\u00b4\u00b6-\u00b8\u00bb\u00bf\u1680\u2000-\u206f\u3000-\u3004\u3008-\u3020\uff00-\uff0f\uff1a-\uff20]+"
)
NOT_WORDS = bytes(c for c in range(128) if not chr(c).isalnum())
NOT_WORDS_TO_SPACES = bytes.maketrans(NOT_WORDS, b" " * len(NOT_WORDS))

SHINGLE = 5  # words
BANDS = 18
ROWS = 14
PERMUTATIONS = 256  # at least BANDS * ROWS = 252; rensa is fastest at powers of two
SEED = 1
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, made odd: a multiplier that spreads bits


@dataclass
class Fingerprint(DocumentStep):
    """The step that adds a ``fingerprint`` to the metadata: the two halves of a hash of the text's letters and digits.

    With ``near_duplicates``, it also adds ``bands``, which are 18 integers (see :func:`bands`). The same text has the
    same fingerprint and bands on every machine; only the bands may differ between versions of rensa.
    """

    name = "fingerprint"
    near_duplicates: bool = False

    def process(self, document: Document) -> None:
        """Add a document's hashes to its metadata."""
        document.metadata["fingerprint"] = fingerprint(document.text)
        if self.near_duplicates:
            document.metadata["bands"] = bands(document.text)


def fingerprint(text: str) -> tuple[int, int]:
    """Return the high and the low 64 bits of the xxh3-128 hash of a text's letters and digits.

    Case, spacing and punctuation are ignored, so line breaks, curly quotes or an extra space make no difference. If a
    text has no letters or digits, all its characters except spaces are hashed.
    """
    letters = _folded(text).translate(None, NOT_WORDS)
    digest = xxhash.xxh3_128_intdigest(letters or "".join(text.split()).encode())
    return digest >> 64, digest & 0xFFFFFFFFFFFFFFFF


def bands(text: str) -> list[int]:
    """Return a text's LSH bands: BANDS 64-bit integers, at least one of which similar texts are likely to share.

    Each is a hash of 14 MinHash values (Broder, 1997) of the text's set of 5-word shingles. Two texts whose sets have
    Jaccard similarity s share a band with probability 1 - (1 - s^14)^18: 1% at s = 0.6, 12% at 0.7, 55% at 0.8, 99% at
    0.9.
    """
    words = _folded(text).translate(NOT_WORDS_TO_SPACES).split()
    hashes = word_hashes(words)
    runs = max(1, len(words) - SHINGLE + 1)  # a shorter text is a single shingle
    shingles = np.zeros(runs, dtype=np.uint64)
    for place in range(min(SHINGLE, len(words))):
        shingles = shingles * SPREAD + hashes[place : place + runs]
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(shingles, [0, runs], PERMUTATIONS, SEED)
    signature = matrix.to_rows()[0]
    values = np.array(signature[: BANDS * ROWS], dtype="<u4").reshape(BANDS, ROWS)
    return [xxhash.xxh3_64_intdigest(row.tobytes()) for row in values]


def _folded(text: str) -> bytes:
    """Return the case-folded text in UTF-8, with non-ASCII punctuation replaced by spaces."""
    if text.isascii():
        return text.lower().encode()
    return PUNCTUATION.sub(" ", text.casefold()).encode()


def threshold(draws: Sequence[np.ndarray], valid_share: float) -> float:
    """Return the threshold for holding out documents: those with a lower :func:`draw` are held out.

    It equals ``valid_share`` or, if no draw is that low, a number just above the lowest draw. With a single document,
    it is always ``valid_share``.

    Args:
        draws: the documents' draws, one array per unit.
        valid_share: expected fraction of documents to hold out; 0 for none.
    """
    lowest = min((unit.min() for unit in draws if len(unit)), default=1.0)
    several = sum(map(len, draws)) > 1
    if several and 0 < valid_share <= lowest:
        return np.nextafter(lowest, 1)
    return valid_share


def draw(fingerprints: np.ndarray, seed: int) -> np.ndarray:
    """Return, for each document, a pseudo-random number in [0, 1) that depends only on its text and the seed.

    Args:
        fingerprints: uint64 (documents, 2), or (2,) for a single document.
        seed: the random seed.

    Returns:
        float64 (documents,), or a single number.
    """
    fingerprints = np.asarray(fingerprints, dtype=np.uint64)
    high = fingerprints[..., 0]
    low = fingerprints[..., 1]
    mixed = _mix(np.array([seed % 2**64], dtype=np.uint64))
    mixed = _mix(mixed ^ high)
    mixed = _mix(mixed ^ low).reshape(fingerprints.shape[:-1])
    return (mixed >> np.uint64(11)) * 2.0**-53  # 53 bits: exact as a float


def _mix(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers with splitmix64's bijection (Steele, Lea and Flood, 2014); overflow is intended."""
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
    """Mark the documents that duplicate, exactly or nearly, an earlier document in the same or an earlier unit.

    A document is a DUPLICATE if an earlier one has the same fingerprint. Otherwise it is a NEAR_DUPLICATE if an earlier
    one, kept or not, has the same hash in the same band. A document is therefore kept if no identical or similar one
    precedes it. The result does not depend on the division into units or on ``documents_at_once``.

    Args:
        fingerprints: one array per unit, uint64 (documents, 2), which may be memory-mapped.
        bands: one array per unit, uint64 (documents, bands); no arrays, or arrays with 0 columns, to find only exact
            duplicates.
        documents_at_once: number of documents to compare at once. The memory needed is about 80 bytes for each of them,
            plus 1 byte for every document in the corpus. Identical documents are always compared with each other.

    Returns:
        one array per unit, uint8 (documents,): KEEP, DUPLICATE or NEAR_DUPLICATE.
    """
    decisions = [np.full(len(unit), KEEP, dtype=np.uint8) for unit in fingerprints]
    assert not bands or list(map(len, bands)) == list(map(len, fingerprints))
    _mark_repeated(fingerprints, decisions, DUPLICATE, documents_at_once)

    columns = max((unit.shape[1] for unit in bands), default=0)
    # Empty units are stored without columns.
    no_rows = np.empty((0, columns), np.uint64)
    bands = [unit if len(unit) else no_rows for unit in bands]
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
    """Mark each unmarked row that equals an earlier row; units are uint64 (documents, columns)."""
    documents = sum(len(unit) for unit in units)
    partitions = np.uint64(-(-documents // at_once))
    for partition in range(int(partitions)):
        places = [_places_in_partition(unit[:, 0], partition, partitions) for unit in units]
        rows = np.concatenate([unit[found] for unit, found in zip(units, places, strict=True)])

        candidates = _may_be_repeated(rows[:, -1])
        order = candidates[np.lexsort(rows[candidates].T)]  # lexsort is stable: the earliest of equal rows comes first
        earlier = order[:-1]
        later = order[1:]
        repeated = np.zeros(len(rows), dtype=bool)
        repeated[later] = (rows[later] == rows[earlier]).all(axis=1)

        ends = np.cumsum([len(found) for found in places])[:-1]
        repeated_of_units = np.split(repeated, ends)
        for of_unit, found, is_repeated in zip(decisions, places, repeated_of_units, strict=True):
            repeats = found[is_repeated]
            unmarked = of_unit[repeats] == KEEP
            of_unit[repeats[unmarked]] = mark


def _places_in_partition(hashes: np.ndarray, partition: int, partitions: np.uint64) -> np.ndarray:
    """Return the indices of the hashes in a partition; equal hashes are always in the same partition."""
    top_bits = hashes >> np.uint64(32)  # 32 bits, which are uniformly distributed
    return np.flatnonzero(top_bits * partitions >> np.uint64(32) == partition)


def _may_be_repeated(hashes: np.ndarray) -> np.ndarray:
    """Return the indices of all hashes that occur more than once; this is much faster than sorting whole rows."""
    order = np.argsort(hashes)
    in_order = hashes[order]
    equals_next = in_order[1:] == in_order[:-1]
    is_repeated = np.zeros(len(hashes), dtype=bool)
    is_repeated[1:] = equals_next
    is_repeated[:-1] |= equals_next
    return np.sort(order[is_repeated])
