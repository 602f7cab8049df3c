"""``s[persistent=m]``: learned keys and values beside the tokens' (all-attention: Sukhbaatar et al., 2019b)."""

import math
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lazyformer_fairseq.modules.sublayers.attention_variants.interface import (
    Attend,
    Attention,
    AttentionOutput,
    VariantModule,
    VectorMaker,
)
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions


class Persistent(VariantModule):
    """m keys that every query sees, in one softmax with the tokens' (section 4).

    They have no place: no bias by distance, no positions, no padding, no mask and no causality acts on them, and in a
    causal model they meet the same queries as the tokens, Q + u. With rotary positions they meet queries as these were
    before the turn; a norm of queries and keys acts on them too.

    As in the published code each head has keys of its own, drawn from N(0, 1): the weight is drawn from N(0, 1 / D) and
    multiplied by sqrt(D), so that it learns as fast as weights of that scale do.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        drawn_NMD = torch.randn(options.num_heads, options.values["persistent"], options.head_size)
        self.keys = nn.Parameter(drawn_NMD / math.sqrt(options.head_size))

    @classmethod
    @override
    def build_values(cls, options: SublayerOptions) -> "PersistentValues":
        """Build the learned values."""
        return PersistentValues(options.num_heads, options.values["persistent"], options.head_size)

    @override
    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Attend to the tokens and to the learned keys."""
        extra = attention.scores.extra + self.keys.size(1)
        keys_NMD = self.keys * math.sqrt(self.keys.size(-1))
        _, makers_of_keys = attention.makers
        for maker in makers_of_keys.values():
            keys_NMD = cast(VectorMaker, maker).without_place(keys_NMD)
        beside = attention.k_BNKD.size(-1) - keys_NMD.size(-1)  # a synthesizer's factors, of which vectors have none
        k_BNKD = _append(attention.k_BNKD, F.pad(keys_NMD, (0, beside)))
        attention = replace(attention, k_BNKD=k_BNKD)
        return inner(attention.with_scores(extra=extra))


class PersistentValues(nn.Module):
    """The m values of one sublayer: drawn from N(0, 1), kept as weights of N(0, 1 / m)."""

    def __init__(self, num_heads: int, vectors: int, head_size: int):
        super().__init__()
        drawn_NMD = torch.randn(num_heads, vectors, head_size)
        self.values = nn.Parameter(drawn_NMD / math.sqrt(vectors))

    def forward(self, v_BNKD: Tensor, _x_BKC: Tensor) -> Tensor:
        """Return the values with the learned ones behind them, (B, N, K + m, D)."""
        values_NMD = self.values * math.sqrt(self.values.size(1))
        return _append(v_BNKD, values_NMD)


def _append(tokens_BNKD: Tensor, vectors_NMD: Tensor) -> Tensor:
    """Return both, one behind the other, (B, N, K + m, D): a copy."""
    vectors = vectors_NMD.to(tokens_BNKD.dtype).expand(tokens_BNKD.size(0), -1, -1, -1)
    return torch.cat([tokens_BNKD, vectors], dim=2)
