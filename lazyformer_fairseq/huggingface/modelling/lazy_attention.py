"""The ``l`` sublayer: attention with own values on a distribution computed below (LazyFormer, section 2)."""

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from .attention import AttentionSublayer, merge_heads, probabilities_of
from .interface import DISTRIBUTION, PROBABILITIES, SUBLAYERS, PlannedSublayer, Shared


class LazyAttention(AttentionSublayer):
    """P V with an output projection, P that of the nearest ``s`` below."""

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__(config, planned, shaper=planned.giver)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj.init_own_weights = self.start_copies

    def projection(self, name: str) -> tuple[Tensor, Tensor]:
        return self.v_proj.weight, self.v_proj.bias

    def forward(self, x_BTC: Tensor, below: dict[str, Any], shared: Shared) -> tuple[Tensor, dict[str, Any]]:
        distribution = below[DISTRIBUTION]
        output_BNTD = distribution.attend(self.make_values(x_BTC, self.v_proj(x_BTC)), self.dropout_now)
        handed_on = {}
        if shared.output_attentions:
            handed_on[PROBABILITIES] = probabilities_of(distribution, len(x_BTC))
        return self.out_proj(merge_heads(output_BNTD)), handed_on


SUBLAYERS["l"] = LazyAttention
