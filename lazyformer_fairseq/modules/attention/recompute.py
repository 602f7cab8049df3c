"""Back end ``recompute``: every attention is torch's fused one over the Q and K of its ``s``. Nothing n x n is kept."""

from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention import fused
from lazyformer_fairseq.modules.attention.scores import ScoreBias


class RecomputedAttention:
    """Queries and keys to attend with anew.

    Args:
        q_BNTD: queries.
        k_BNTD: keys.
        bias: see :class:`ScoreBias`.
    """

    def __init__(self, q_BNTD: Tensor, k_BNTD: Tensor, bias: ScoreBias):
        self.q_BNTD = q_BNTD
        self.k_BNTD = k_BNTD
        self.bias = bias

    def attend(self, v_BNTD: Tensor, dropout: float) -> Tensor:
        """softmax(QK^T / sqrt(D) + bias) V (B, N, T, D); each call draws its own dropout mask.

        torch fuses no attention whose bias is learned: there our own fused kernel takes its place, unless dropout,
        which it has not, is asked for.
        """
        if self.bias.is_learning and not dropout:
            return fused.attend(self.q_BNTD, self.k_BNTD, v_BNTD, self.bias, readers=0)[0]
        bias = self.bias.dense(v_BNTD.size(-2), v_BNTD.dtype)
        return F.scaled_dot_product_attention(self.q_BNTD, self.k_BNTD, v_BNTD, attn_mask=bias, dropout_p=dropout)


def attend(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, bias: ScoreBias, dropout: float
) -> tuple[Tensor, RecomputedAttention]:
    """As :func:`lazyformer_fairseq.modules.attention.attend`."""
    attention = RecomputedAttention(q_BNTD, k_BNTD, bias)
    return attention.attend(v_BNTD, dropout), attention
