"""A synthesizer in half precision, and what networks with one refuse."""

import pytest
import torch
from synthesizers import LENGTH, WIDTH, by_model, gradients, network

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.stack import StreamMemory


@pytest.mark.parametrize("back_end", ["eager", "materialize", "fused"])
@pytest.mark.parametrize("terms", ["random", "factorised_random", "dense+dot"])
def test_half_precision_is_near(terms, back_end):
    model = network(terms, buckets=8, attention_backend=back_end)
    for weight in model.parameters():
        weight.data.copy_(weight.to(torch.bfloat16))
    x = torch.randn(2, LENGTH, WIDTH).to(torch.bfloat16)
    wide = x.double().requires_grad_()
    expected = by_model(model, wide, None, False)
    of_expected = gradients(model, expected, wide)
    model, narrow = model.to(torch.bfloat16), x.requires_grad_()
    found = by_model(model, narrow, None, False)
    for ours, theirs in zip([*found, *gradients(model, found, narrow)], [*expected, *of_expected], strict=True):
        if theirs is not None and theirs.any():
            assert (ours.double() - theirs).norm() < 0.05 * theirs.norm()
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = by_model(model.float(), x.float(), None, False)
    for ours, theirs in zip(under_autocast, expected, strict=True):
        assert (ours.double() - theirs).norm() < 0.05 * theirs.norm()


def test_a_causal_models_scores_are_for_512_positions():
    model = CausalDecoder("s[synthesizer=random]", 11, 8, 8, 2, mem_len=0)
    assert model.sublayers[0].inner.choices["synthesizer"].random_NLL.shape == (2, 512, 512)


def test_memory_and_longer_inputs_are_refused():
    with pytest.raises(UserError, match="--mem-len 3 is not for .*: a synthesizer has scores .* give --mem-len 0"):
        CausalDecoder("s[synthesizer=random,length=8]", 11, 8, 8, 2, mem_len=3)
    model = network("random", causal=True)
    tokens, memory = torch.randint(0, 11, (1, 4)), StreamMemory()
    memory.remember([torch.zeros(1, 4, WIDTH)], 4)
    with pytest.raises(UserError, match="4 remembered tokens: .* give --mem-len 0"):
        model(tokens, memory)
    with pytest.raises(UserError, match=f"11 tokens, but .* scores for {LENGTH}"):
        model(torch.randint(0, 11, (1, 11)))


def test_torchs_attention_needs_queries_of_the_values_size():
    with pytest.raises(
        UserError, match="--attention-backend recompute: cannot compute .*choose from auto, eager, mater"
    ):
        network("random", attention_backend="recompute")
    network("random+dot", attention_backend="recompute")


def test_weights_that_nothing_reads_need_no_gradient():
    """On several GPUs DDP waits for one of every weight that requires it."""
    needed = {
        terms: [getattr(network(terms, causal=True), name).requires_grad for name in ("content_bias", "position_bias")]
        for terms in ("random", "dense", "random+dot")
    }
    assert needed == {"random": [False, False], "dense": [True, False], "random+dot": [True, True]}
