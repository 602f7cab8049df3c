"""Attention back ends behind a common interface; ``--attention-backend`` selects one of :data:`BACK_ENDS`.

| name | the ``s`` keeps | an ``l`` computes | memory grows with |
|---|---|---|---|
| ``eager`` | its distribution | one matmul | T x K |
| ``materialize`` | the unmasked part of its distribution | one matmul | T x visible keys |
| ``recompute`` | Q and K | torch's fused attention | T (T x K with a mask, or a bias except in training on a CPU) |
| ``fused`` | Q, K and, in Triton, one number per row | P again | T |
| ``flex`` | Q and K | torch's FlexAttention | T (T x visible keys with positions) |

All back ends compute the same function. ``materialize`` and ``fused`` compute the gradients of a whole lazy block at
once. An ``s`` without consumers is a block of one layer.
"""

from lazyformer_fairseq.modules.attention.back_ends import BACK_ENDS, attend
from lazyformer_fairseq.modules.attention.interface import AttentionCall, AttentionInputs, ReusableAttention

__all__ = ["BACK_ENDS", "AttentionCall", "AttentionInputs", "ReusableAttention", "attend"]
