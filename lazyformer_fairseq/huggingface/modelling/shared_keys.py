"""The ``k`` sublayer: own queries on the keys and values of an ``s`` below (Brandon et al., 2024)."""

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from .attention import AttentionSublayer, split_heads
from .interface import DISTRIBUTION, KEYS_AND_VALUES, SUBLAYERS, PlannedSublayer, Shared


class SharedKeysAttention(AttentionSublayer):
    """softmax(QK^T / sqrt(D) + bias) V, K and V those of the nearest ``s`` below. It sees what that ``s`` sees."""

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__(config, planned, shaper=None)
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BTC: Tensor, below: dict[str, Any], shared: Shared) -> tuple[Tensor, dict[str, Any]]:
        q_BNTD = split_heads(self.q_proj(x_BTC), self.num_heads)
        y_BTC, handed_on = self.attend(below[KEYS_AND_VALUES].with_(x_BTC=x_BTC, q_BNTD=q_BNTD))
        del handed_on[DISTRIBUTION]  # an ``l`` above reads that of the ``s``
        return y_BTC, handed_on


SUBLAYERS["k"] = SharedKeysAttention
