"""Latency of patterns: as a number, as an expectation, as a price."""

import itertools
import json

import pytest
import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.search.latency.price import LatencyPrice, PriceList, read_price_list

CANDIDATES = ("s", "l", "f", "identity")
PRICES = PriceList({"s": 3.0, "f": 1.0, "s_read": 5.0, "l": 2.0}, rest=0.5)


def naive_latency(chosen):
    """An s is read where an l comes before the next s above it."""
    total = PRICES.rest
    for number, name in enumerate(chosen):
        above = [other for other in chosen[number + 1 :] if other in ("s", "l")]
        if name == "s":
            total += PRICES.sublayers["s_read" if above[:1] == ["l"] else "s"]
        elif name != "identity":
            total += PRICES.sublayers[name]
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
    found = PRICES.expected(probabilities, CANDIDATES)
    assert found.allclose(expected)
    ours, theirs = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, expected))
    assert ours.allclose(theirs)


def test_latency_of_a_pattern():
    assert PRICES.of("sf(lf)x2 s") == 0.5 + 5 + 1 + 3 + 3 + 3
    assert PRICES.of("") == 0.5
    assert PRICES.expected(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), ("s", "f")) == 4.5


def test_nothing_is_paid_under_the_budget():
    probabilities = torch.tensor([[0.5, 0.5]], requires_grad=True)  # 2.5 ms of the baseline's 5
    for budget, nats in ((0.0, 1.0), (0.25, 0.5), (0.5, 0.0), (0.9, 0.0)):
        price = LatencyPrice(PRICES, price=2.0, budget=budget, baseline=5.0)
        assert price(probabilities, ("s", "f")).item() == pytest.approx(nats)
    assert LatencyPrice(PRICES, 0.0, 0.0, 5.0)(probabilities, ("s", "f")) is None


def test_a_price_list_by_hand(tmp_path):
    path = tmp_path / "prices.json"
    path.write_text('{"s": 2, "f": 1.5}')
    assert read_price_list(path, ("s", "f")) == PriceList({"s": 2, "f": 1.5})
    assert read_price_list(path, ("s", "f")).of("sflf s".replace("l", "f")) == 2 * 2 + 3 * 1.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "must be an object"),
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
