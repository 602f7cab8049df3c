"""Back end ``materialize``: the ``s`` keeps its distribution in the values' precision, each ``l`` is one product."""

from functools import partial

from torch import Tensor

from lazyformer_fairseq.modules.attention import block_gradient
from lazyformer_fairseq.modules.attention.blocks import blockwise
from lazyformer_fairseq.modules.attention.scores import Scores


def attend(
    q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, scores: Scores, dropout: float, consumers: int
) -> tuple[Tensor, block_gradient.SharedAttention]:
    """As :func:`lazyformer_fairseq.modules.attention.attend`, without dropout."""
    assert not dropout, "it has none"
    return block_gradient.attend(_KERNELS, q_BNTD, k_BNKD, v_BNKD, scores, consumers, dropout)


_KERNELS = blockwise.kernels("materialize", store=True)
count_memory = partial(blockwise.count_memory, store=True)
count_reuse_memory = partial(blockwise.count_reuse_memory, store=True)
