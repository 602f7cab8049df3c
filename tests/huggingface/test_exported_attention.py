"""Exported attention computes what ours does: every kind of it, an l and a k above it, padding on either side."""

import pytest
import torch
from every_kind import EXAMPLES, TOKENS, WIDTH
from exported_blocks import (
    BATCH,
    KINDS,
    SETTINGS,
    both,
    buckets_of,
    combined,
    embeddings,
    given,
    padding,
    pattern_of,
)


@pytest.mark.parametrize("settings", [*SETTINGS, *combined()])
def test_exported_attention_is_ours(settings):
    ours, exported = both(pattern_of(settings), buckets_of(settings), torch.float64)
    x, positions = embeddings(torch.float64), given(settings)
    for where in ("none", "both"):
        mask = padding(where)
        expected = ours(x, mask, global_positions_BT=positions)[0]
        for attention in ("eager", "sdpa"):
            found = exported(x, mask, positions, attention)[0]
            is_text = slice(None) if mask is None else ~mask
            torch.testing.assert_close(found[is_text], expected[is_text], atol=1e-9, rtol=1e-9)
            assert found.isfinite().all()  # padding meets other sublayers


@pytest.mark.parametrize("settings", SETTINGS)
def test_in_single_precision_too_and_with_padding_on_one_side(settings):
    ours, exported = both(pattern_of(settings), buckets_of(settings))
    for where in ("left", "right"):
        mask = padding(where)
        expected = ours(embeddings(), mask, global_positions_BT=given(settings))[0]
        found = exported(embeddings(), mask, given(settings), "sdpa")[0]
        torch.testing.assert_close(found[~mask], expected[~mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", ["", *(EXAMPLES[name][-1] for name in KINDS), "window=2,global=given"])
def test_gradients_are_ours(settings):
    ours, exported = both(pattern_of(settings), buckets_of(settings), torch.float64)
    mask, up = padding("both"), torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)
    for attention in ("eager", "sdpa"):
        gradients = []
        for network, rest in ((ours, ()), (exported, (given(settings), attention))):
            network.zero_grad()
            more = {"global_positions_BT": given(settings)} if network is ours else {}
            y = network(embeddings(torch.float64), mask, *rest, **more)[0]
            (y * up)[~mask].sum().backward()
            gradients.append({name: weight.grad for name, weight in network.named_parameters()})
        assert gradients[0].keys() == gradients[1].keys()
        for name, expected in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], expected, atol=1e-7, rtol=1e-7, msg=name)


def test_a_row_of_padding_alone_has_no_influence_and_no_nan():
    ours, exported = both("sflk", 8)
    mask = padding("both")
    mask[1] = True
    expected, found = ours(embeddings(), mask)[0], exported(embeddings(), mask)[0]
    torch.testing.assert_close(found[[0, 2]][~mask[[0, 2]]], expected[[0, 2]][~mask[[0, 2]]], atol=1e-5, rtol=1e-5)
    assert found.isfinite().all()
