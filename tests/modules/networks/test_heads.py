"""Classification heads against the formulas, in NumPy."""

import numpy as np
import pytest
import torch

from lazyformer_fairseq.modules.networks.heads import CLASSIFICATION_HEADS, SpanHead


def build(kind: str, dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(1)
    return CLASSIFICATION_HEADS[kind](4, 3, dropout)


@pytest.mark.parametrize("kind", ["dense", "linear"])
def test_logits_are_of_the_first_token(kind):
    head, features = build(kind), torch.randn(2, 5, 4)
    weights = {name: weight.numpy() for name, weight in head.state_dict().items()}
    x = features[:, 0].numpy()
    if kind == "dense":
        x = np.tanh(x @ weights.pop("dense.weight").T + weights.pop("dense.bias"))
    expected = x @ weights.pop("out_proj.weight").T + weights.pop("out_proj.bias")
    assert not weights
    np.testing.assert_allclose(head(features).detach().numpy(), expected, rtol=1e-5)


def test_spans_have_two_logits_of_every_token():
    head, features = SpanHead(4), torch.randn(2, 5, 4)
    weight, bias = (weight.numpy() for weight in head.state_dict().values())
    np.testing.assert_allclose(head(features).detach().numpy(), features.numpy() @ weight.T + bias, rtol=1e-5)
    assert weight.shape == (2, 4)


def test_dropout_is_before_a_linear_heads_one_map():
    head = build("linear", dropout=0.5)
    torch.nn.init.ones_(head.out_proj.weight)
    torch.nn.init.zeros_(head.out_proj.bias)
    found = head(torch.ones(1000, 1, 4))[:, 0]
    assert set(found.tolist()) == {0.0, 2.0, 4.0, 6.0, 8.0}  # of four numbers, twice those that are kept
    assert head.eval()(torch.ones(1, 1, 4))[0, 0] == 4
