"""Activations by name, against their formulas; gates, against their definition."""

import math

import pytest
import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.masked_lm import MaskedLM
from lazyformer_fairseq.modules.networks.options import MaskedLMOptions
from lazyformer_fairseq.modules.sublayers.feed_forward import ACTIVATIONS, GATES, FeedForward
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import find_kind

X = torch.linspace(-5, 5, 101, dtype=torch.float64)
FORMULAS = {
    "gelu": X * (1 + torch.erf(X / math.sqrt(2))) / 2,
    "gelu_tanh": X * (1 + torch.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3))) / 2,
    "relu": torch.where(X > 0, X, 0),
    "silu": X / (1 + torch.exp(-X)),
    "relu_squared": torch.where(X > 0, X * X, 0),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_sublayers_and_head_have_each_their_own(name):
    torch.testing.assert_close(ACTIVATIONS[name](X), FORMULAS[name])
    sizes = {"encoder_embed_dim": 8, "encoder_attention_heads": 2, "encoder_ffn_embed_dim": 8}
    for option, of_sublayers, of_head in (("activation_fn", name, "gelu"), ("head_activation_fn", "gelu", name)):
        model = MaskedLM(MaskedLMOptions("ff", **{option: name}, **sizes), 9)
        found = {each.activation for each in model.modules() if isinstance(each, FeedForward)}
        assert found == {ACTIVATIONS[of_sublayers]} and model.encoder.lm_head.activation is ACTIVATIONS[of_head]


@pytest.mark.parametrize("gate", find_kind("f").setting("gate").choices)
def test_a_gate_multiplies_one_map_by_the_activation_of_another(gate):
    torch.testing.assert_close(GATES[gate](X), FORMULAS[gate])
    module = FeedForward(3, 5, gate=gate).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    first, second = module.fc1.weight.chunk(2)
    of_first, of_second = module.fc1.bias.chunk(2)
    hidden = GATES[gate](torch.einsum("btc,wc->btw", x, first) + of_first)
    hidden = hidden * (torch.einsum("btc,wc->btw", x, second) + of_second)
    expected = torch.einsum("btw,cw->btc", hidden, module.fc2.weight) + module.fc2.bias
    leaves = (x, *module.parameters())
    one, other = (torch.autograd.grad(y.square().sum(), leaves) for y in (module(x, {}, None)[0], expected))
    torch.testing.assert_close([module(x, {}, None)[0], *one], [expected, *other])


def test_another_gate_is_refused_with_a_caret():
    with pytest.raises(UserError, match=r"must be one of gelu, silu, relu, not 'tanh'\n  sf\[gate=tanh\]\n {10}\^"):
        plan("sf[gate=tanh]")
