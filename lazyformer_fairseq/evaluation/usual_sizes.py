"""Counts and measurements: parameters, FLOPs, memory, time; what fits."""

from collections.abc import Mapping
from typing import Any

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES

PIECES = 32_768
WORDS = 267_735
CHARACTERS = 204
COLOURS = 516


def arch_named(name: str) -> str:
    """The name of an encoder or a causal model. Raises a UserError, with the nearest names, where none has it."""
    if name not in (known := [*ARCHITECTURES, *CAUSAL_ARCHITECTURES]):
        raise UserError(f"{name}: no such arch{nearest(name, known) or '; docs/patterns.md has them all'}")
    return name


def usual_symbols(options: Mapping[str, Any]) -> int:
    """Where no data say how many a model of these options has: pieces of our tokenizers in encoders; words of
    WikiText-103, where its softmax has bands for them; colours, and fairseq's own symbols, where it has absolute
    positions; else bytes.
    """
    cutoffs = options.get("adaptive_softmax_cutoff")
    of_images = "positions=absolute" in options.get("sublayer_pattern", "")
    if cutoffs is None:
        return PIECES
    if cutoffs:
        return WORDS
    if of_images:
        return COLOURS
    return CHARACTERS
