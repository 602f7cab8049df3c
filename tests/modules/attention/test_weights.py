"""entmax against the bisection of the package `entmax` in double precision."""

import math

import entmax as package
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lazyformer_fairseq.modules.attention import weights

EXPONENTS = [1.0005, 1.01, 1.1, 1.3, 1.5, 1.7, 1.99, 2.0]


def by_bisection(scores: Tensor, exponent_N: Tensor) -> Tensor:
    return package.entmax_bisect(scores, exponent_N[:, None, None], n_iter=120)


def made(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    heads=st.integers(1, 3),
    time=st.integers(1, 4),
    keys=st.integers(1, 40),
    scale=st.sampled_from([0.0, 1e-3, 0.3, 1.0, 8.0, 200.0]),
    exponents=st.lists(st.sampled_from(EXPONENTS), min_size=3, max_size=3),
    hidden=st.integers(0, 39),
)
def test_it_is_the_definition(seed, heads, time, keys, scale, exponents, hidden):
    scores = made(seed, 2, heads, time, keys, scale=scale)
    scores[..., 1 : min(hidden, keys)] = -math.inf
    exponent_N = torch.tensor(exponents[:heads], dtype=torch.float64)
    found = weights.distribution(scores, exponent_N, torch.float64)
    torch.testing.assert_close(found, by_bisection(scores, exponent_N), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, heads, time, dtype=torch.float64))
    single = weights.distribution(scores.float(), exponent_N.float(), torch.float32)
    torch.testing.assert_close(single.double(), found, rtol=0, atol=2e-5 * max(1, scale))


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("keys", [2, 300, 5000])
def test_rows_of_awkward_shapes(exponent, keys):
    """Scores that leave few keys, all of them, or about one more with each step of tau."""
    place = torch.linspace(0, 1, keys, dtype=torch.float64)
    rows = [-place, -(place**0.1), -(place**20), place * 0, -(0.9 ** (place * keys)), -torch.log1p(place * keys)]
    scores = torch.stack(rows)[None]
    exponent_N = torch.tensor([exponent], dtype=torch.float64)
    torch.testing.assert_close(
        weights.entmax(scores, exponent_N), by_bisection(scores, exponent_N), rtol=1e-6, atol=1e-9
    )


def test_gradients():
    scores = made(2, 2, 4, 3, 6).requires_grad_()
    smooth = torch.tensor([1.05, 1.3, 1.5, 1.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s, a: weights.distribution(s, a, s.dtype), (scores, smooth))


@pytest.mark.parametrize("exponent", [1 + 1e-4, 1.2, 1.8])
def test_the_gradient_of_the_exponent_is_a_difference_of_the_definition(exponent):
    """Near softmax too, where the paper's form loses all digits."""
    scores, d = made(3, 1, 1, 8, 12), made(4, 1, 1, 8, 12)
    step = 1e-6
    lower, upper = (torch.tensor([exponent + sign * step], dtype=torch.float64) for sign in (-1, 1))
    expected = ((weights.entmax(scores, upper) - weights.entmax(scores, lower)) * d).sum() / (2 * step)
    exponent_N = torch.tensor([exponent], dtype=torch.float64, requires_grad=True)
    for precision, tolerance in ((torch.float64, 1e-5), (torch.float32, 1e-3)):
        exponent_N.grad = None
        (weights.distribution(scores.to(precision), exponent_N, precision) * d).sum().backward()
        torch.testing.assert_close(exponent_N.grad, expected[None], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("exponents", [None, [1.5], [2.0], [1.2]])
def test_a_row_that_sees_no_key_has_no_weights_and_no_gradient(exponents):
    scores = made(7, 1, 3, 5)
    scores[0, 1] = -math.inf
    scores.requires_grad_()
    exponent_N = None if exponents is None else torch.tensor(exponents, dtype=torch.float64, requires_grad=True)
    found = weights.distribution(scores, exponent_N, torch.float64, has_blind_rows=True)
    assert found.sum(-1).tolist() == [[pytest.approx(1), 0, pytest.approx(1)]]
    (found * made(8, 1, 3, 5)).sum().backward()
    assert scores.grad[0, 1].tolist() == [0] * 5 and scores.grad.isfinite().all()
    assert exponents is None or exponent_N.grad.isfinite().all()


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_single(precision):
    scores, exponent_N = made(9, 2, 2, 3, 50, scale=3.0).to(precision), torch.tensor([1.5, 1.25])
    expected = weights.distribution(scores.float(), exponent_N, torch.float32).to(precision)
    assert torch.equal(weights.distribution(scores, exponent_N, precision), expected)


def test_what_a_gpu_computes_and_pieces_of_a_long_input_are_the_same(monkeypatch):
    scores = made(10, 2, 4, 3, 100, scale=2.0)
    exponents = [
        torch.tensor([1.5, 2.0, 1.01, 1.7]).double(),
        *(torch.full((4,), each).double() for each in (1.5, 2.0)),
    ]
    expected = [weights.entmax(scores, each) for each in exponents]
    for name, value in (("_PIECE_ELEMENTS", 300), ("_is_on_processor", lambda scores: False)):
        with monkeypatch.context() as patch:
            patch.setattr(weights, name, value)
            torch.testing.assert_close([weights.entmax(scores, each) for each in exponents], expected)
