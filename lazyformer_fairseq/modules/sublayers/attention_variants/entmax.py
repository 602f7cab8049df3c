"""``s[entmax=1.5]``, ``s[entmax=learned]``: sparse attention with alpha-entmax (Correia et al., 2019)."""

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
# Bounds on a learned alpha, as in the published code; in the paper alpha is strictly between 1 and 2.
_LEAST = 1.01
_MOST = 2.0


class Entmax(VariantModule):
    """Attention with alpha-entmax instead of softmax.

    Attributes:
        exponent: alpha for all heads; None if each head learns its own alpha = 1 + sigmoid(a) (section 3). As in the
            published code, a is initialized from a standard normal distribution.
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
        """Return alpha for each head (N,), in single precision or better.

        Half precision has too few values between 1 and 2.

        Args:
            like: a tensor with the model's device and dtype.
        """
        exact = torch.promote_types(like.dtype, torch.float32)
        if self.exponent is not None:
            return torch.full((self.num_heads,), self.exponent, dtype=exact, device=like.device)
        exponent_N = 1 + torch.sigmoid(self.shape_N.to(exact))
        return exponent_N.clamp(_LEAST, _MOST)
