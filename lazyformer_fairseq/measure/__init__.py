"""Counts and measurements: parameters, FLOPs, memory, time; what fits."""

from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES

# Symbols where no data say how many: pieces of our tokenizers; words of WikiText-103, where the arch's softmax has
# bands for them; else bytes.
PIECES, WORDS, CHARACTERS = 32_768, 267_735, 204


def arch_named(name: str) -> str:
    """The name of an encoder or a causal model. Raises a UserError, with the nearest names, where none has it."""
    if name not in (known := [*ARCHITECTURES, *CAUSAL_ARCHITECTURES]):
        raise UserError(f"{name}: no such arch{nearest(name, known) or '; docs/architectures.md has them all'}")
    return name
