"""Exported sublayers compute what ours do: every kind of attention, an l and a k above it, convolution.

Padding stands on either side; probabilities, checkpoints in training and half precision are those of transformers.
"""

import pytest
import torch
from every_kind import EXAMPLES, HEADS, TOKENS, WIDTH
from exported_blocks import BATCH, KINDS, SETTINGS, both, buckets_of, combined, embeddings, given, padding, pattern_of
from torch.utils.checkpoint import checkpoint

ONE_OF_EACH = ["", *(EXAMPLES[name][-1] for name in KINDS), "window=2,global=given"]
CONVOLUTIONS = [
    f"c{settings}fsc{settings}" for settings in ("", "[width=4]", "[width=5,form=lightweight]", "[width=1]")
]
# A row that is nothing but padding has no influence, and gives no NaN.
CASES = ((torch.float64, ("none", "both", "a row"), 1e-9), (torch.float32, ("left", "right"), 1e-5))


@pytest.mark.parametrize("settings", [*SETTINGS, *combined(), *CONVOLUTIONS])
def test_exported_sublayers_are_ours(settings):
    pattern, buckets = (settings, 8) if settings[:1] == "c" else (pattern_of(settings), buckets_of(settings))
    for dtype, sides, within in CASES:
        ours, exported = both(pattern, buckets, dtype)
        for where in sides:
            x, mask = embeddings(dtype), padding(where)
            expected = ours(x, mask, global_positions_BT=given(settings))[0]
            is_text = slice(None) if mask is None else ~mask
            for attention in ("eager", "sdpa"):
                found = exported(x, mask, given(settings), attention)[0]
                torch.testing.assert_close(found[is_text], expected[is_text], atol=within, rtol=within)
                assert found.isfinite().all()  # padding meets other sublayers


@pytest.mark.parametrize("settings", [*ONE_OF_EACH, "cfc[form=lightweight]"])
def test_gradients_are_ours_with_checkpoints_too(settings):
    pattern, buckets = (settings, 0) if settings[:1] == "c" else (pattern_of(settings), buckets_of(settings))
    ours, exported = both(pattern, buckets, torch.float64)
    mask, up = padding("both"), torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)

    def gradients(network, *rest, **more):
        network.zero_grad()
        (network(embeddings(torch.float64), mask, *rest, **more)[0] * up)[~mask].sum().backward()
        return {name: weight.grad for name, weight in network.named_parameters()}

    wanted = gradients(ours, global_positions_BT=given(settings))
    for attention, saves in (("eager", None), ("sdpa", None), ("sdpa", lambda *a: checkpoint(*a, use_reentrant=False))):
        exported.checkpoint = saves
        found = gradients(exported, given(settings), attention)
        assert found.keys() == wanted.keys()
        for name, expected in wanted.items():
            torch.testing.assert_close(found[name], expected, atol=1e-7, rtol=1e-7, msg=name)


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
def test_half_precision_is_near(settings):
    for attention in ("eager", "sdpa"):
        _, exported = both(pattern_of(settings), buckets_of(settings))
        for weight in exported.parameters():  # such as a model has
            weight.data *= 0.2
        arguments = (padding("both"), given(settings), attention)
        expected = exported(embeddings(), *arguments)[0]
        found = exported.bfloat16()(embeddings(torch.bfloat16), *arguments)[0]
        assert found.dtype == torch.bfloat16
        assert (found.float() - expected).abs().mean() / expected.abs().mean() < 0.05
