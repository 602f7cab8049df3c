"""The sublayers of the plan, one above the other, and T5's bias that they share."""

import math
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from .interface import PROBABILITIES, SUBLAYERS, PlannedSublayer, Shared, Sublayer, read_plan


class ResidualSublayer(nn.Module):
    """LayerNorm(x + F(x)) (post-norm), or x + F(LayerNorm(x)) (pre-norm). F is `inner`; dropout acts on its output."""

    def __init__(self, inner: Sublayer, config: PretrainedConfig):
        super().__init__()
        self.inner = inner
        self.dropout = config.hidden_dropout_prob
        self.normalize_before = config.normalize_before
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x_BTC: Tensor, below: dict[str, Any], shared: Shared) -> tuple[Tensor, dict[str, Any]]:
        inner_input = self.layer_norm(x_BTC) if self.normalize_before else x_BTC
        y_BTC, handed_on = self.inner(inner_input, below, shared)
        x_BTC = x_BTC + F.dropout(y_BTC, self.dropout, self.training)
        return (x_BTC if self.normalize_before else self.layer_norm(x_BTC)), handed_on


def build_sublayers(config: PretrainedConfig) -> nn.ModuleList:
    """One module per place of the config's plan."""
    return nn.ModuleList(build_sublayer(config, planned) for planned in read_plan(config.plan))


def build_sublayer(config: PretrainedConfig, planned: PlannedSublayer) -> nn.Module:
    inner = SUBLAYERS[planned.letter](config, planned)
    return ResidualSublayer(inner, config) if inner.is_residual else inner


class RelativePositionBias(nn.Module):
    """T5's, one table of biases by bucket of distances and head, for all sublayers that compare queries with keys."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.num_buckets = config.relative_position_buckets
        self.max_distance = config.relative_position_max_distance
        self.table = nn.Parameter(torch.zeros(self.num_buckets, config.num_attention_heads))

    def forward(self, time: int) -> Tensor:
        """(1, N, T, T) for queries and keys."""
        places = torch.arange(time, device=self.table.device)
        buckets_TT = self._bucket(places[None, :] - places[:, None])
        return self.table[buckets_TT].permute(2, 0, 1)[None]

    def _bucket(self, distance: Tensor) -> Tensor:
        """Of (key position - query position): one each for short ones, logarithmically wider up to `max_distance`."""
        half = self.num_buckets // 2
        exact = half // 2
        magnitude = distance.abs()
        steps = torch.log(magnitude.clamp(min=exact).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (steps * (half - exact)).long()).clamp(max=half - 1)
        return torch.where(magnitude < exact, magnitude, far) + half * (distance > 0)


def embed_positions(embeddings: Tensor, time: int, padding_mask_BT: Optional[Tensor]) -> Tensor:
    """Of T tokens, from a table (positions, C). They count from each row's first text: padding before it takes none."""
    if time > embeddings.size(0):
        raise ValueError(f"a sequence of {time} tokens is longer than the model's {embeddings.size(0)} positions")
    if padding_mask_BT is None:
        return embeddings[:time]
    first = padding_mask_BT.int().argmin(-1, keepdim=True)
    return embeddings[(torch.arange(time, device=first.device) - first).clamp(min=0)]


def run_sublayers(
    sublayers: nn.ModuleList, x_BTC: Tensor, shared: Shared, checkpoint: Any = None
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The last output, the input and all outputs, and attention probabilities where they are asked for.

    Args:
        checkpoint: called with (sublayer, x, below, shared) in place of the sublayer, as to save memory in training.
    """
    all_states, probabilities = [x_BTC], []
    below: dict[str, Any] = {}
    for sublayer in sublayers:
        arguments = (x_BTC, below, shared)
        x_BTC, handed_on = sublayer(*arguments) if checkpoint is None else checkpoint(sublayer, *arguments)
        below = {**below, **handed_on}
        all_states.append(x_BTC)
        if PROBABILITIES in handed_on:
            probabilities.append(handed_on[PROBABILITIES])
    return x_BTC, all_states, probabilities
