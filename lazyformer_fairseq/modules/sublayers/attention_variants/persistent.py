"""``s[persistent=m]``: learned keys and values in addition to the tokens' keys and values.

This is the all-attention layer of Sukhbaatar et al. (2019b).
"""

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
    """Attention to the tokens' keys and to m learned keys per head, in one softmax (section 4).

    The learned keys have no position, so position biases, relative positions, padding, masks and causality do not apply
    to them. In a causal model they are multiplied by the same queries as other keys, Q + u. With rotary positions they
    are multiplied by the unrotated queries. QK norm applies to them too.

    As in the published code, each head has its own keys, which are initialized from N(0, 1). The parameter itself is
    initialized from N(0, 1 / D) and multiplied by sqrt(D), so that it learns as fast as other weights of that scale.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        drawn_NMD = torch.randn(options.num_heads, options.values["persistent"], options.head_size)
        self.keys = nn.Parameter(drawn_NMD / math.sqrt(options.head_size))

    @classmethod
    @override
    def build_values(cls, options: SublayerOptions) -> "PersistentValues":
        """Build the module that appends the learned values."""
        return PersistentValues(options.num_heads, options.values["persistent"], options.head_size)

    @override
    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Compute attention over the tokens and the learned keys."""
        extra = attention.scores.extra + self.keys.size(1)
        keys_NMD = self.keys * math.sqrt(self.keys.size(-1))
        _, makers_of_keys = attention.makers
        for maker in makers_of_keys.values():
            keys_NMD = cast(VectorMaker, maker).without_position(keys_NMD)
        beside = attention.k_BNKD.size(-1) - keys_NMD.size(-1)  # dimensions added by a synthesizer; 0 in learned keys
        k_BNKD = _append(attention.k_BNKD, F.pad(keys_NMD, (0, beside)))
        attention = replace(attention, k_BNKD=k_BNKD)
        return inner(attention.with_scores(extra=extra))


class PersistentValues(nn.Module):
    """A sublayer's m learned values per head.

    They are initialized from N(0, 1): the parameter is drawn from N(0, 1 / m) and multiplied by sqrt(m).
    """

    def __init__(self, num_heads: int, vectors: int, head_size: int):
        super().__init__()
        drawn_NMD = torch.randn(num_heads, vectors, head_size)
        self.values = nn.Parameter(drawn_NMD / math.sqrt(vectors))

    def forward(self, v_BNKD: Tensor, _x_BKC: Tensor) -> Tensor:
        """Append the learned values to the tokens' values; return (B, N, K + m, D)."""
        values_NMD = self.values * math.sqrt(self.values.size(1))
        return _append(v_BNKD, values_NMD)


def _append(tokens_BNKD: Tensor, vectors_NMD: Tensor) -> Tensor:
    """Append m vectors, shared by all sequences, to the tokens (B, N, K, D); return (B, N, K + m, D)."""
    vectors = vectors_NMD.to(tokens_BNKD.dtype).expand(tokens_BNKD.size(0), -1, -1, -1)
    return torch.cat([tokens_BNKD, vectors], dim=2)
