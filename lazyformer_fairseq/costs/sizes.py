"""What the formulas need to know of a model beside its pattern. Knows no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
    from lazyformer_fairseq.modules.networks.encoder import Encoder


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes of a masked language model on an :class:`~lazyformer_fairseq.modules.networks.encoder.Encoder`.

    Attributes:
        vocab_size: V.
        embed_dim: C.
        ffn_embed_dim: W.
        num_heads: N.
        max_positions: rows of the table of absolute positions.
        relative_position_buckets: of T5's bias; 0 for none.
    """

    vocab_size: int
    embed_dim: int
    ffn_embed_dim: int
    num_heads: int
    max_positions: int = 512
    relative_position_buckets: int = 32

    @classmethod
    def of(cls, encoder: "Encoder") -> "EncoderSizes":
        """Of a built encoder; on the meta device it costs no memory."""
        bias = encoder.relative_position_bias
        return cls(
            encoder.embed_tokens.num_embeddings,
            encoder.embed_dim,
            encoder.ffn_embed_dim,
            encoder.num_heads,
            encoder.max_positions,
            0 if bias is None else bias.num_buckets,
        )


@dataclass(frozen=True)
class CausalSizes:
    """Sizes of a :class:`~lazyformer_fairseq.modules.networks.causal_decoder.CausalDecoder` with its adaptive softmax.

    Attributes:
        vocab_size: V.
        embed_dim: C.
        ffn_embed_dim: W.
        num_heads: N.
        cutoffs: ids that start a new band of words; empty for a plain softmax.
        div_val: by which each band's vectors are narrower than those of the band before.
        normalize_before: pre-norm, which adds a last LayerNorm.
    """

    vocab_size: int
    embed_dim: int
    ffn_embed_dim: int
    num_heads: int
    cutoffs: Sequence[int] = ()
    div_val: int = 1
    normalize_before: bool = False

    @classmethod
    def of(cls, decoder: "CausalDecoder") -> "CausalSizes":
        """Of a built decoder; on the meta device it costs no memory."""
        bands = decoder.embedding.bands
        second = bands[min(1, len(bands) - 1)]
        return cls(
            sum(band.size for band in bands),
            decoder.embed_dim,
            decoder.ffn_embed_dim,
            decoder.num_heads,
            tuple(band.start for band in bands[1:]),
            decoder.embed_dim // second.table.size(1),
            decoder.normalize_before,
        )

    @property
    def bands(self) -> list[tuple[int, int]]:
        """(words, width of their vectors) of each band."""
        bounds = [0, *self.cutoffs, self.vocab_size]
        return [
            (upper - lower, self.embed_dim // self.div_val**number)
            for number, (lower, upper) in enumerate(pairwise(bounds))
        ]


Sizes = Union[EncoderSizes, CausalSizes]
