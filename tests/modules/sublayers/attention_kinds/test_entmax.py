"""entmax in place of softmax, against the package `entmax` on the equations' scores."""

import entmax as package
import pytest
import torch
from attention_by_einsum import BATCH, HEADS, WIDTH, Attending, assert_same, padded_and_with_memory
from torch import Tensor

from lazyformer_fairseq.modules.networks.encoder import Encoder


class Sparse(Attending):
    def weigh(self, q: Tensor, scores: Tensor, distances: Tensor) -> Tensor:
        choice = self.s.choices["entmax"]
        if choice.exponent:
            return package.entmax_bisect(scores, choice.exponent)
        exponents = 1 + torch.sigmoid(choice.shape_N)
        return package.entmax_bisect(scores, exponents[:, None, None])


@padded_and_with_memory
@pytest.mark.parametrize("exponent", ["1.3", "1.5", "2", "learned"])
def test_it_is_the_papers(given, exponent):
    attending = Sparse(f"s[entmax={exponent}]", **given)
    expected = attending.with_gradients(attending.expected(attending.weigh))
    assert_same(attending.with_gradients(attending.outputs()), expected)


def test_far_worse_keys_have_no_weight():
    attending = Attending("s[entmax=1.5]", 40)
    _, handed_on = attending.s(3 * attending.x, {}, attending.context())
    probabilities = handed_on["distribution"].probabilities
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(BATCH, HEADS, 40, dtype=torch.double))
    assert (probabilities == 0).double().mean() > 0.5


def test_a_window_takes_keys_away_before():
    attending = Attending("s[window=2,entmax=learned]", 9, padding=torch.arange(9) >= torch.tensor([[9], [5]]))
    output, handed_on = attending.s(attending.x, {}, attending.context())
    probabilities = handed_on["distribution"].probabilities
    places = torch.arange(9)
    assert (probabilities[..., (places - places[:, None]).abs() > 2] == 0).all() and output.isfinite().all()
    torch.testing.assert_close(probabilities[0].sum(-1), torch.ones(HEADS, 9, dtype=torch.double))
    assert (probabilities[1, :, 7:] == 0).all()  # these see padding alone


def test_each_head_learns_an_exponent():
    """From a standard normal distribution, through a sigmoid (the published code)."""
    torch.manual_seed(1)
    encoder = Encoder("s[entmax=learned]f", 11, 2000, 8, 1000, max_positions=16)
    choice = encoder.sublayers[0].inner.choices["entmax"]
    assert choice.shape_N.mean().item() == pytest.approx(0, abs=0.1)
    assert choice.shape_N.std().item() == pytest.approx(1, abs=0.1)
    exponents = choice.exponents(torch.zeros(1, dtype=torch.float16))
    assert exponents.dtype == torch.float32 and 1.01 <= exponents.min() < 1.2 and 1.8 < exponents.max() <= 2


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_half_precision(precision):
    torch.manual_seed(0)
    encoder = Encoder("s[entmax=learned] l f", 11, WIDTH, 20, HEADS).eval()
    tokens = torch.randint(4, 11, (BATCH, 7))
    expected = encoder(tokens)[0]
    found = encoder.to(precision)(tokens)[0]
    assert found.dtype == precision
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
