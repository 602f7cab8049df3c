"""``s[span=S]``: each head learns how far it looks (Sukhbaatar et al., 2019a, section 2.2)."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..attention import Attend, Attended, Attention, AttentionKind
from ..interface import KINDS, PlannedSublayer
from ..sights import Places


class Span(AttentionKind):
    """softmax of the scores plus log min(max((R + z - x) / R, 0), 1): x the distance, R the ramp, z a head's span.

    The loss that keeps spans short in pre-training is not part of the exported model.

    Attributes:
        shares: z / S of each head, (N,).
    """

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__(config, planned)
        self.limit, self.ramp = planned.settings["span"], planned.settings["ramp"]
        self.shares = nn.Parameter(torch.zeros(self.num_heads))

    def init_own_weights(self, std: float) -> None:
        nn.init.zeros_(self.shares)

    def attend(self, attention: Attention, inner: Attend) -> Attended:
        if self.training:
            self.shares.data.clamp_(0, 1)  # a head that left the bounds could not come back
        distance_TT = Places(attention).ahead_TT.abs()
        mask = ((self.ramp + self._spans()[:, None, None] - distance_TT) / self.ramp).clamp(0, 1)
        is_out = (mask == 0) | (distance_TT >= self.limit)
        logarithm = mask.masked_fill(is_out, 1).log()
        return inner(attention.with_added(logarithm.masked_fill(is_out, float("-inf"))).with_(may_be_blind=True))

    def _spans(self) -> Tensor:
        """z in tokens (N,), in single precision or better."""
        return self.shares.to(torch.promote_types(self.shares.dtype, torch.float32)).clamp(0, 1) * self.limit


KINDS["span"] = Span
