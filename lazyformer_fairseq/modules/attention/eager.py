"""Back end ``eager``: the reference. torch writes scores and distribution to memory and differentiates each step."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.attention.weights import distribution
from lazyformer_fairseq.modules.memory_costs import AttentionSize, Memory


class StoredDistribution(NamedTuple):
    """A distribution in memory, from before dropout."""

    probabilities: Tensor  # (B, N, T, K)

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """P V (B, N, T, D); each call draws its own dropout mask."""
        return torch.matmul(F.dropout(self.probabilities, dropout), v_BNKD)


def attend(
    q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, scores: Scores, dropout: float, consumers: int = 0
) -> tuple[Tensor, StoredDistribution]:
    """As :func:`lazyformer_fairseq.modules.attention.attend`."""
    added = scores.dense(q_BNTD.size(-2), k_BNKD.size(-2), q_BNTD)
    scale = math.sqrt(max(1, q_BNTD.size(-1)))  # queries without numbers: all products are 0
    scores_BNTK = torch.matmul(q_BNTD / scale, k_BNKD.transpose(-2, -1))
    if added is not None:
        scores_BNTK = scores_BNTK + added
    # Of a row that sees nothing, softmax makes NaN; torch's fused attention and this one, zeros.
    has_blind_rows = scores.mask is not None
    stored = StoredDistribution(distribution(scores_BNTK, scores.exponent_N, v_BNKD.dtype, has_blind_rows))
    return stored.attend(v_BNKD, dropout), stored


def count_memory(size: AttentionSize) -> Memory:
    """Of an ``s``, besides queries, keys, values and output."""
    stored, single = size.pairs * size.number, size.pairs * size.single
    is_half = size.number < size.single
    has_positions = "positions" in size.features
    kept = single + _dropped(size) + (stored if is_half and not size.dropout else 0)
    if has_positions:  # torch multiplies with a copy of the distances for each sequence
        kept += size.batch * (size.keys + 1) * size.width * size.number
    forward = stored * (1 + has_positions) + (single if is_half else 0) + (stored if is_half and size.dropout else 0)
    # softmax's gradient needs P, dP and dS at once; the product's and dropout's own are gone by then.
    backward = single if size.dropout else 2 * single - (stored if is_half else 0)
    if "mask" in size.features and not is_half:  # rows that see nothing are looked for
        backward += single
    if "entmax" in size.features:
        forward, backward = forward + 3 * single, backward + 3 * single
    if size.features & {"bias", "learned"}:  # written once for all sequences
        added = size.heads * size.time * size.keys * size.number
        forward, backward = forward + added, backward + added
    pending = stored if size.consumers else 0
    return Memory(kept, forward, backward - pending, pending)  # its own dP adds to that of its consumers


def count_reuse_memory(size: AttentionSize) -> Memory:
    """Of an ``l``: dropout of its own, and dP."""
    stored = size.pairs * size.number
    return Memory(_dropped(size), stored if size.dropout else 0, stored * (1 + size.dropout) - _dropped(size) // 2)


def _dropped(size: AttentionSize) -> int:
    """A dropout mask, and the distribution behind it."""
    return size.pairs * (size.mask + size.number) if size.dropout else 0
