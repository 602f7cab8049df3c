"""Adaptive span, against the paper's equations, and against fairseq's example for mask and loss."""

import copy
import importlib.util
import math
import re
from pathlib import Path

import fairseq
import pytest
import torch
from attention_by_einsum import HEADS, Attending, assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq.measure.costs.flops import count_sublayer_flops
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention_kinds.span import SPANS, STEP, Span, measure_spans
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions
from lazyformer_fairseq.patterns.attention_kinds import with_defaults
from lazyformer_fairseq.patterns.grammar import plan

SHARES = torch.tensor([0.07, 0.37, 0.81], dtype=torch.double)
RIGHT = torch.arange(9) >= torch.tensor([[5], [9]])


def fairseqs_example():
    """A file that is installed with fairseq; importing its package would register a model."""
    path = Path(fairseq.__file__).parent / "examples" / "adaptive_span" / "adaptive_span_attention.py"
    spec = importlib.util.spec_from_file_location("adaptive_span_attention", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def span_of(shares: Tensor, **settings) -> Span:
    options = SublayerOptions(
        4 * len(shares), 4, len(shares), values=with_defaults(tuple(settings.items())), is_causal=True
    )
    span = Span(options).to(shares.dtype)
    span.shares.data.copy_(shares)
    measure_spans([span])
    return span


class WithSpans(Attending):
    """The paper's equations: the mask times exponentials, normalised."""

    def __init__(self, limit: int, ramp: int, **given):
        super().__init__(f"s[span={limit},ramp={ramp}]", **given)
        self.limit, self.ramp = limit, ramp
        self.span = self.s.choices["span"]
        self.span.shares.data.copy_(SHARES)
        measure_spans([self.span])

    def weigh(self, q: Tensor, scores: Tensor, distances: Tensor) -> Tensor:
        steps, z = distances.abs(), self.span.shares[:, None, None] * self.limit
        mask = ((self.ramp + z - steps) / self.ramp).clamp(0, 1) * (steps < self.limit)
        weights = mask * torch.exp(scores - scores.amax(-1, keepdim=True))
        return weights / weights.sum(-1, keepdim=True)

    def make_values(self, maker: nn.Module, values: Tensor) -> Tensor:
        raise AssertionError("values are plain")


@pytest.mark.parametrize("limit, ramp", [(5, 2), (5, 7), (30, 3)])
@pytest.mark.parametrize(
    "given",
    [{"time": 9}, {"time": 9, "biased": True}, {"time": 9, "memory": 0}, {"time": 5, "memory": 8}, {"time": 1}],
    ids=str,
)
@pytest.mark.parametrize("step, back_end", [(1, "eager"), (STEP, "eager"), (1, "tiles"), (STEP, "tiles")])
def test_it_is_the_papers(monkeypatch, given, limit, ramp, step, back_end):
    """With all gradients, those of z among them, however far keys are computed."""
    monkeypatch.setattr("lazyformer_fairseq.modules.sublayers.attention_kinds.span.STEP", step)
    attending = WithSpans(limit, ramp, **given, back_end=back_end)
    expected = attending.with_gradients(attending.expected(attending.weigh))
    assert_same(attending.with_gradients(attending.outputs()), expected)
    assert (expected["0.choices.span.shares"] != 0).any() or attending.keys == 1


@given(
    limit=st.integers(1, 300),
    ramp=st.integers(1, 300),
    shares=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=4),
)
def test_mask_and_loss_are_those_of_fairseqs_example(limit, ramp, shares):
    theirs = fairseqs_example().AdaptiveSpan(limit, ramp, 0.0, len(shares), False).double()
    theirs._mask.current_val.data.copy_(torch.tensor(shares)[:, None, None])
    span = span_of(torch.tensor(shares, dtype=torch.double), span=limit, ramp=ramp, span_loss=3e-5)
    ours = span._log_mask(torch.arange(limit)).exp().t()  # the nearest first
    mask = theirs(torch.ones(len(shares), 1, limit, dtype=torch.double))[:, 0].flip(-1)
    torch.testing.assert_close(ours, mask, atol=1e-4, rtol=0)  # theirs in single precision
    assert span.penalty().item() == pytest.approx(3e-5 * theirs.get_loss().item(), rel=1e-6)
    assert theirs.get_current_max_span() <= span.longest <= min(theirs.get_current_max_span() + STEP, limit)
    assert (span._log_mask(torch.arange(span.longest, limit + 5)) == -math.inf).all()


