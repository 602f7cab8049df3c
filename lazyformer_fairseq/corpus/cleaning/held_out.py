"""Decides which documents are held out for validation."""

import numpy as np


def is_held_out(fingerprints: np.ndarray, valid_share: float, seed: int) -> np.ndarray:
    """Whether documents belong to the validation split; depends on their text and the seed, never on their place.

    Args:
        fingerprints: uint64 (documents, 2), or (2,) of one document.
        valid_share: expected share of the documents.

    Returns:
        bool (documents,), or one bool.
    """
    fingerprints = np.asarray(fingerprints, dtype=np.uint64)
    mixed = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) ^ fingerprints[..., 0])
    mixed = _mix(mixed ^ fingerprints[..., 1]).reshape(fingerprints.shape[:-1])
    return (mixed >> np.uint64(11)) * 2.0**-53 < valid_share  # 53 bits: exact as a float


def _mix(values: np.ndarray) -> np.ndarray:
    """A bijection of 64 bits that leaves no pattern: splitmix64 (Steele, Lea and Flood 2014). Overflow is meant."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
