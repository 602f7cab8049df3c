"""Activations by name, against their formulas."""

import math

import pytest
import torch
from helpers import dictionary_of

from lazyformer_fairseq.fairseq_plugin.models.config import LazyFormerConfig
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.modules.sublayers.feed_forward import ACTIVATIONS, FeedForward

X = torch.linspace(-5, 5, 101, dtype=torch.float64)
FORMULAS = {
    "gelu": X * (1 + torch.erf(X / math.sqrt(2))) / 2,
    "gelu_tanh": X * (1 + torch.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3))) / 2,
    "relu": torch.where(X > 0, X, 0),
    "relu_squared": torch.where(X > 0, X * X, 0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_sublayers_and_head_have_each_their_own(name):
    torch.testing.assert_close(ACTIVATIONS[name](X), FORMULAS[name])
    sizes = {"encoder_embed_dim": 8, "encoder_attention_heads": 2, "encoder_ffn_embed_dim": 8}
    for option, of_sublayers, of_head in (("activation_fn", name, "gelu"), ("head_activation_fn", "gelu", name)):
        model = LazyFormerModel(LazyFormerConfig("ff", **{option: name}, **sizes), dictionary_of(9))
        found = {each.activation for each in model.modules() if isinstance(each, FeedForward)}
        assert found == {ACTIVATIONS[of_sublayers]} and model.encoder.lm_head.activation is ACTIVATIONS[of_head]
