"""How attention is computed: back ends with one interface, ``--attention-backend``; :data:`BACK_ENDS` has them.

| name | the ``s`` keeps | an ``l`` computes | memory |
|---|---|---|---|
| ``eager`` | its distribution | a product | T x K |
| ``materialize`` | its distribution | a product; gradients of the block come together once | T x K |
| ``recompute`` | Q and K | torch's fused attention | T (T x K with positions, on a GPU and at inference with a bias) |
| ``fused`` | Q, K and a number a row | P anew; gradients of the block come together once | T |
| ``tiles`` | of its distribution what the mask shows | products of that; gradients as above | T times keys shown |
| ``flex`` | Q and K | torch's FlexAttention | T (T times keys shown with positions) |

All compute the same thing. An ``s`` that no ``l`` reads is a block of one layer.
"""

from collections.abc import Set

from torch import Tensor

from lazyformer_fairseq.modules.attention import counted
from lazyformer_fairseq.modules.attention.back_ends import Eager, Fused, Materialize, Recompute, Tiles
from lazyformer_fairseq.modules.attention.flex import Flex
from lazyformer_fairseq.modules.attention.scores import BackEnd, ReusableAttention, Scores

BACK_ENDS: dict[str, BackEnd] = {
    "eager": Eager(),
    "materialize": Materialize(),
    "recompute": Recompute(),
    "fused": Fused(),
    "tiles": Tiles(),
    "flex": Flex(),
}


def fallback_backend(name: str, has_dropout: bool, features: Set[str]) -> str:
    """The back end that computes where `name` is chosen.

    ``eager`` takes its place where it cannot: for dropout, and for scores of a kind of attention that has several, such
    as those of global tokens.
    """
    row = BACK_ENDS[name]
    lacks_some = any(feature in row.lacks for feature in features)  # torch 2.6 cannot compile isdisjoint of no features
    return "eager" if (has_dropout and not row.has_dropout) or lacks_some else name


def attend(
    q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, scores: Scores, dropout: float, consumers: int, back_end: str
) -> tuple[Tensor, ReusableAttention]:
    """softmax(QK^T / sqrt(D) + additions to scores) V, and the distribution for its consumers.

    Queries and keys may have another size than values; its root divides their products. Without numbers (0) the
    additions alone are the scores.

    Args:
        scores: what to add, and which keys a query may look at.
        dropout: on the distribution; the ``s`` hands on the one from before it.
        consumers: how many ``l`` will read it.
        back_end: a name of :data:`BACK_ENDS`; see :func:`fallback_backend`.
    """
    if q_BNTD.is_meta:
        return counted.attend(q_BNTD, k_BNKD, v_BNKD, scores, dropout, consumers)
    row = BACK_ENDS[fallback_backend(back_end, dropout > 0, scores.features)]
    return row.attend(q_BNTD, k_BNKD, v_BNKD, scores, dropout, consumers)
