"""All-attention's learned keys and values, and entmax in place of softmax: the equations of their papers."""

import math

import entmax as package
import pytest
import torch
from attention_by_einsum import BATCH, HEADS, SIZE, Attending, padded_and_with_memory
from torch import Tensor, nn

from lazyformer_fairseq.modules.networks.encoder import Encoder

VECTORS = 5


class WithVectors(Attending):
    """One softmax over tokens and vectors; keys times sqrt(D), values times sqrt(m) (section 4)."""

    window = math.inf

    def weigh(self, q: Tensor, scores: Tensor, distances: Tensor) -> Tensor:
        scores = scores.masked_fill(distances.abs() > self.window, -math.inf)
        keys = self.s.choices["persistent"].keys * math.sqrt(SIZE)
        to_vectors = torch.einsum("bntd,nmd->bntm", q, keys) / math.sqrt(SIZE)
        return torch.cat([scores, to_vectors], -1).softmax(-1)

    def attend(self, probabilities: Tensor, values: Tensor, sublayer: nn.Module, x_BKC: Tensor) -> Tensor:
        vectors = sublayer.value_transforms["persistent"].values * math.sqrt(VECTORS)
        return torch.einsum("bntk,bnkd->bntd", probabilities, torch.cat([values, vectors.expand(BATCH, -1, -1, -1)], 2))


class Sparse(Attending):
    def weigh(self, q: Tensor, scores: Tensor, distances: Tensor) -> Tensor:
        choice = self.s.choices["entmax"]
        return package.entmax_bisect(scores, choice.exponent or 1 + torch.sigmoid(choice.shape_N)[:, None, None])


@padded_and_with_memory
@pytest.mark.parametrize("back_end", ["eager", "recompute", "materialize", "fused"])
def test_vectors_are_the_papers(given, back_end):
    WithVectors(f"s[persistent={VECTORS}]", **given, back_end=back_end).assert_equations()
    windowed = WithVectors(f"s[window=1,persistent={VECTORS}]", **given, back_end=back_end)
    windowed.window = 1
    windowed.assert_equations()  # vectors are seen from everywhere, and where a query sees nothing else


@padded_and_with_memory
@pytest.mark.parametrize("exponent", ["1.3", "1.5", "2", "learned"])
def test_entmax_is_the_papers(given, exponent):
    Sparse(f"s[entmax={exponent}]", **given).assert_equations()


def test_keys_and_values_of_vectors_start_with_a_variance_of_one_and_an_l_has_its_own():
    """As in the published code: the weights are smaller, and multiplied by the root of D or m."""
    torch.manual_seed(1)
    attention, lazy = (sublayer.inner for sublayer in Encoder("s[persistent=512] l", None, 256, 8, 8).sublayers)
    keys, values = attention.choices["persistent"].keys, attention.value_transforms["persistent"].values
    assert keys.std().item() * math.sqrt(32) == pytest.approx(1, abs=0.02)
    assert values.std().item() * math.sqrt(512) == pytest.approx(1, abs=0.02)
    assert keys.shape == values.shape == (8, 512, 32)
    assert lazy.value_transforms["persistent"].values is not values


def test_a_window_takes_keys_away_before_entmax():
    attending = Attending("s[window=2,entmax=learned]", 9, padding=torch.arange(9) >= torch.tensor([[9], [5]]))
    output, probabilities = attending.probabilities()
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
