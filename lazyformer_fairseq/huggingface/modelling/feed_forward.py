"""The ``f`` sublayer."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from .interface import SUBLAYERS, PlannedSublayer, Shared, Sublayer


class FeedForward(Sublayer):
    """W2 dropout(activation(W1 x))."""

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__()
        self.activation = ACT2FN[config.hidden_act]
        self.dropout = config.activation_dropout
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_BTC: Tensor, below: dict[str, Any], shared: Shared) -> tuple[Tensor, dict[str, Any]]:
        return self.fc2(F.dropout(self.activation(self.fc1(x_BTC)), self.dropout, self.training)), {}


SUBLAYERS["f"] = FeedForward
