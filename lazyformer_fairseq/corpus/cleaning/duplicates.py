"""Finds documents that occur twice, among any number of documents, in bounded memory."""

import mmap
from collections.abc import Sequence

import numpy as np

KEEP, DUPLICATE, NEAR_DUPLICATE, HELD_OUT = range(4)
REASONS = {DUPLICATE: "duplicate", NEAR_DUPLICATE: "near duplicate"}
DOCUMENTS_PER_PARTITION = 4_000_000


def find_duplicates(
    fingerprints: Sequence[np.ndarray],
    bands: Sequence[np.ndarray] = (),
    documents_at_once: int = DOCUMENTS_PER_PARTITION,
) -> list[np.ndarray]:
    """Decides which documents to drop. The order is that of the units, and within a unit that of its documents.

    A document is a DUPLICATE if an earlier one has its fingerprint; else a NEAR_DUPLICATE if an earlier one, itself
    kept or not, has its hash in the same band. So the first of equal documents stays, and every one that
    has no similar one before it. How documents are divided into units makes no difference, nor ``documents_at_once``.

    Args:
        fingerprints: an item per unit, uint64 (documents, 2); memory-mapped if they are many.
        bands: an item per unit, uint64 (documents, bands); none, or with 0 columns, for exact duplicates alone.
        documents_at_once: bounds the memory: about 80 bytes for each of these, and 1 byte for each of all documents.

    Returns:
        an item per unit, uint8 (documents,): KEEP, DUPLICATE or NEAR_DUPLICATE.
    """
    decisions = [np.full(len(unit), KEEP, dtype=np.uint8) for unit in fingerprints]
    assert not bands or list(map(len, bands)) == list(map(len, fingerprints))
    _mark_repeated(fingerprints, decisions, DUPLICATE, documents_at_once)
    for band in range(bands[0].shape[1] if len(bands) else 0):
        _mark_repeated([unit[:, band : band + 1] for unit in bands], decisions, NEAR_DUPLICATE, documents_at_once)
    return decisions


def _mark_repeated(units: Sequence[np.ndarray], decisions: list[np.ndarray], mark: int, at_once: int) -> None:
    """Marks every row, not marked yet, that equals an earlier row. Units: uint64 (documents, columns)."""
    documents = sum(map(len, units))
    partitions = -(-documents // at_once)
    for partition in range(partitions):
        rows = _RowsSeen(at_once, mark, decisions)
        for number, unit in enumerate(units):
            # By the top 32 bits of a hash, which are spread evenly.
            of_partition = (unit[:, 0] >> np.uint64(32)) * np.uint64(partitions) >> np.uint64(32) == partition
            places = np.flatnonzero(of_partition)
            rows.add(unit[places], number, places)
            _let_go(unit)
        rows.mark_repeated()


def _let_go(unit: np.ndarray) -> None:
    """Pages of a memory-mapped file that were read count as the process's memory until they are given back."""
    read_only = not unit.flags.writeable
    base = unit
    while isinstance(base, np.ndarray):
        base = base.base
    if read_only and isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


class _RowsSeen:
    """Rows in order, with their places. When there are too many, it marks the repeated ones and forgets all."""

    def __init__(self, at_once: int, mark: int, decisions: list[np.ndarray]):
        self.at_once, self.mark, self.decisions = at_once, mark, decisions
        self._rows: list[np.ndarray] = []
        self._units: list[np.ndarray] = []
        self._places: list[np.ndarray] = []
        self._count = self._count_of_distinct = 0

    def add(self, rows: np.ndarray, unit: int, places: np.ndarray) -> None:
        self._rows.append(rows)
        self._units.append(np.full(len(rows), unit, dtype=np.uint32))
        self._places.append(places.astype(np.uint32))
        self._count += len(rows)
        if self._count - self._count_of_distinct > self.at_once:
            self.mark_repeated()

    def mark_repeated(self) -> None:
        if not self._count:
            return
        rows, units, places = (np.concatenate(parts) for parts in (self._rows, self._units, self._places))
        candidates = _may_be_repeated(rows[:, -1])
        order = candidates[np.lexsort(rows[candidates].T)]  # stable: of equal rows the earliest comes first
        repeated = np.zeros(len(rows), dtype=bool)
        repeated[order[1:]] = (rows[order[1:]] == rows[order[:-1]]).all(axis=1)
        self._set_marks(units[repeated], places[repeated])
        first = ~repeated
        self._rows, self._units, self._places = [rows[first]], [units[first]], [places[first]]
        self._count = self._count_of_distinct = int(first.sum())

    def _set_marks(self, units: np.ndarray, places: np.ndarray) -> None:
        for of_unit in np.split(np.arange(len(units)), np.flatnonzero(np.diff(units)) + 1):  # units stand in order
            if len(of_unit):
                decisions, marked = self.decisions[units[of_unit[0]]], places[of_unit]
                decisions[marked[decisions[marked] == KEEP]] = self.mark


def _may_be_repeated(hashes: np.ndarray) -> np.ndarray:
    """Places of all hashes that occur twice, and of some others: these alone must be sorted, the slow part."""
    slots = 1 << max(10, len(hashes).bit_length() + 2)
    slot = (hashes & np.uint64(slots - 1)).astype(np.uint32)
    numbers = np.arange(len(hashes), dtype=np.uint32)
    last = np.zeros(slots, dtype=np.uint32)
    last[slot] = numbers
    shared = np.zeros(slots, dtype=bool)
    shared[slot[last[slot] != numbers]] = True
    return np.flatnonzero(shared[slot])
