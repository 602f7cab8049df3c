"""``s[entmax=1.5]``, ``s[entmax=learned]``: sparse distributions by alpha-entmax (Correia et al., 2019)."""

from typing import Optional

import torch
from torch import Tensor, nn
from typing_extensions import override

from lazyformer_fairseq.modules.sublayers.attention_variants.interface import (
    Attend,
    Attention,
    AttentionOutput,
    VariantModule,
)
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions

_LEARNED = "learned"
# A learned alpha stays between these, as in the published code; the paper has ]1, 2[.
_LEAST = 1.01
_MOST = 2.0


class Entmax(VariantModule):
    """alpha-entmax in place of softmax.

    Attributes:
        exponent: alpha of all heads; None where each head learns its own (section 3): 1 + sigmoid(a), where a starts
            from a standard normal distribution, as in the published code.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        given = options.values["entmax"]
        self.exponent: Optional[float] = None
        if given == _LEARNED:
            self.shape_N = nn.Parameter(torch.randn(options.num_heads))
        else:
            self.exponent = given

    @override
    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        exponent_N = self.exponents(attention.q_BNTD)
        return inner(attention.with_scores(exponent_N=exponent_N))

    def exponents(self, like: Tensor) -> Tensor:
        """Return alpha (N,), in single precision or better: half has few numbers between 1 and 2."""
        exact = torch.promote_types(like.dtype, torch.float32)
        if self.exponent is not None:
            return torch.full((self.num_heads,), self.exponent, dtype=exact, device=like.device)
        exponent_N = 1 + torch.sigmoid(self.shape_N.to(exact))
        return exponent_N.clamp(_LEAST, _MOST)
