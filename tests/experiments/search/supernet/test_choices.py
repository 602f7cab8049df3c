"""The architecture parameters and how they are drawn."""

import math

import pytest
import torch

from lazyformer_fairseq.experiments.search.supernet.mixture import Choices

CANDIDATES = ("s", "l", "f", "identity")


def test_weights_are_uniform_at_first_and_rows_sum_to_1():
    choices = Choices(3, ("s", "f", "identity"))
    assert choices.probabilities().allclose(torch.full((3, 3), 1 / 3))
    assert choices.entropy() == pytest.approx(math.log2(3))
    for temperature in (5.0, 0.1):
        choices.temperature = temperature
        assert choices().sum(dim=-1).allclose(torch.ones(3))


def test_each_call_draws_anew_in_training_and_never_in_evaluation():
    choices = Choices(3, ("s", "f", "identity"))
    assert not torch.equal(choices(), choices())
    choices.eval()
    assert torch.equal(choices(), choices.probabilities())


def test_lazy_attention_in_the_first_layer_has_probability_0_exactly():
    choices = Choices(3, CANDIDATES)
    column = CANDIDATES.index("l")
    for weights in (choices(), choices.probabilities()):
        assert weights[0, column] == 0
        assert (weights[1:, column] > 0).all()
    choices().square().sum().backward()
    assert choices.logits.grad.isfinite().all()
    assert choices.logits.grad[0, column] == 0


def test_the_most_probable_candidate_is_drawn_as_often_as_it_is_probable():
    """At any temperature (Maddison et al., 2017): so the mean latency of what is drawn is that of the probabilities."""
    torch.manual_seed(1)
    choices = Choices(2000, ("s", "f", "identity"))
    with torch.no_grad():
        choices.logits += torch.tensor([1.0, 0.0, -1.0])
    choices.temperature = 5.0
    drawn = torch.stack([choices().argmax(dim=-1) for _ in range(10)]).flatten().bincount() / 20_000
    assert drawn.allclose(choices.probabilities()[0], atol=0.02)
