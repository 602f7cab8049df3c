"""Decides which documents are held out for validation."""

from collections.abc import Sequence

import numpy as np


def threshold(draws: Sequence[np.ndarray], valid_share: float) -> float:
    """Documents whose :func:`draw` is lower are held out: the share, or where no draw is so low, the lowest one alone.

    Args:
        draws: of the documents of each unit.
        valid_share: expected share of the documents; 0 for none.
    """
    lowest = min((unit.min() for unit in draws if len(unit)), default=1.0)
    several = sum(map(len, draws)) > 1
    return np.nextafter(lowest, 1) if several and 0 < valid_share <= lowest else valid_share


def is_held_out(fingerprints: np.ndarray, valid_share: float, seed: int) -> np.ndarray:
    """Whether documents belong to the validation split: bool (documents,), or one bool; see :func:`draw`."""
    return draw(fingerprints, seed) < valid_share


def draw(fingerprints: np.ndarray, seed: int) -> np.ndarray:
    """A number in [0, 1) for each document, which depends on its text and the seed, never on its place.

    Args:
        fingerprints: uint64 (documents, 2), or (2,) of one document.

    Returns:
        float64 (documents,), or one number.
    """
    fingerprints = np.asarray(fingerprints, dtype=np.uint64)
    mixed = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) ^ fingerprints[..., 0])
    mixed = _mix(mixed ^ fingerprints[..., 1]).reshape(fingerprints.shape[:-1])
    return (mixed >> np.uint64(11)) * 2.0**-53  # 53 bits: exact as a float


def _mix(values: np.ndarray) -> np.ndarray:
    """A bijection of 64 bits that leaves no pattern: splitmix64 (Steele, Lea and Flood 2014). Overflow is meant."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
