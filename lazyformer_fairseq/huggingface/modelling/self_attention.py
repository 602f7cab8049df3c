"""The ``s`` sublayer: self-attention."""

from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from .attention import Attention, AttentionSublayer, split_heads
from .interface import KINDS, SUBLAYERS, PlannedSublayer, Shared


class SelfAttention(AttentionSublayer):
    """softmax(QK^T / sqrt(D) + bias) V with an output projection, or what its kinds of attention make of it."""

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__(config, planned, shaper=planned)
        projected = {"queries", "keys"}
        for name in planned.kinds:
            self.choices[name] = KINDS[name](config, planned)
            projected &= self.choices[name].projections
        width = config.hidden_size
        self.widths = [width * ("queries" in projected), width * ("keys" in projected), width]
        self.qkv_proj = nn.Linear(width, sum(self.widths))
        self.qkv_proj.init_own_weights = self.start_copies

    def forward(self, x_BTC: Tensor, below: dict[str, Any], shared: Shared) -> tuple[Tensor, dict[str, Any]]:
        q_BTC, k_BKC, v_BKC = self._project(x_BTC, shared)
        q_BNTD, k_BNKD = split_heads(q_BTC, self.num_heads), split_heads(k_BKC, self.num_heads)
        values = self.make_values(x_BTC, v_BKC)
        return self.attend(Attention(x_BTC, q_BNTD, k_BNKD, values, shared.added_BNTT, shared))

    def projection(self, name: str) -> tuple[Tensor, Tensor]:
        part = "qkv".index(name)
        return self.qkv_proj.weight.split(self.widths)[part], self.qkv_proj.bias.split(self.widths)[part]

    def _project(self, x_BTC: Tensor, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        for choice in self.choices.values():
            if (projected := choice.project(x_BTC, self.qkv_proj, shared)) is not None:
                return projected
        return self.qkv_proj(x_BTC).split(self.widths, dim=-1)


SUBLAYERS["s"] = SelfAttention
