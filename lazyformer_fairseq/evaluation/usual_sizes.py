"""Look-up of architectures by name, and usual vocabulary sizes."""

from collections.abc import Mapping
from typing import Any

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES

PIECES = 32_768
WORDS = 267_735
CHARACTERS = 204
COLOURS = 516


def arch_named(name: str) -> str:
    """Return the name of an encoder or a causal model; raise a UserError that suggests similar names for any other."""
    known = [*ARCHITECTURES, *CAUSAL_ARCHITECTURES]
    if name not in known:
        raise UserError(f"{name}: no such arch{nearest(name, known) or '; docs/patterns.md lists them all'}")
    return name


def usual_symbols(options: Mapping[str, Any]) -> int:
    """Return the vocabulary size to assume for a model with these options, if no data determine it.

    An encoder has the pieces of our tokenizers. A causal model has the words of WikiText-103 if its softmax is
    adaptive, the colours of images plus fairseq's special symbols if its positions are absolute, and bytes otherwise.
    """
    cutoffs = options.get("adaptive_softmax_cutoff")
    if cutoffs is None:
        return PIECES
    if cutoffs:
        return WORDS
    if "positions=absolute" in options.get("sublayer_pattern", ""):
        return COLOURS
    return CHARACTERS
