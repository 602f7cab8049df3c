"""How attention is computed: back ends with one interface, ``--attention-backend``. One row each in :data:`BACK_ENDS`.

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

from collections.abc import Callable, Set
from typing import NamedTuple, Protocol

from torch import Tensor

from lazyformer_fairseq.modules.attention import counted, eager, flex, fused, materialize, recompute
from lazyformer_fairseq.modules.attention.blocks import blockwise
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.attention.tiles import attend as tiles
from lazyformer_fairseq.modules.attention.tiles import kernels
from lazyformer_fairseq.modules.memory_costs import AttentionSize, Memory


class ReusableAttention(Protocol):
    """What an ``s`` hands to the ``l`` above it: its distribution, in whatever form."""

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """P V, (B, N, T, D), after dropout on P with a mask of its own."""


class BackEnd(NamedTuple):
    """A row.

    Attributes:
        attend: as :func:`attend`, without the name.
        has_dropout: whether it can apply dropout to the distribution; where it must but cannot, ``eager`` replaces it.
        keeps_distribution: whether it needs memory T x K.
        lacks: features of scores that it never computes.
        supports: (type of the device, features of the scores, head size) -> whether ``auto`` may choose it there.
        count_memory, count_reuse_memory: of an ``s`` and of an ``l``, besides queries, keys, values and output.
        runs_on: type of the device -> whether it may be named there, and is measured.
    """

    attend: Callable[..., tuple[Tensor, ReusableAttention]]
    count_memory: Callable[[AttentionSize], Memory]
    count_reuse_memory: Callable[[AttentionSize], Memory]
    has_dropout: bool
    keeps_distribution: bool
    lacks: frozenset[str] = frozenset()
    supports: Callable[[str, Set[str], int], bool] = lambda device, features, head_size: True
    runs_on: Callable[[str], bool] = lambda device: True


BACK_ENDS = {
    "eager": BackEnd(
        eager.attend, eager.count_memory, eager.count_reuse_memory, has_dropout=True, keeps_distribution=True
    ),
    "materialize": BackEnd(
        materialize.attend,
        materialize.count_memory,
        materialize.count_reuse_memory,
        has_dropout=False,
        keeps_distribution=True,
        lacks=blockwise.LACKS,
    ),
    "recompute": BackEnd(
        recompute.attend,
        recompute.count_memory,
        recompute.count_reuse_memory,
        has_dropout=True,
        keeps_distribution=False,
        lacks=frozenset({"entmax", "synthetic"}),
    ),
    "fused": BackEnd(
        fused.attend,
        fused.count_memory,
        fused.count_reuse_memory,
        has_dropout=False,
        keeps_distribution=False,
        lacks=blockwise.LACKS,
        supports=fused.supports,
        runs_on=fused.runs_on,
    ),
    "tiles": BackEnd(
        tiles.attend,
        tiles.count_memory,
        tiles.count_reuse_memory,
        has_dropout=True,
        keeps_distribution=False,
        lacks=kernels.LACKS,
    ),
    "flex": BackEnd(
        flex.attend,
        flex.count_memory,
        flex.count_reuse_memory,
        has_dropout=False,
        keeps_distribution=False,
        lacks=flex.LACKS,
        supports=flex.supports,
    ),
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
