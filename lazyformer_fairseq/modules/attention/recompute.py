"""Back end ``recompute``: every attention is torch's fused one over the Q and K of its ``s``. It never keeps P."""

from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention import fused
from lazyformer_fairseq.modules.attention.blocks import blockwise
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.memory_costs import SINGLE, AttentionSize, Memory


class RecomputedAttention:
    """Queries and keys to attend with anew."""

    def __init__(self, q_BNTD: Tensor, k_BNKD: Tensor, scores: Scores):
        self.q_BNTD = q_BNTD
        self.k_BNKD = k_BNKD
        self.scores = scores
        # We write positions out once for all readers: they are no smaller than what torch adds to scores.
        self._added = None if scores.position_queries_BNTD is None else self._dense()

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """softmax(QK^T / sqrt(D) + additions) V (B, N, T, D); each call draws its own dropout mask.

        torch fuses no attention whose bias is learned: there our own fused kernel takes its place, unless dropout
        is on, which that kernel lacks. torch keeps Transformer-XL's positions: to it they are a dense bias.
        """
        can_fuse = self.scores.features.isdisjoint(blockwise.LACKS) and not dropout
        if self._added is None and self.scores.is_learning and can_fuse:
            return fused.attend(self.q_BNTD, self.k_BNKD, v_BNKD, self.scores, dropout, readers=0)[0]
        added = self._dense() if self._added is None else self._added
        return F.scaled_dot_product_attention(self.q_BNTD, self.k_BNKD, v_BNKD, attn_mask=added, dropout_p=dropout)

    def _dense(self) -> Tensor | None:
        return self.scores.dense(self.q_BNTD.size(-2), self.k_BNKD.size(-2), self.q_BNTD)


def attend(
    q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, scores: Scores, dropout: float, readers: int = 0
) -> tuple[Tensor, RecomputedAttention]:
    """As :func:`lazyformer_fairseq.modules.attention.attend`."""
    attention = RecomputedAttention(q_BNTD, k_BNKD, scores)
    return attention.attend(v_BNKD, dropout), attention


def count_memory(size: AttentionSize) -> Memory:
    """Of an ``s``, besides queries, keys, values and output."""
    own = _count_attention(size)
    # Each reader differentiates queries and keys too.
    return own._replace(pending=size.readers and size.queries + size.values)


def count_reuse_memory(size: AttentionSize) -> Memory:
    """Of an ``l``, besides values and output: an attention of its own."""
    own = _count_attention(size._replace(readers=0))
    by_steps = own.kept > size.pairs * size.number
    return own._replace(kept=own.kept + (size.queries + size.values if by_steps else 0))


def _count_attention(size: AttentionSize) -> Memory:
    has_positions, learns = "positions" in size.features, not size.features.isdisjoint({"bias", "learned"})
    if learns and not has_positions and not size.dropout and size.features.isdisjoint(blockwise.LACKS):
        return fused.count_memory(size)
    has_sight = "sight" in size.features
    if size.device == "cpu" and (size.dropout or has_positions or learns or has_sight):
        return _count_by_steps(size)
    # One kernel: a number of each row, and what is added to scores, where that is a sublayer's own.
    added = size.pairs * size.number if has_positions else 0
    gradient = size.pairs * size.number if has_positions or learns else 0
    return Memory(added + size.rows * SINGLE, added, size.queries + 2 * size.values + gradient)


def _count_by_steps(size: AttentionSize) -> Memory:
    """torch's attention where it is not fused; in single precision inside."""
    single, has_positions = size.pairs * size.single, "positions" in size.features
    copies = (size.queries + 2 * size.values) * (size.single // size.number - 1)  # in place of those given
    kept = single * (1 + 2 * size.dropout) + copies
    if has_positions:
        kept += size.batch * (size.keys + 1) * size.width * size.number
    forward = single * (2 if has_positions and size.number == size.single else 1)
    return Memory(kept, forward, single * (1 + (not size.dropout)))
