"""How attention is computed: back ends with one interface, ``--attention-backend``; :data:`BACK_ENDS` has them.

| name | the ``s`` keeps | an ``l`` computes | memory |
|---|---|---|---|
| ``eager`` | its distribution | a product | T x K |
| ``materialize`` | of its distribution what the mask shows | a product | T times keys shown |
| ``recompute`` | Q and K | torch's fused attention | T (T x K with a mask, and with a bias but in training on a CPU) |
| ``fused`` | Q, K and, in Triton, a number per row | P anew | T |
| ``flex`` | Q and K | torch's FlexAttention | T (T times keys shown with positions) |

All compute the same thing. ``materialize`` and ``fused`` gather the gradients of a block once. An ``s`` that no ``l``
reads is a block of one layer.
"""

from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import counted
from lazyformer_fairseq.modules.attention.back_ends import FUSED, Eager, Materialize, Recompute
from lazyformer_fairseq.modules.attention.flex import Flex
from lazyformer_fairseq.modules.attention.interface import BackEnd, ReusableAttention, Variant
from lazyformer_fairseq.modules.attention.scores import Scores

BACK_ENDS: dict[str, BackEnd] = {
    "eager": Eager(),
    "materialize": Materialize(),
    "recompute": Recompute(),
    "fused": FUSED,
    "flex": Flex(),
}


def attend(
    q_BNTD: Tensor,
    k_BNKD: Tensor,
    v_BNKD: Tensor,
    scores: Scores,
    dropout: float,
    consumers: int,
    back_end: str,
) -> tuple[Tensor, ReusableAttention]:
    """Compute softmax(QK^T / sqrt(D) + additions to scores) V, and the distribution for its consumers.

    Queries and keys may have another size than values; its root divides their products. Without numbers (0) the
    additions alone are the scores.

    Args:
        q_BNTD, k_BNKD, v_BNKD: queries, keys and values.
        scores: what to add, and which keys a query may look at.
        dropout: on the distribution; the ``s`` hands on the one from before it.
        consumers: how many ``l`` will read it.
        back_end: a name of :data:`BACK_ENDS`.

    Raises:
        UserError: the back end does not compute this.
    """
    if q_BNTD.is_meta:
        return counted.attend(q_BNTD, k_BNKD, v_BNKD, scores, dropout, consumers)
    variant = Variant.of(q_BNTD, k_BNKD, v_BNKD, scores, dropout, consumers)
    device = q_BNTD.device.type
    why = BACK_ENDS[back_end].why_not(variant, device, v_BNKD.dtype)
    if why is not None:
        able = [name for name, each in BACK_ENDS.items() if each.why_not(variant, device, v_BNKD.dtype) is None]
        raise UserError(f"--attention-backend {back_end}: {why}; choose from {', '.join(('auto', *able))}")
    return BACK_ENDS[back_end].attend(q_BNTD, k_BNKD, v_BNKD, scores, dropout, consumers)
