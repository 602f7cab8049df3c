"""The ``l`` sublayer: attention with own values on a distribution computed below (LazyFormer, section 2, Figure 1)."""

from typing import Any, Optional

from torch import Tensor, nn

from lazyformer_fairseq.modules.attention import ReusableAttention
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.self_attention import check_heads, merge_heads, split_heads, with_memory


class LazyAttention(nn.Module):
    """P V with an output projection, P the distribution of the nearest ``s`` below; 2 C^2 + 2 C parameters.

    Args:
        embed_dim: C.
        num_heads: N; must divide C (ValueError).
        dropout: on the distribution. P comes from before dropout and each sublayer draws a mask of its own.
        bias: whether the two projections have biases; without, 2 C^2 parameters.
    """

    attends = True

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True):
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.num_heads = num_heads
        self.dropout = dropout
        self.v_proj = Linear(embed_dim, embed_dim, bias)
        self.out_proj = Linear(embed_dim, embed_dim, bias)

    def forward(
        self, x_BTC: Tensor, distribution: Optional[ReusableAttention], shared: Any, memory_BMC: Optional[Tensor] = None
    ) -> tuple[Tensor, ReusableAttention]:
        """Attends with the weights that are there.

        Args:
            x_BTC: input.
            distribution: of the nearest ``s`` below, from before dropout.
            shared: unused: biases and masks are in `distribution` already.
            memory_BMC: what `x_BTC` was in the previous segments; None where there are none (M = 0).

        Returns:
            The output (B, T, C), and `distribution` unchanged.
        """
        assert distribution is not None, "the plan puts an s below every l"
        v = split_heads(self.v_proj(with_memory(memory_BMC, x_BTC)), self.num_heads)
        dropout = self.dropout if self.training else 0.0
        return self.out_proj(merge_heads(distribution.attend(v, dropout))), distribution
