"""Names of architectures, and the vocabulary that a model usually has."""

from collections.abc import Mapping
from typing import Any

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES

PIECES = 32_768
WORDS = 267_735
CHARACTERS = 204
COLOURS = 516


def arch_named(name: str) -> str:
    """Return the name of an encoder or a causal model; raise a UserError, with the nearest ones, for any other."""
    known = [*ARCHITECTURES, *CAUSAL_ARCHITECTURES]
    if name not in known:
        raise UserError(f"{name}: no such arch{nearest(name, known) or '; docs/patterns.md has them all'}")
    return name


def usual_symbols(options: Mapping[str, Any]) -> int:
    """Return the number of symbols of a model with these options, where no data say it.

    An encoder has our tokenizers' pieces; a causal model the words of WikiText-103 where its softmax has bands for
    them, colours and fairseq's own symbols where it has absolute positions, else bytes.
    """
    cutoffs = options.get("adaptive_softmax_cutoff")
    if cutoffs is None:
        return PIECES
    if cutoffs:
        return WORDS
    if "positions=absolute" in options.get("sublayer_pattern", ""):
        return COLOURS
    return CHARACTERS
