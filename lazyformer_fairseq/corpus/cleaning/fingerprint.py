"""Tells equal documents by a hash of the text, and on request similar ones by hashes that they share."""

import re

import numpy as np
import xxhash
from datatrove.data import Document
from rensa import RMinHash

from lazyformer_fairseq.corpus.step import DocumentStep

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


class Fingerprint(DocumentStep):
    """Adds to a document's metadata ``fingerprint``: the (high, low) halves of a hash of its letters and digits.

    With ``near_duplicates`` also ``bands``: 18 integers of 64 bits (see :func:`bands`). The same text gives the same
    numbers on every machine; the bands may differ with another version of rensa.
    """

    name = "fingerprint"

    def __init__(self, near_duplicates: bool = False):
        super().__init__()
        self.near_duplicates = near_duplicates

    def process(self, document: Document) -> None:
        document.metadata["fingerprint"] = fingerprint(document.text)
        if self.near_duplicates:
            document.metadata["bands"] = bands(document.text)


def fingerprint(text: str) -> tuple[int, int]:
    """(high, low) 64 bits of xxh3-128 of the text's letters and digits; of the text itself where it has none.

    Case, spacing and punctuation do not count: other line breaks, curly quotes or an extra space make no difference.
    """
    letters = _folded(text).translate(None, NOT_WORDS)
    digest = xxhash.xxh3_128_intdigest(letters or "".join(text.split()).encode())
    return digest >> 64, digest & 0xFFFFFFFFFFFFFFFF


def bands(text: str) -> list[int]:
    """BANDS integers of 64 bits; similar texts share one or more.

    They are hashes of 14 MinHash values each (Broder 1997) of the set of runs of 5 words. Two texts whose sets have
    Jaccard similarity s share a band with chance 1 - (1 - s^14)^18: 1% at s = 0.6, 12% at 0.7, 56% at 0.8, 99% at 0.9.
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
    """UTF-8 of the text, case-folded, with spaces for punctuation outside ASCII."""
    if text.isascii():
        return text.lower().encode()
    return PUNCTUATION.sub(" ", text.casefold()).encode()
