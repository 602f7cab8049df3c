"""Convolution computes what its papers say, whatever stands around the text."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_networks import make_decoder, random_tokens
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.evaluation.costs.flops import count_sublayer_parameters
from lazyformer_fairseq.experiments.pattern.look import build_network, find_attended_tokens
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder, init_bert_weights
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.sublayers import convolution
from lazyformer_fairseq.modules.sublayers.convolution import Convolution, convolve
from lazyformer_fairseq.modules.sublayers.interface import Context
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import EncoderSizes

FORMS = ("depthwise", "lightweight")
HEADS, WIDTH = 2, 6


def run(module: Convolution, x_BTC: Tensor, scores: Scores = Scores()) -> Tensor:  # noqa: B008
    return module(x_BTC, {}, Context(scores, lambda *_: "eager"), None)[0]


def built(width: int, form: str) -> Convolution:
    return Convolution(WIDTH, width, HEADS if form == "lightweight" else 0).double()


def by_torch(x_BTC: Tensor, filters_CW: Tensor, before: int, after: int) -> Tensor:
    padded = F.pad(x_BTC, (0, 0, before, after)).transpose(1, 2).contiguous()
    return F.conv1d(padded, filters_CW[:, None], groups=x_BTC.size(2)).transpose(1, 2)


@settings(max_examples=20, deadline=None)
@given(width=st.integers(1, 9), time=st.integers(1, 8), form=st.sampled_from(FORMS), is_causal=st.booleans())
def test_it_is_the_papers_equation(width, time, form, is_causal):
    module, x = built(width, form), torch.randn(2, time, WIDTH, dtype=torch.float64)
    # One of even width has one place more before the token: the paper's (i + j - ceil((k + 1) / 2)), j from 1.
    before = width - 1 if is_causal else math.ceil((width + 1) / 2) - 1
    filters = module.weight.repeat_interleave(WIDTH // len(module.weight), 0)
    filters = filters if len(module.weight) == WIDTH else filters.exp() / filters.exp().sum(1, keepdim=True)
    left, right = module.in_proj(x).chunk(2, -1)
    expected = module.out_proj(by_torch(left * right.sigmoid(), filters, before, width - 1 - before))
    torch.testing.assert_close(run(module, x, Scores(is_causal=is_causal)), expected)


@settings(max_examples=15, deadline=None)
@given(
    width=st.integers(1, 6),
    form=st.sampled_from(FORMS),
    lengths=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    more=st.integers(0, 3),
)
def test_segments_give_what_the_whole_text_gives(width, form, lengths, more):
    decoder = make_decoder(f"c[width={width},form={form}] f", mem_len=max(1, width - 1 + more), num_heads=2)
    tokens, memory = random_tokens(2, sum(lengths)), StreamMemory()
    parts = [decoder(part, memory)[0] for part in tokens.split(lengths, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), decoder(tokens)[0])


def test_it_starts_as_loud_as_attention_to_one_token():
    """Half of GLU's gates are open, so within a factor of four of W2 W1 x."""
    torch.manual_seed(1)
    x = torch.randn(4, 64, 128)
    for pattern in ("c", "c[width=31]"):
        encoder = Encoder(pattern, None, 128, 8, 2, relative_position_buckets=0).apply(init_bert_weights)
        alone = 128 * 0.02**2
        assert 0.2 < run(encoder.sublayers[0].inner, x).var() / alone**2 < 1


def test_a_plan_counts_its_weights_and_its_picture_is_its_filter():
    of_heads, own = plan("c[form=lightweight] c")
    sizes = EncoderSizes(10, 8, 16, 2)
    assert count_sublayer_parameters(own, sizes) - count_sublayer_parameters(of_heads, sizes) == (8 - 2) * 7
    (seen,) = find_attended_tokens(build_network("c[width=4]", "encoder", 2, 5), 5)
    ((_, weights),) = seen.by_heads
    distance = torch.arange(5) - torch.arange(5)[:, None]
    assert torch.equal(weights > 0, (distance >= -2) & (distance <= 1))


