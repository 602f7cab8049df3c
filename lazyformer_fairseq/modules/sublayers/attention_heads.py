"""What kinds that attend share."""

from typing import Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention import attend
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.sublayers.interface import Context, HandedOn, Sublayer, SublayerOptions
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION


class AttentionSublayer(Sublayer):
    """The base of kinds with heads and a projection `out_proj`, which each kind makes itself.

    Args:
        embed_dim: C.
        num_heads: N; must divide C (ValueError).
        dropout: on the distribution; each sublayer draws its own mask.
        readers: how many lazy sublayers above read the distribution.
    """

    attends = True

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, readers: int = 0):
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.num_heads = num_heads
        self.dropout = dropout
        self.readers = readers

    @classmethod
    def build(cls, options: SublayerOptions, planned: PlannedSublayer) -> "AttentionSublayer":
        readers = planned.readers.count(DISTRIBUTION)
        return cls(options.embed_dim, options.num_heads, options.attention_dropout, readers)

    def attend(
        self, q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, scores: Scores, shared: Context
    ) -> tuple[Tensor, HandedOn]:
        """Attention, projected; hands on its distribution, from before dropout."""
        dropout = self.dropout if self.training else 0.0
        back_end = shared.back_end(self.readers)
        attended, distribution = attend(q_BNTD, k_BNKD, v_BNKD, scores, dropout, self.readers, back_end)
        return self.out_proj(merge_heads(attended)), {DISTRIBUTION: distribution}


def split_heads(x_BTC: Tensor, num_heads: int) -> Tensor:
    """(B, T, C) -> (B, N, T, D)."""
    return x_BTC.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x_BNTD: Tensor) -> Tensor:
    """(B, N, T, D) -> (B, T, C)."""
    return x_BNTD.transpose(1, 2).flatten(2)


def with_memory(memory_BMC: Optional[Tensor], x_BTC: Tensor) -> Tensor:
    """All inputs to attend to, (B, M + T, C): the previous segments', if any, then this one's."""
    return x_BTC if memory_BMC is None else torch.cat([memory_BMC, x_BTC], dim=1)


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Raises ValueError where heads do not divide the width."""
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(f"{num_heads} attention heads do not divide an embedding dimension of {embed_dim}")
