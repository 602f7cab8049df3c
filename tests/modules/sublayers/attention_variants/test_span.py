"""Adaptive span, against the paper's equations; how it moves, and what it costs."""

import re

import pytest
import torch
from attention_by_einsum import Attending
from tiny_networks import fairseqs_example, make_decoder, random_tokens
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lazyformer_fairseq.evaluation.costs.flops import count_sublayer_flops
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention_variants.span import STEP, Span, measure_spans
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions
from lazyformer_fairseq.patterns.attention_variants import with_defaults
from lazyformer_fairseq.patterns.grammar import plan

PUBLISHED = "adaptive_span/adaptive_span_attention.py"
SHARES = torch.tensor([0.07, 0.37, 0.81], dtype=torch.double)


def span_of(shares: Tensor, **settings) -> Span:
    values, heads = with_defaults(tuple(settings.items())), len(shares)
    span = Span(SublayerOptions(4 * heads, 4, heads, values=values, is_causal=True)).to(shares.dtype)
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


@pytest.mark.parametrize("limit, ramp", [(5, 2), (5, 7), (30, 3)])
@pytest.mark.parametrize(
    "given",
    [{"time": 9}, {"time": 9, "biased": True}, {"time": 9, "memory": 0}, {"time": 5, "memory": 8}, {"time": 1}],
    ids=str,
)
@pytest.mark.parametrize("step, back_end", [(1, "eager"), (STEP, "eager"), (1, "fused"), (STEP, "materialize")])
def test_it_is_the_papers(monkeypatch, given, limit, ramp, step, back_end):
    """With all gradients, those of z among them, however far keys are computed."""
    monkeypatch.setattr("lazyformer_fairseq.modules.sublayers.attention_variants.span.STEP", step)
    attending = WithSpans(limit, ramp, **given, back_end=back_end)
    expected = attending.assert_equations()
    assert (expected["0.choices.span.shares"] != 0).any() or attending.keys == 1


def test_z_stays_between_none_and_all():
    """Clamped before each pass; a gradient that leads out is dropped, one that leads back is not. It starts at none."""
    assert fairseqs_example(PUBLISHED).AdaptiveMask(10, 3).current_val == 0
    assert (Span(SublayerOptions(8, 4, 2, values=with_defaults((("span", 10),)), is_causal=True)).shares == 0).all()
    span = span_of(torch.tensor([-0.2, 0.0, 0.5, 1.0, 1.3]), span=10)
    assert span.shares.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    for sign, moving in ((1, [0, 0, 1, 1, 1]), (-1, [1, 1, 1, 0, 0])):
        (gradient,) = torch.autograd.grad(sign * span.spans.sum(), span.shares)
        assert gradient.tolist() == [10.0 * sign * moves for moves in moving]


@pytest.mark.parametrize("pattern", ["s[span=5,ramp=2]", "s[span=5,ramp=2]l"])
def test_memory_that_no_head_reaches_is_left_out(pattern):
    """Nothing changes but the cost, which is what the formula says; a consumer above needs all."""
    decoder, memory, tokens = make_decoder(pattern, mem_len=9), StreamMemory(), random_tokens(2, 13)
    decoder.sublayers[0].inner.choices["span"].shares.data.copy_(SHARES)
    decoder(tokens[:, :9], memory)
    with FlopCounterMode(display=False) as counter:
        found, _ = decoder(tokens[:, 9:], memory)
    counted = counter.get_total_flops()
    plain = plan(re.sub(r"\[.*?\]", "", pattern))
    of_spans, of_plain = (
        sum(count_sublayer_flops(each, decoder.sizes, 4, 9, 2) for each in planned) for planned in (decoder.plan, plain)
    )
    assert counted == of_spans and (counted < of_plain) == ("l" not in pattern)
    torch.testing.assert_close(found, decoder(tokens)[0][:, 9:])
