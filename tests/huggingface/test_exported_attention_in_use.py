"""What transformers does with exported attention: probabilities, checkpoints in training, half precision, graphs."""

import pytest
import torch
from every_kind import EXAMPLES, HEADS
from exported_blocks import (
    KINDS,
    SETTINGS,
    both,
    buckets_of,
    embeddings,
    given,
    padding,
    pattern_of,
)
from torch.utils.checkpoint import checkpoint

ONE_OF_EACH = ["", *(EXAMPLES[name][-1] for name in KINDS), "window=2,global=given"]


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
