"""Exported sublayers compute what ours do: every kind of attention, an l and a k above it, convolution.

Padding stands on either side; probabilities, checkpoints in training and half precision are those of transformers.
"""

import pytest
import torch
from every_kind import EXAMPLES, HEADS, TOKENS, WIDTH
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
from torch.utils.checkpoint import checkpoint

ONE_OF_EACH = ["", *(EXAMPLES[name][-1] for name in KINDS), "window=2,global=given"]


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


@pytest.mark.parametrize("settings", ONE_OF_EACH)
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


@pytest.mark.parametrize("settings", SETTINGS)
def test_probabilities_are_ours_and_those_of_an_l_are_its_s(settings):
    ours, exported = both(pattern_of(settings), buckets_of(settings), torch.float64)
    x, mask, found = embeddings(torch.float64), padding("both"), []
    ours.sublayers[0].inner.register_forward_hook(lambda module, given, output: found.append(output[1]))
    ours(x, mask, global_positions_BT=given(settings))
    y, probabilities = exported(x, mask, given(settings), "sdpa", output_attentions=True)
    torch.testing.assert_close(y, exported(x, mask, given(settings), "sdpa")[0], atol=1e-9, rtol=1e-9)
    is_text = ~mask[:, None].expand(-1, HEADS, -1)
    expected = found[0]["distribution"].probabilities
    torch.testing.assert_close(probabilities[0][is_text], expected[is_text], atol=1e-9, rtol=1e-9)
    assert torch.equal(probabilities[1], probabilities[0])
    assert len(probabilities) == sum(planned.kind.letter in "slk" for planned in ours.plan)


@pytest.mark.parametrize("settings", ONE_OF_EACH)
def test_gradients_are_the_same_with_checkpoints(settings):
    _, exported = both(pattern_of(settings), buckets_of(settings), torch.float64)
    gradients = []
    for saves in (False, True):
        exported.zero_grad()
        exported.checkpoint = (lambda *a: checkpoint(*a, use_reentrant=False)) if saves else None
        exported(embeddings(torch.float64), padding("both"), given(settings), "sdpa")[0].square().sum().backward()
        gradients.append([weight.grad for weight in exported.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("settings", ONE_OF_EACH)
def test_half_precision_is_near(settings, attention):
    _, exported = both(pattern_of(settings), buckets_of(settings))
    for weight in exported.parameters():  # such as a model has
        weight.data *= 0.2
    arguments = (padding("both"), given(settings), attention)
    expected = exported(embeddings(), *arguments)[0]
    found = exported.bfloat16()(embeddings(torch.bfloat16), *arguments)[0]
    assert found.dtype == torch.bfloat16
    near = (found.float() - expected).abs().mean() / expected.abs().mean()
    assert near < 0.05


@pytest.mark.parametrize("settings", ["", "[width=4]", "[width=5,form=lightweight]", "[width=1]"])
@pytest.mark.parametrize("where", ["none", "left", "right", "both"])
def test_exported_convolution_is_ours(settings, where):
    ours, exported = both(f"c{settings}fsc{settings}", 8, torch.float64)
    mask, x = padding(where), embeddings(torch.float64)
    expected, found = ours(x, mask)[0], exported(x, mask)[0]
    is_text = slice(None) if mask is None else ~mask
    torch.testing.assert_close(found[is_text], expected[is_text], atol=1e-9, rtol=1e-9)
    assert found.isfinite().all()


def test_gradients_of_convolution_are_ours():
    gradients = []
    for network in both("cfc[form=lightweight]", 0, torch.float64):
        mask = padding("both")
        network(embeddings(torch.float64), mask)[0][~mask].square().sum().backward()
        gradients.append({name: weight.grad for name, weight in network.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, msg=name)
