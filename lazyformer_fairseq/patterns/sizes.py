"""What costs depend on besides a model's pattern. A network offers its own as ``network.sizes``."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER


@dataclass(frozen=True)
class Sizes:
    """Of every network.

    Attributes:
        vocab_size: V.
        embed_dim: C.
        ffn_embed_dim: W.
        num_heads: N.
    """

    direction: ClassVar[str]

    vocab_size: int
    embed_dim: int
    ffn_embed_dim: int
    num_heads: int


@dataclass(frozen=True)
class EncoderSizes(Sizes):
    """Sizes of a masked language model on an :class:`~lazyformer_fairseq.modules.networks.encoder.Encoder`.

    Attributes:
        max_positions: rows of the table of absolute positions.
        relative_position_buckets: buckets of T5's bias; 0 for none.
        token_types: rows of the table of token types.
    """

    direction: ClassVar[str] = ENCODER

    max_positions: int = 512
    relative_position_buckets: int = 32
    token_types: int = 0


@dataclass(frozen=True)
class CausalSizes(Sizes):
    """Sizes of a :class:`~lazyformer_fairseq.modules.networks.causal_decoder.CausalDecoder` with its adaptive softmax.

    Attributes:
        cutoffs: ids that start a new band of words; empty for a plain softmax.
        div_val: how many times narrower each band's vectors are than those of the band before.
        normalize_before: pre-norm, which adds a last LayerNorm.
    """

    direction: ClassVar[str] = CAUSAL

    cutoffs: Sequence[int] = ()
    div_val: int = 1
    normalize_before: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "cutoffs", tuple(self.cutoffs))  # counts are remembered by sizes

    @property
    def bands(self) -> list[tuple[int, int]]:
        """(words, width of their vectors) of each band."""
        bounds = [0, *self.cutoffs, self.vocab_size]
        return [
            (upper - lower, self.embed_dim // self.div_val**number)
            for number, (lower, upper) in enumerate(pairwise(bounds))
        ]
