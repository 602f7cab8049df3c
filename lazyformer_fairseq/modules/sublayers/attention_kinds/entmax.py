"""``s[entmax=1.5]``, ``s[entmax=learned]``: sparse distributions by alpha-entmax (Correia et al., 2019)."""

import torch
from torch import Tensor, nn

from lazyformer_fairseq.modules.sublayers.attention_choice import (
    Attend,
    Attended,
    Attention,
    AttentionChoice,
    ChoiceOptions,
)
from lazyformer_fairseq.modules.sublayers.interface import Settings
from lazyformer_fairseq.patterns.sizes import Sizes

# A learned alpha stays between these, as in the published code; the paper has ]1, 2[.
_LEAST, _MOST = 1.01, 2.0


class Entmax(AttentionChoice):
    """alpha-entmax in place of softmax.

    Args:
        num_heads: N.
        exponent: alpha of all heads; 0 where each head learns its own (section 4): 1 + sigmoid(a), where a starts from
            a standard normal distribution, as in the published code.
    """

    features = frozenset({"entmax"})
    counts_memory = True

    def __init__(self, num_heads: int, exponent: float = 0.0):
        super().__init__()
        self.num_heads = num_heads
        self.exponent = exponent
        if not exponent:
            self.shape_N = nn.Parameter(torch.randn(num_heads))

    @classmethod
    def build(cls, options: ChoiceOptions) -> "Entmax":
        given = options.values["entmax"]
        return cls(options.num_heads, 0.0 if given == "learned" else given)

    def attend(self, attention: Attention, inner: Attend) -> Attended:
        return inner(attention.with_scores(exponent_N=self.exponents(attention.q_BNTD)))

    def exponents(self, like: Tensor) -> Tensor:
        """alpha (N,), in single precision or better: half has few numbers between 1 and 2."""
        exact = torch.promote_types(like.dtype, torch.float32)
        if self.exponent:
            return torch.full((self.num_heads,), self.exponent, dtype=exact, device=like.device)
        return (1 + torch.sigmoid(self.shape_N.to(exact))).clamp(_LEAST, _MOST)

    @classmethod
    def count_parameters(cls, sizes: Sizes, values: Settings) -> int:
        return sizes.num_heads if values["entmax"] == "learned" else 0
