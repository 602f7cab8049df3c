"""The back ends of attention, which share one interface; ``--attention-backend`` selects one of :data:`BACK_ENDS`.

| name | the ``s`` keeps | an ``l`` computes | memory grows with |
|---|---|---|---|
| ``eager`` | its distribution | a product | T x K |
| ``materialize`` | the part of its distribution that the mask shows | a product | T x keys shown |
| ``recompute`` | Q and K | torch's fused attention | T (T x K with a mask, or a bias except in training on a CPU) |
| ``fused`` | Q, K and, in Triton, one number per row | P again | T |
| ``flex`` | Q and K | torch's FlexAttention | T (T x keys shown with positions) |

All back ends compute the same function. ``materialize`` and ``fused`` compute the gradients of a whole lazy block at
once. An ``s`` that no ``l`` reads is a block of one layer.
"""

from lazyformer_fairseq.modules.attention.back_ends import BACK_ENDS, attend
from lazyformer_fairseq.modules.attention.interface import AttentionCall, AttentionInputs, ReusableAttention

__all__ = ["BACK_ENDS", "AttentionCall", "AttentionInputs", "ReusableAttention", "attend"]