def test_nothing_computes_a_bias_or_positions_that_no_sublayer_reads():
    """And every weight that wants a gradient gets one."""
    for pattern, is_read in (("(cf)x2", False), ("cs", True)):
        encoder, decoder = Encoder(pattern, 11, 8, 8, 2), CausalDecoder(pattern, 11, 8, 8, 2, mem_len=2)
        x = torch.zeros(1, 4, 8)
        assert (encoder.context(x).scores.table_KN is not None) == is_read
        assert (decoder.context(x).positions is not None) == is_read
        shared = [encoder.relative_position_bias.table, decoder.content_bias, decoder.position_bias]
        assert [weight.requires_grad for weight in shared] == [is_read] * 3
        for network in (encoder, decoder):
            network(torch.randint(2, 11, (2, 5)))[0].sum().backward()
            assert all(weight.grad is not None for weight in network.parameters() if weight.requires_grad)


def test_torch_compiles_it_as_one_graph():
    encoder = Encoder("cf c[form=lightweight] c[width=4]", None, 8, 8, 2)
    x, mask = torch.randn(2, 7, 8), torch.arange(7) >= torch.tensor([[7], [5]])

    def encode(x_BTC: Tensor, mask_BT: Tensor) -> Tensor:
        return encoder(x_BTC, mask_BT, is_padded_on_right=True)[0]

    torch.testing.assert_close(torch.compile(encode, backend="eager", fullgraph=True)(x, mask), encode(x, mask))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 8), st.integers(0, 8), st.sampled_from([6, 2**16]))
def test_values_and_gradients_are_those_of_conv1d(width, time, before, after, cached):
    """Of one input alone, too; the output lies as linear maps read it."""
    before, after = min(before, width - 1), max(after, width - time - before)
    x = torch.randn(2, time, 3, dtype=torch.float64, requires_grad=True)
    filters = torch.randn(3, width, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "CACHED", cached)
        found, expected = convolve(x, filters, before, after), by_torch(x, filters, before, after)
        gradient = torch.randn_like(expected)
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous() or time == 1  # torch takes one place for either layout
        of_found, of_expected = (torch.autograd.grad(y, (x, filters), gradient) for y in (found, expected))
        of_x = torch.autograd.grad(convolve(x, filters.detach(), before, after), x, gradient)
        of_filters = torch.autograd.grad(convolve(x.detach(), filters, before, after), filters, gradient)
        torch.testing.assert_close([*of_found, *of_x, *of_filters], [*of_expected, *of_expected])


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_single(precision):
    """And a whole sublayer is nearly what it is in single precision."""
    x, filters = (torch.randn(size).to(precision).float().requires_grad_() for size in ((64, 300, 4), (4, 5)))
    expected = torch.autograd.grad(by_torch(x, filters, 2, 2).sum(), (x, filters))
    half = [given.detach().to(precision).requires_grad_() for given in (x, filters)]
    found = torch.autograd.grad(convolve(*half, 2, 2).sum(), half)
    with torch.autocast("cpu", dtype=precision):
        mixed = convolve(x, filters, 2, 2)
    assert mixed.dtype == precision
    for gradients in (found, torch.autograd.grad(mixed.sum(), (x, filters))):
        rounding = torch.finfo(precision).eps / 2  # of the result alone
        torch.testing.assert_close([part.float() for part in gradients], list(expected), atol=0.01, rtol=rounding)
    for form in FORMS:
        module, x = built(5, form), torch.randn(2, 9, WIDTH, dtype=torch.float64)
        expected, narrow = run(module, x), run(module.to(precision), x.to(precision))
        assert narrow.dtype == precision
        torch.testing.assert_close(narrow.double(), expected, atol=0.05, rtol=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu(precision):
    x, filters = torch.randn(2, 33, 8), torch.randn(8, 7)
    found = convolve(x.to("cuda", precision), filters.to("cuda", precision), 3, 3)
    torch.testing.assert_close(found.cpu().float(), by_torch(x, filters, 3, 3), atol=0.1, rtol=0.05)
