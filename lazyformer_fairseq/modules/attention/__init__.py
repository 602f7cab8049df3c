"""How the attention of a lazy block is computed: four back ends with one interface, ``--lazy-backend``.

| name | the ``s`` keeps | an ``l`` computes | memory |
|---|---|---|---|
| ``eager`` | its distribution | a product | n x n |
| ``materialize`` | its distribution | a product; gradients of the block come together once | n x n |
| ``recompute`` | Q and K | torch's fused attention | n (n x n with a bias that is not learned) |
| ``fused`` | Q, K and a number a row | P anew, no maximum to find; gradients of the block come together once | n |

All compute the same. An ``s`` that no ``l`` reads is a block of one layer.
"""

from typing import Protocol

from torch import Tensor

from lazyformer_fairseq.modules.attention import eager, fused, materialize, recompute
from lazyformer_fairseq.modules.attention.scores import ScoreBias


class ReusableAttention(Protocol):
    """What an ``s`` hands to the ``l`` above it: its distribution, in whatever form."""

    def attend(self, v_BNTD: Tensor, dropout: float) -> Tensor:
        """P V, (B, N, T, D), after dropout on P with a mask of its own."""


def attend(
    q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, bias: ScoreBias, dropout: float, readers: int, backend: str
) -> tuple[Tensor, ReusableAttention]:
    """softmax(QK^T / sqrt(D) + bias) V, and the distribution for those that read it.

    Args:
        q_BNTD: queries.
        k_BNTD: keys.
        v_BNTD: values.
        bias: of the scores.
        dropout: on the distribution; what is handed on is from before it.
        readers: how many ``l`` will read it.
        backend: one of :data:`choice.BACKENDS`. With dropout ``materialize`` is ``eager``; ``fused`` has none.
    """
    if backend == "fused":
        assert not dropout, "the encoder refuses it"
        return fused.attend(q_BNTD, k_BNTD, v_BNTD, bias, readers)
    if backend == "recompute":
        return recompute.attend(q_BNTD, k_BNTD, v_BNTD, bias, dropout)
    if backend == "materialize" and not dropout:
        return materialize.attend(q_BNTD, k_BNTD, v_BNTD, bias, readers)
    return eager.attend(q_BNTD, k_BNTD, v_BNTD, bias, dropout)
