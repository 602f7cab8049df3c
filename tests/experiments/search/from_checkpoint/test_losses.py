"""Losses are measured once, with their errors."""

import json

import numpy as np
import pytest

from lazyformer_fairseq.experiments.search.from_checkpoint.choices import Choices
from lazyformer_fairseq.experiments.search.from_checkpoint.losses import Losses, compare
from lazyformer_fairseq.patterns.grammar import plan, read_sublayer
from lazyformer_fairseq.patterns.kinds import ENCODER
from lazyformer_fairseq.warm_start.losses import BlockLosses

CHOICES = Choices.of(plan("sfsf", ENCODER), [read_sublayer("l"), read_sublayer("-")])


class Scorer:
    """Two blocks of text; what it measures depends on the pattern's length."""

    def __init__(self):
        self.asked = []

    def by_block(self, pattern, origins):
        self.asked.append(pattern)
        return BlockLosses(np.array([1.0, 3.0]) * len(pattern), np.array([2, 6]))


def test_the_error_is_that_of_the_mean_where_blocks_are_alike():
    chance = np.random.default_rng(1)
    original, gains = chance.uniform(5, 9, 50), chance.normal(0.2, 1, 50)
    found = compare(BlockLosses(original + gains, np.full(50, 7)), BlockLosses(original, np.full(50, 7)))
    bits = gains / 7 / np.log(2)
    assert found == pytest.approx((bits.mean(), bits.std(ddof=1) / np.sqrt(50)))


def test_the_error_agrees_with_blocks_drawn_again_and_again():
    chance = np.random.default_rng(2)
    words = chance.integers(3, 30, 200)
    gains = words * 0.3 + chance.normal(0, 1, 200) * np.sqrt(words)
    found = compare(BlockLosses(gains, words), BlockLosses(np.zeros(200), words))
    drawn = chance.integers(0, 200, (2000, 200))
    means = gains[drawn].sum(1) / words[drawn].sum(1) / np.log(2)
    assert found.error == pytest.approx(means.std(), rel=0.1)


def test_a_second_run_measures_the_rest(tmp_path):
    path, scorer = tmp_path / "scores.json", Scorer()
    losses = Losses(path, scorer, CHOICES)
    short = ("s", "f", "-", "f")
    assert losses.measure([short, short, CHOICES.own], "test") == [short]
    assert losses[short] == pytest.approx((-4 / 8 / np.log(2), 0))
    again = Losses(path, Scorer(), CHOICES)
    shorter = ("s", "-", "-", "f")
    assert again.measure([short, shorter], "test") == [shorter] and again[short] == losses[short]
    assert sorted(again.scorer.asked) == ["sf", "sfsf"]
    content = json.loads(path.read_text())
    assert content["patterns"].keys() == {"s f s f", "s f - f", "s - - f"} and content["masked_tokens"] == 8
