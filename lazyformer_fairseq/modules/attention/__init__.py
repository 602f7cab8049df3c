"""Back ends of attention with one interface, ``--attention-backend``; :data:`BACK_ENDS` lists them.

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

from lazyformer_fairseq.modules.attention.back_ends import BACK_ENDS, attend
from lazyformer_fairseq.modules.attention.interface import AttentionCall, AttentionInputs, ReusableAttention

__all__ = ["BACK_ENDS", "AttentionCall", "AttentionInputs", "ReusableAttention", "attend"]
