"""Architecture lookup by name, and default vocabulary sizes."""

from collections.abc import Mapping
from typing import Any

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES

PIECES = 32_768
WORDS = 267_735
CHARACTERS = 204
COLOURS = 516


def arch_named(name: str) -> str:
    """Return `name` if it is a known architecture; otherwise raise a UserError that suggests similar names."""
    known = [*ARCHITECTURES, *CAUSAL_ARCHITECTURES]
    if name not in known:
        raise UserError(f"{name}: no such arch{nearest(name, known) or '; docs/patterns.md lists all archs'}")
    return name


def default_vocab_size(options: Mapping[str, Any]) -> int:
    """Return the vocabulary size to assume for a model with these options when there is no data.

    For encoders, it is our tokenizers' default vocabulary size. For causal models with an adaptive softmax, it is the
    size of WikiText-103's vocabulary. For causal models with absolute positions, it is the number of image colors plus
    fairseq's special symbols. For other causal models, it is the size of enwik8's character vocabulary.
    """
    cutoffs = options.get("adaptive_softmax_cutoff")
    if cutoffs is None:
        return PIECES
    if cutoffs:
        return WORDS
    if "positions=absolute" in options.get("sublayer_pattern", ""):
        return COLOURS
    return CHARACTERS
