"""``s[span=S]``: adaptive attention span, learned by each head (Sukhbaatar et al., 2019a)."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band
from lazyformer_fairseq.modules.processor import has_numbers
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import (
    Attend,
    Attention,
    AttentionOutput,
    VariantModule,
)
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions

SPANS = "spans"  # the key of the network's list of Span modules in its `common` options
# The longest span is rounded up to a multiple of this number of positions, as in the published code, so that the shape
# of the scores rarely changes.
STEP = 64


class Span(VariantModule):
    """Attention with weights that decay to zero beyond a span learned by each head (section 2.2).

    It computes the softmax of the scores plus log min(max((R + z - x) / R, 0), 1), where x is the distance in
    positions, R the ramp, and z the head's span, between 0 and S. This equals the paper's normalized product of mask
    and exponentials. In encoders the span is the same on the left and on the right. In the paper the nearest key is the
    one before the query, at x = 1 (x = 0 in the published code); here it is the query's own key, at x = 0.

    With entmax, the logarithm is added to the scores in the same way.

    Attributes:
        shares: z / S for each head (N,), initialized to 0 as in the published code.
        longest: the number of positions within the longest span on one side, including the query's own position,
            rounded up to a multiple of STEP. Keys that are farther away are skipped. :func:`measure_spans` keeps this
            number up to date.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        self.limit = options.values["span"]
        self.ramp = options.values["ramp"]
        self.penalty_weight = options.values["span_loss"]
        self.is_causal = options.is_causal
        self.shares = nn.Parameter(torch.zeros(options.num_heads))
        if has_numbers(self.shares):
            self.set_longest(0.0)
        else:  # costs are being counted on tensors without values; assume the maximum span
            self.set_longest(1.0)
        options.common.setdefault(SPANS, []).append(self)

    @property
    @override
    def reach(self) -> int:
        """The maximum distance to the left at which a query attends, in the head with the longest span."""
        return self.longest - 1

    @property
    def spans(self) -> Tensor:
        """The span z of each head (N,) in tokens, in single precision or better."""
        exact = torch.promote_types(self.shares.dtype, torch.float32)
        return _Bounded.apply(self.shares).to(exact) * self.limit

    def penalty(self) -> Tensor:
        """Return the penalty added to the loss per token, in nats: the mean span times the setting `span_loss`."""
        return self.penalty_weight * self.spans.mean()

    def set_longest(self, share: float) -> None:
        """Set `longest` from the largest of the `shares`."""
        share = min(max(share, 0.0), 1.0)
        seen = math.ceil(share * self.limit) + self.ramp
        seen_in_steps = math.ceil(seen / STEP) * STEP
        self.longest = min(seen_in_steps, self.limit)

    @override
    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Compute attention within the spans; the soft mask is added to T5's bias table by distance."""
        scores = attention.scores
        keys = attention.x_BKC.size(1)
        time = attention.x_BTC.size(1)
        far = min(self.longest, keys)  # the smallest distance outside all spans
        steps = torch.arange(-far, far + 1, device=self.shares.device)
        table_KN = self._log_mask(steps.abs())
        if scores.table_KN is not None and scores.bucket_by_distance is not None:
            entries = (steps + keys - 1).clamp(0, keys + time - 2)
            table_KN = table_KN + scores.table_KN[scores.bucket_by_distance[entries]]
        distances = torch.arange(1 - keys, time, device=steps.device)
        ahead = self.reach
        if self.is_causal:
            ahead = 0
        all_heads = (self.num_heads, (Band(self.reach, ahead),))
        within = attention.with_mask(
            AttentionMask((all_heads,)),
            table_KN=table_KN,
            bucket_by_distance=distances.clamp(-far, far) + far,
            far=far,
        )
        return inner(within)

    def _log_mask(self, steps_K: Tensor) -> Tensor:
        """Return the logarithm of each head's mask (K, N); zeros become -inf without a gradient."""
        steps = steps_K[:, None]
        mask = ((self.ramp + self.spans - steps) / self.ramp).clamp(0, 1)
        smallest = torch.finfo(mask.dtype).tiny
        logarithm = mask.clamp(min=smallest).log()
        is_hidden = (mask == 0) | (steps >= self.limit)
        return logarithm.masked_fill(is_hidden, -math.inf)


def measure_spans(spans: Iterable[Span]) -> None:
    """Clamp spans to [0, S] before a training forward pass, and update each module's `longest`.

    This synchronizes with the GPU once. The published code clamps at the same point. Checkpoints therefore contain the
    unclamped spans from the last update.
    """
    spans = list(spans)
    if not spans:
        return
    with torch.no_grad():
        for span in spans:
            if span.training:
                # Use `data` to bypass autograd, because the graph of an earlier forward pass may still exist.
                span.shares.data.clamp_(0, 1)
        if not has_numbers(spans[0].shares):
            return
        largest = torch.stack([span.shares.max() for span in spans]).tolist()
    for span, share in zip(spans, largest, strict=True):
        span.set_longest(share)


class _Bounded(torch.autograd.Function):
    """A clamp to [0, 1] that zeroes gradients pointing out of this interval.

    In half precision the optimizer updates its own copies, which :func:`measure_spans` does not clamp. Without this
    function, these copies could drift far beyond the bound and would need as many updates to return.
    """

    @staticmethod
    def forward(ctx: Any, shares: Tensor) -> Tensor:
        ctx.save_for_backward(shares)
        return shares.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (span_fractions,) = ctx.saved_tensors
        leads_below = (span_fractions <= 0) & (gradient > 0)
        leads_above = (span_fractions >= 1) & (gradient < 0)
        return gradient.masked_fill(leads_below | leads_above, 0)
