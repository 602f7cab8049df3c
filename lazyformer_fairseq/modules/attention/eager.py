"""Back end ``eager``: the reference. torch writes scores and distribution to memory and differentiates each step."""

import math
from typing import Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention.scores import ScoreBias


class StoredDistribution:
    """A distribution in memory.

    Args:
        probabilities: (B, N, T, K), from before dropout.
    """

    def __init__(self, probabilities: Tensor):
        self.probabilities = probabilities

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """P V (B, N, T, D); each call draws its own dropout mask."""
        return torch.matmul(F.dropout(self.probabilities, dropout), v_BNKD)


def distribution(q_BNTD: Tensor, k_BNKD: Tensor, bias: Optional[Tensor], dtype: torch.dtype) -> StoredDistribution:
    """softmax(QK^T / sqrt(D) + bias), in single precision or better, kept as `dtype`.

    Args:
        q_BNTD: queries.
        k_BNKD: keys.
        bias: broadcastable to (B, N, T, K).
        dtype: of the values to come.
    """
    scores = torch.matmul(q_BNTD / math.sqrt(q_BNTD.size(-1)), k_BNKD.transpose(-2, -1))
    if bias is not None:
        scores = scores + bias
    at_least_single = torch.promote_types(scores.dtype, torch.float32)
    return StoredDistribution(torch.softmax(scores, dim=-1, dtype=at_least_single).to(dtype))


def attend(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, bias: ScoreBias, dropout: float
) -> tuple[Tensor, StoredDistribution]:
    """As :func:`lazyformer_fairseq.modules.attention.attend`."""
    stored = distribution(q_BNTD, k_BNTD, bias.dense(q_BNTD.size(-2), q_BNTD.dtype), v_BNTD.dtype)
    return stored.attend(v_BNTD, dropout), stored
