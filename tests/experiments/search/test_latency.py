"""Latency of patterns: as a number, as an expectation, as a price."""

import itertools
import json

import pytest
import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.latency import (
    expected_latency,
    latency_of,
    rank_correlations,
    read_price_list,
)
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.training import latency_nats

CANDIDATES = ("s", "l", "f", "identity")
PRICES = {"s": 3.0, "f": 1.0, "s_read": 5.0, "l": 2.0, "rest": 0.5}


def naive_latency(chosen):
    """An s is read where an l comes before the next s above it."""
    total = PRICES["rest"]
    for number, name in enumerate(chosen):
        above = [other for other in chosen[number + 1 :] if other in ("s", "l")]
        if name == "s":
            total += PRICES["s_read" if above[:1] == ["l"] else "s"]
        elif name != "identity":
            total += PRICES[name]
    return total


def test_expected_latency_is_the_mean_over_all_patterns_and_differentiable():
    torch.manual_seed(1)
    logits = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    probabilities = logits.softmax(dim=-1)
    expected = sum(
        naive_latency(chosen)
        * torch.stack([probabilities[layer, CANDIDATES.index(name)] for layer, name in enumerate(chosen)]).prod()
        for chosen in itertools.product(CANDIDATES, repeat=4)
    )
    found = expected_latency(PRICES, probabilities, CANDIDATES)
    assert found.allclose(expected)
    ours, theirs = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, expected))
    assert ours.allclose(theirs)


def test_latency_of_a_pattern():
    assert latency_of(PRICES, "sf(lf)x2 s") == 0.5 + 5 + 1 + 3 + 3 + 3
    assert latency_of(PRICES, "") == 0.5
    assert expected_latency(PRICES, torch.tensor([[0.0, 1.0], [1.0, 0.0]]), ("s", "f")) == 4.5


def test_nothing_is_paid_under_the_budget():
    probabilities = torch.tensor([[0.5, 0.5]], requires_grad=True)  # 2 ms of the baseline's 4
    for budget, nats in ((0.0, 1.0), (0.25, 0.5), (0.5, 0.0), (0.9, 0.0)):
        settings = SearchSettings("", "", "", "sf", latency_price=2.0)
        paid = latency_nats(PRICES | {"rest": 0.0}, settings, probabilities, ("s", "f"), budget)
        assert paid.item() == pytest.approx(nats)


def test_a_price_list_by_hand(tmp_path):
    path = tmp_path / "prices.json"
    path.write_text('{"s": 2, "f": 1.5}')
    assert read_price_list(path, ("s", "f")) == {"s": 2, "f": 1.5}
    assert latency_of(read_price_list(path, ("s", "f")), "sflf s".replace("l", "f")) == 2 * 2 + 3 * 1.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "not an object; give an object of milliseconds"),
        (json.dumps({"s": 1, "f": 1, "x": 1}), "names:"),
        (json.dumps({"s": -1, "f": 1}), "s is -1"),
        (json.dumps({"s": "1", "f": 1}), "s is '1'"),
        ('{"s": NaN, "f": 1}', "s is nan"),
        (json.dumps({"s": 1}), "no price of f"),
    ],
)
def test_a_bad_price_list_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "prices.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_price_list(path, ("s", "f"))


def test_rank_correlations_are_of_ranks():
    assert rank_correlations([1, 2, 3, 4], [10, 20, 40, 30])["spearman"] == pytest.approx(0.8)
    assert rank_correlations([1, 2, 3], [1, 8, 27])["kendall"] == 1
    assert rank_correlations([1, 2], [2, 1]) is None
