"""The ``l`` sublayer: attention with own values on a distribution computed below (LazyFormer, section 2, Figure 1)."""

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.self_attention import check_heads, merge_heads, split_heads


class LazyAttention(nn.Module):
    """P V with an output projection, P the distribution of the nearest ``s`` below; 2 C^2 + 2 C parameters.

    Args:
        embed_dim: C.
        num_heads: N; must divide C (ValueError).
        dropout: on the distribution. P comes from before dropout and each sublayer draws a mask of its own.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0):
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.num_heads = num_heads
        self.dropout = dropout
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(
        self, x_BTC: Tensor, distribution: Optional[Tensor], bias: Optional[Tensor]
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Returns the output (B, T, C) and `distribution` (B, N, T, T) unchanged; `bias` is in it already."""
        assert distribution is not None, "the plan puts an s below every l"
        v = split_heads(self.v_proj(x_BTC), self.num_heads)
        dropped = F.dropout(distribution, self.dropout, self.training)
        return self.out_proj(merge_heads(torch.matmul(dropped, v))), distribution
