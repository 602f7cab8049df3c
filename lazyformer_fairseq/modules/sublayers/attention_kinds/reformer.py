"""``s[buckets=b]``: attention among positions that hash alike (Reformer, section 2), without its reversible layers."""

from collections.abc import Mapping
from typing import ClassVar, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention import hashed
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.attention_heads import split_heads
from lazyformer_fairseq.modules.sublayers.attention_variant import (
    Attend,
    Attention,
    AttentionOutput,
    AttentionVariant,
    VariantOptions,
)
from lazyformer_fairseq.modules.sublayers.interface import Settings


class Reformer(AttentionVariant):
    """Queries are keys, of the keys' projection; there is none of queries.

    A Reformer adds positions to its input. A causal model of ours has none there, as its memory must not depend on
    them: so positions are added to keys, and not to values (as in Shortformer, Press et al., 2021, section 5). They are
    distances to the last key, projected, and Transformer-XL's v.

    Rotations are drawn anew in each forward pass, in training from torch's generator, so that a resumed run draws the
    same; in evaluation from a fixed seed, so that a model computes the same twice.

    An input that a chunk holds is not hashed: everything sees everything (as in the published code).

    Attributes:
        position_proj: of distances, in causal models.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "bias": "it finds keys by what they contain, wherever they are, and T5's bias would come too late: "
        "give --relative-position-buckets 0",
        "mask": "it finds keys by what they contain, however far back they are: leave --same-length out",
    }
    has_probabilities = False  # rounds are written by chunks, never by pairs of all tokens

    def __init__(self, options: VariantOptions):
        super().__init__(options)
        self.buckets, self.rounds, self.chunk = (options.values[name] for name in ("buckets", "rounds", "chunk"))
        self.dropout = options.attention_dropout
        self.position_proj: Optional[Linear] = None
        if options.is_causal:
            self.position_proj = Linear(options.embed_dim, options.embed_dim, bias=False)

    @classmethod
    def projections(cls, values: Settings) -> frozenset[str]:
        return frozenset({"keys"})

    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        vectors, time, scores = self._vectors(attention), attention.x_BTC.size(1), attention.scores
        places = vectors.size(-2)
        is_short = places <= self.chunk
        if is_short:
            buckets = torch.zeros_like(vectors[..., None, :, 0], dtype=torch.long)
        else:
            generator = None if self.training else torch.Generator(vectors.device).manual_seed(0)
            rotations = hashed.random_rotations(vectors, self.rounds, self.buckets, generator)
            buckets = hashed.buckets_of(vectors, rotations)
        attended = hashed.attend(
            vectors,
            attention.values,
            buckets,
            self.buckets,
            places if is_short else self.chunk,
            time,
            scores.is_causal,
            scores.is_padding(places),
            self.dropout if self.training else 0.0,
        )
        return AttentionOutput(*attended)

    def _vectors(self, attention: Attention) -> Tensor:
        """What is hashed and compared, (B, N, K, D)."""
        if self.position_proj is None:
            return attention.k_BNKD
        positions = attention.positions
        at_distance = split_heads(self.position_proj(positions.encoded[None, :-1]), attention.k_BNKD.size(1))
        return attention.k_BNKD + at_distance + positions.position_bias[:, None]
