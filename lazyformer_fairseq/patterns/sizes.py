"""What formulas need besides a model's pattern. A network offers its own as ``network.sizes``."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER


@dataclass(frozen=True)
class Sizes:
    """What the formulas of every kind need.

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

    def count_other_parameters(self) -> int:
        """Parameters outside the sublayers: embeddings, head, biases that sublayers share."""
        raise NotImplementedError

    def count_embedding_flops(self, tokens: int) -> int:
        """FLOPs of embedding this many tokens; looking vectors up is free."""
        return 0

    def count_head_flops(self, predicted: int) -> int:
        """FLOPs of the logits of this many tokens."""
        raise NotImplementedError


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

    def count_other_parameters(self) -> int:
        """Embeddings, their LayerNorm (pre-norm: the output's), T5's bias, and the tied head."""
        c, v = self.embed_dim, self.vocab_size
        embeddings = (v + self.max_positions + self.token_types) * c + 2 * c
        head = c * c + 3 * c + v
        return embeddings + self.relative_position_buckets * self.num_heads + head

    def count_head_flops(self, predicted: int) -> int:
        return 2 * predicted * (self.embed_dim**2 + self.embed_dim * self.vocab_size)


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

    @property
    def bands(self) -> list[tuple[int, int]]:
        """(words, width of their vectors) of each band."""
        bounds = [0, *self.cutoffs, self.vocab_size]
        return [
            (upper - lower, self.embed_dim // self.div_val**number)
            for number, (lower, upper) in enumerate(pairwise(bounds))
        ]

    def count_other_parameters(self) -> int:
        """Embeddings (tied); a bias per word; a vector and a bias per further band; two biases shared by all ``s``."""
        c, further = self.embed_dim, len(self.cutoffs)
        tables = sum(words * width for words, width in self.bands)
        projections = sum(width * c for _, width in self.bands if width != c)
        final_norm = 2 * c if self.normalize_before else 0
        return tables + projections + self.vocab_size + further * (c + 1) + 2 * c + final_norm

    def count_embedding_flops(self, tokens: int) -> int:
        """FLOPs of the narrower bands' projections, which every token goes through."""
        return sum(2 * tokens * width * self.embed_dim for _, width in self.bands if width != self.embed_dim)

    def count_head_flops(self, predicted: int) -> int:
        """FLOPs of the first band alone: the further ones depend on the words."""
        first_band, _ = self.bands[0]
        return 2 * predicted * self.embed_dim * (first_band + len(self.cutoffs))
