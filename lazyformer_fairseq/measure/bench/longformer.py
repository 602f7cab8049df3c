"""Hugging Face's Longformer layer as a baseline: its attention of given queries, keys and values."""

from typing import Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.fairseq_plugin.models.huggingface_bert import has_transformers
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import ENCODER


class HuggingFaceLongformer:
    """Forward and backward of `LongformerSelfAttention` whose projections give what is given.

    Args:
        window: keys to either side.
        projected: (B, T, 3 C), queries, keys and values; T must be a multiple of twice the window.
        gradient: of the output, (B, T, C).
        heads: N.
    """

    def __init__(self, window: int, projected: Tensor, gradient: Tensor, heads: int):
        from transformers.models.longformer.modeling_longformer import LongformerConfig, LongformerSelfAttention

        batch, time, width = gradient.shape
        config = LongformerConfig(
            hidden_size=width,
            num_attention_heads=heads,
            attention_window=[2 * window],
            attention_probs_dropout_prob=0.0,
        )
        self.layer = LongformerSelfAttention(config, 0)
        parts = (part.detach().transpose(0, 1).clone().requires_grad_() for part in projected.chunk(3, -1))
        self.given = [_Given(part) for part in parts]
        self.layer.query, self.layer.key, self.layer.value = self.given
        self.x = torch.zeros_like(gradient)
        self.mask = gradient.new_zeros(batch, time)
        self.nowhere = torch.zeros(batch, time, dtype=torch.bool, device=gradient.device)
        self.gradient = gradient

    def __call__(self) -> tuple[Tensor, ...]:
        """Gradients of queries, keys and values, each (T, B, C)."""
        output = self.layer(self.x, self.mask, self.nowhere, self.nowhere, False)[0]
        return torch.autograd.grad(output, [given.part for given in self.given], self.gradient)


class _Given(nn.Module):
    def __init__(self, part: Tensor):
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part * 1  # the layer divides queries in place


def plain_window(kind: str, time: int) -> Optional[int]:
    """w of ``s[window=w]`` where Hugging Face's layer computes the same; None elsewhere, and without the package."""
    first, *others = plan(kind, ENCODER)
    names = [name for name, _ in first.settings]
    if others or names != ["window"] or time % (2 * first.values["window"]) or not has_transformers():
        return None
    return first.values["window"]
