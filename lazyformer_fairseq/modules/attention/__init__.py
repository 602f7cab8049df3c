"""Attention back ends behind a common interface; ``--attention-backend`` selects one of :data:`BACK_ENDS`.

| name | the ``s`` keeps | each ``l`` computes | memory grows with |
|---|---|---|---|
| ``eager`` | its distribution | one matmul | T x K |
| ``materialize`` | the unmasked part of its distribution | one matmul | T x visible keys |
| ``recompute`` | Q and K | torch's fused attention | T; T x K with a mask, or with a bias at inference or on a GPU |
| ``fused`` | Q, K and, in Triton, one number per query | the distribution again | T |
| ``flex`` | Q and K | torch's FlexAttention | T; T x visible keys with positions |

T is the number of queries and K the number of keys. All back ends compute the same function. ``materialize`` and
``fused`` compute the gradients of a whole lazy block (an ``s`` and the ``l`` sublayers that reuse its distribution) at
once. An ``s`` that no ``l`` reuses is a block of one layer.
"""

from lazyformer_fairseq.modules.attention.back_ends import BACK_ENDS, attend
from lazyformer_fairseq.modules.attention.interface import AttentionCall, AttentionInputs, ReusableAttention

__all__ = ["BACK_ENDS", "AttentionCall", "AttentionInputs", "ReusableAttention", "attend"]