def test_spans_start_at_zero_as_there():
    assert (span_of(torch.zeros(2), span=10).shares == 0).all()
    assert fairseqs_example().AdaptiveMask(10, 3).current_val == 0


def test_z_stays_between_none_and_all():
    """Clamped before each pass; a gradient that leads out is dropped, one that leads back is not."""
    span = span_of(torch.tensor([-0.2, 0.0, 0.5, 1.0, 1.3]), span=10)
    assert span.shares.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    for sign, moving in ((1, [0, 0, 1, 1, 1]), (-1, [1, 1, 1, 0, 0])):
        (gradient,) = torch.autograd.grad(sign * span.spans.sum(), span.shares)
        assert gradient.tolist() == [10.0 * sign * moves for moves in moving]


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_in_half_precision_a_mask_is_computed_in_single(precision):
    span = span_of(torch.tensor([0.5, 0.25], dtype=precision), span=1000, ramp=32)
    assert span.spans.dtype == torch.float32 and span.spans.tolist() == [500.0, 250.0]


def test_one_pass_of_a_network_measures_all_spans():
    encoder = Encoder("s[span=400] f s[span=100,ramp=8] l", 17, 12, 20, HEADS, max_positions=600)
    first, second = encoder.options.common[SPANS]
    assert (first.longest, second.longest) == (64, 64)  # the ramp, up to the next multiple
    first.shares.data[1] = 0.5
    second.shares.data[2] = 0.9
    encoder(torch.randint(2, 17, (1, 9)))
    assert (first.longest, second.longest) == (256, 100)


@pytest.mark.parametrize("direction", ["encoder", "causal"])
def test_keys_beyond_the_longest_span_are_masked_out(direction):
    is_causal = direction == "causal"
    options = SublayerOptions(12, 4, HEADS, values=with_defaults((("span", 900),)), is_causal=is_causal)
    span = Span(options)
    attending = Attending("s", 5, memory=500 if is_causal else None)
    parts = span._parts(attending.context().scores, attending.keys, attending.time)
    (_, ((before, after, *_),)), = parts["mask"].groups  # fmt: skip
    assert (before, after) == (63, 0 if is_causal else 63)


@pytest.mark.parametrize("pattern", ["s[span=5,ramp=2]", "s[span=5,ramp=2]l"])
def test_memory_that_no_head_reaches_is_left_out(pattern):
    """Nothing changes but the cost, which is what the formula says; a consumer above needs all."""
    decoder, memory = (
        CausalDecoder(pattern, 17, 12, 20, HEADS, mem_len=9, attention_backend="eager").double(),
        StreamMemory(),
    )
    for parameter in decoder.parameters():
        nn.init.normal_(parameter, std=0.5)
    decoder.sublayers[0].inner.choices["span"].shares.data.copy_(SHARES)
    tokens = torch.randint(2, 17, (2, 13))
    decoder(tokens[:, :9], memory)
    with FlopCounterMode(display=False) as counter:
        found, _ = decoder(tokens[:, 9:], memory)
    counted = counter.get_total_flops()
    assert counted == sum(count_sublayer_flops(planned, decoder.sizes, 4, 9, 2) for planned in decoder.plan)
    torch.testing.assert_close(found, decoder(tokens)[0][:, 9:])
    plain = sum(
        count_sublayer_flops(planned, decoder.sizes, 4, 9, 2) for planned in plan(re.sub(r"\[.*?\]", "", pattern))
    )
    assert (counted < plain) == ("l" not in pattern)


def test_a_copy_of_a_network_measures_its_own_spans():
    decoder = CausalDecoder("s[span=300]", 17, 12, 20, HEADS, mem_len=4)
    other = copy.deepcopy(decoder)
    other.sublayers[0].inner.choices["span"].shares.data.fill_(1.0)
    other(torch.randint(2, 17, (1, 3)))
    assert other.options.common[SPANS][0].longest == 300
    assert decoder.options.common[SPANS][0].longest == 64
