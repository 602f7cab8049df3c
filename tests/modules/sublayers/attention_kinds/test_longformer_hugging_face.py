"""Longformer's window and global tokens against Hugging Face's layer, with its weights copied."""

import copy
from unittest import mock

import pytest
import torch
from longformers import C, N, first_text, inputs, make_encoder
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.networks.encoder import Encoder


class HuggingFace(nn.Module):
    """Its layer with our weights; `window` to either side, `time` must be a multiple of twice that."""

    def __init__(self, encoder: Encoder, window: int):
        from transformers.models.longformer.modeling_longformer import LongformerConfig, LongformerSelfAttention

        super().__init__()
        config = LongformerConfig(
            hidden_size=C, num_attention_heads=N, attention_window=[2 * window], attention_probs_dropout_prob=0.0
        )
        ours, self.out_proj = encoder.sublayers[0].inner, copy.deepcopy(encoder.sublayers[0].inner.out_proj)
        self.layer = LongformerSelfAttention(config, 0).double()
        choice, values = ours.choices["window"], ours.value_makers
        parts = zip(("query", "key", "value"), ours.qkv_proj.weight.chunk(3), ours.qkv_proj.bias.chunk(3), strict=True)
        with torch.no_grad():
            for name, weight, bias in parts:
                getattr(self.layer, name).weight.copy_(weight)
                getattr(self.layer, name).bias.copy_(bias)
        if values:
            self.layer.query_global, self.layer.key_global, self.layer.value_global = (
                copy.deepcopy(part) for part in (choice.q_proj, choice.k_proj, values["window"].v_proj)
            )

    def forward(self, x_BTC: Tensor, padding_BT: Tensor, global_BT: Tensor) -> Tensor:
        mask = torch.zeros(x_BTC.shape[:2], dtype=torch.double)
        mask = mask.masked_fill(global_BT, 10_000).masked_fill(padding_BT, -10_000)
        is_global = bool(global_BT.any())
        with mock.patch.object(F, "softmax", lambda scores, dim, dtype: torch.softmax(scores, dim)):  # not in float32
            return self.out_proj(self.layer(x_BTC, mask, padding_BT, global_BT, is_global)[0])

    def named_gradients(self, leaves: list[Tensor]) -> list[Tensor]:
        """In the order of :func:`our_gradients`."""
        layer = self.layer
        weights = [torch.cat([getattr(layer, name).weight.grad for name in ("query", "key", "value")])]
        weights += [torch.cat([getattr(layer, name).bias.grad for name in ("query", "key", "value")])]
        of_global = [layer.query_global, layer.key_global, layer.value_global]
        weights += [part.grad for each in of_global for part in (each.weight, each.bias) if part.grad is not None]
        return [leaf.grad for leaf in leaves] + [part.grad for part in self.out_proj.parameters()] + weights


def our_gradients(encoder: Encoder, leaves: list[Tensor]) -> list[Tensor]:
    attention = encoder.sublayers[0].inner
    weights = [*attention.out_proj.parameters(), *attention.qkv_proj.parameters()]
    if attention.value_makers:
        choice, makers = attention.choices["window"], attention.value_makers
        weights += [*choice.q_proj.parameters(), *choice.k_proj.parameters(), *makers["window"].v_proj.parameters()]
    return [leaf.grad for leaf in leaves] + [weight.grad for weight in weights]


PADDING = {"none": (), "right": (9, 10, 11), "left": (0, 1), "holes": (0, 5, 6)}


@pytest.mark.parametrize("where", PADDING)
@pytest.mark.parametrize("tokens", ["", "global=1", "global=3", "global=given"])
@pytest.mark.parametrize("window", [2, 3])  # theirs fails at 1
def test_it_is_hugging_faces_layer(window, tokens, where):
    time, padding = 12, torch.zeros(2, 12, dtype=torch.bool)
    padding[0, list(PADDING[where])] = True
    encoder = make_encoder(f"s[window={window}{',' * bool(tokens)}{tokens}]")
    theirs = HuggingFace(encoder, window)
    given = None
    if tokens == "global=given":
        given = torch.zeros(2, time, dtype=torch.bool)
        given[0, 3], given[1, [2, 8, 11]] = True, True
    first = {"global=1": 1, "global=3": 3}.get(tokens, 0)
    x, text = inputs(2, time), ~padding[..., None]
    attention = encoder.sublayers[0].inner
    results = []
    for call in (
        lambda x: attention(
            x, {}, encoder.context(x, 0, padding if where != "none" else None, where == "right", given)
        )[0],
        lambda x: theirs(x, padding, first_text(padding, first) if given is None else given),
    ):
        leaf = x.clone().requires_grad_()
        y = call(leaf).masked_fill(~text, 0)
        (y * torch.linspace(-1, 1, y.numel()).double().view_as(y)).sum().backward()
        ours = not results
        results.append((y, *(our_gradients(encoder, [leaf]) if ours else theirs.named_gradients([leaf]))))
    for ours, others in zip(*results, strict=True):
        torch.testing.assert_close(ours, others, atol=1e-10, rtol=1e-8)
