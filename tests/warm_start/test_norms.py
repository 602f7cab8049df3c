"""LayerNorms above and below sublayers that went or came."""

from dataclasses import replace

import pytest
import torch
from trained_encoders import WIDTH, changed, largest_difference, logits, tokens, trained

from lazyformer_fairseq.warm_start import start as start_module
from lazyformer_fairseq.warm_start.start import SUBLAYERS, start_from
from lazyformer_fairseq.warm_start.weights import Norm


def even(old, *places: int):
    """The same with LayerNorms, of these sublayers and of embeddings, whose output has one mean and one deviation."""
    weights = {}
    for place in places:
        weights[f"{place}.layer_norm.weight"] = torch.full((WIDTH,), 1.7)
        weights[f"{place}.layer_norm.bias"] = torch.full((WIDTH,), 0.3)
    name = "encoder.sentence_encoder.embedding_layer_norm."
    around = {f"{name}weight": torch.full((WIDTH,), 0.6), f"{name}bias": torch.full((WIDTH,), -0.2)}
    return replace(changed(old, **weights), weights={**changed(old, **weights).weights, **around})


def silent(old, *places: int):
    """The same with sublayers that add nothing."""
    names = [name for name in old.weights for place in places if name.startswith(f"{SUBLAYERS}{place}.inner.")]
    return replace(old, weights={**old.weights, **{name: torch.zeros_like(old.weights[name]) for name in names}})


@pytest.mark.parametrize("pattern", ["s(sf)x2", "sffsf", "sfsffffs f", "ssffsf", "scfsfc"])
def test_a_sublayer_that_comes_changes_nothing_where_norms_are_even(pattern):
    old = even(trained("(sf)x2"), 0, 1, 2, 3)
    assert largest_difference(old, start_from(old, {"sublayer_pattern": pattern}), tokens()) < 1e-3


@pytest.mark.parametrize("gone", [(0,), (1,), (1, 2), (5,), (0, 5)])
def test_a_silent_sublayer_goes_without_a_trace_where_norms_are_even(gone):
    old = silent(even(trained("(sf)x3"), *range(6)), *gone)
    kept = [str(place) for place in range(6) if place not in gone]
    pattern = "".join(old.plan[int(place)].text for place in kept)
    assert largest_difference(old, start_from(old, {"sublayer_pattern": pattern}, kept), tokens()) < 1e-3


def test_one_comes_where_another_went():
    old = silent(even(trained("(sf)x3"), *range(6)), 2)
    start = start_from(old, {"sublayer_pattern": "sff fsf"}, ["0", "1", "-", "3", "4", "5"])
    assert largest_difference(old, start, tokens()) < 1e-3
    assert start.record["left_out"] == [2]


def test_carrying_norms_is_nearer_than_not_where_they_are_uneven(monkeypatch):
    old = silent(trained("(sf)x3", encoder_embed_dim=64), 2, 3)
    changes = {"sublayer_pattern": "(sf)x2"}, ["0", "1", "4", "5"]
    carried = start_from(old, *changes)
    monkeypatch.setattr(start_module, "carry_norms", lambda *_: {})
    left = start_from(old, *changes)
    truth = logits(old, tokens())
    near, far = ((logits(each, tokens()) - truth).square().mean() for each in (carried, left))
    assert near < 0.2 * far


def test_two_norms_in_one_are_torchs_two_where_statistics_are_those_expected():
    generator = torch.Generator().manual_seed(1)
    channels = 4096
    below = Norm(*(torch.randn(2, channels, generator=generator) + 1))
    above = Norm(*(torch.randn(2, channels, generator=generator) + 1))
    x = torch.randn(3, channels, generator=generator)

    def apply(norm: Norm, x):
        return torch.nn.functional.layer_norm(x, (channels,), norm.weight, norm.bias)

    torch.testing.assert_close(apply(below.then(above), x), apply(above, apply(below, x)), atol=0.2, rtol=0.1)
    torch.testing.assert_close(apply(below.neutral(), apply(below, x)), apply(below, x), atol=0.2, rtol=0.1)


def test_a_pre_norm_model_leaves_its_norms_alone():
    old = trained("(sf)x2", encoder_normalize_before=True)
    start = start_from(old, {"sublayer_pattern": "sf"}, ["0", "3"])
    for kind in ("weight", "bias"):
        assert torch.equal(
            start.new.weights[f"{SUBLAYERS}0.layer_norm.{kind}"], old.weights[f"{SUBLAYERS}0.layer_norm.{kind}"]
        )
