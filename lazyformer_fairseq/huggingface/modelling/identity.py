"""The ``-`` of a pattern."""

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from .interface import SUBLAYERS, PlannedSublayer, Shared, Sublayer


class Identity(Sublayer):
    """x, with nothing around it."""

    is_residual = False

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__()

    def forward(self, x_BTC: Tensor, below: dict[str, Any], shared: Shared) -> tuple[Tensor, dict[str, Any]]:
        return x_BTC, {}


SUBLAYERS["-"] = Identity
