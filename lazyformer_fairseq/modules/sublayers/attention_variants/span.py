"""``s[span=S]``: adaptive attention span, in which each head learns how far it looks (Sukhbaatar et al., 2019a)."""

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

SPANS = "spans"  # the key, in the `common` options of a network, of the list of its Span modules
# The longest span is rounded up to a multiple of this many positions, as in the published code, so that the shape of
# the scores seldom changes.
STEP = 64


class Span(VariantModule):
    """Attention whose weights fall to zero beyond a span that each head learns (section 2.2).

    It computes the softmax of the scores plus log min(max((R + z - x) / R, 0), 1), where x is the distance in
    positions, R the ramp, and z the span of the head, between 0 and S. This equals the paper's normalised product of
    mask and exponentials. An encoder looks equally far to the left and to the right. In the paper the nearest key is
    the one before the query, at x = 1 (x = 0 in the published code); here it is the query's own, at x = 0.

    With entmax, the logarithm is added to the scores in the same way.

    Attributes:
        shares: z / S for each head (N,), initialised to 0 as in the published code.
        longest: the number of positions on one side that the longest span sees, including the query's own, rounded up
            to a multiple of STEP. Keys further away are not computed. :func:`measure_spans` keeps it up to date.
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
        else:  # costs are being counted on tensors without values: assume the longest possible span
            self.set_longest(1.0)
        options.common.setdefault(SPANS, []).append(self)

    @property
    @override
    def reach(self) -> int:
        """The number of positions before its own that a query sees with the longest span."""
        return self.longest - 1

    @property
    def spans(self) -> Tensor:
        """The span z of each head (N,) in tokens, in single precision or better."""
        exact = torch.promote_types(self.shares.dtype, torch.float32)
        return _Bounded.apply(self.shares).to(exact) * self.limit

    def penalty(self) -> Tensor:
        """Return the mean span times the setting `span_loss`, to be added to the loss per token in nats."""
        return self.penalty_weight * self.spans.mean()

    def set_longest(self, share: float) -> None:
        """Set `longest` from the largest of `shares`."""
        share = min(max(share, 0.0), 1.0)
        seen = math.ceil(share * self.limit) + self.ramp
        seen_in_steps = math.ceil(seen / STEP) * STEP
        self.longest = min(seen_in_steps, self.limit)

    @override
    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Attend within the spans; the mask is added to the table of T5's bias by distance."""
        scores = attention.scores
        keys = attention.x_BKC.size(1)
        time = attention.x_BTC.size(1)
        far = min(self.longest, keys)  # the smallest distance beyond all spans
        steps = torch.arange(-far, far + 1, device=self.shares.device)
        table_KN = self._log_mask(steps.abs())
        if scores.table_KN is not None and scores.bucket_by_distance is not None:
            entries = (steps + keys - 1).clamp(0, keys + time - 2)
            table_KN = table_KN + scores.table_KN[scores.bucket_by_distance[entries]]
        distances = torch.arange(1 - keys, time, device=steps.device)
        ahead = self.reach
        if self.is_causal:
            ahead = 0
        mask = AttentionMask(((self.num_heads, (Band(self.reach, ahead),)),))
        within = attention.with_mask(
            mask,
            table_KN=table_KN,
            bucket_by_distance=distances.clamp(-far, far) + far,
            far=far,
        )
        return inner(within)

    def _log_mask(self, steps_K: Tensor) -> Tensor:
        """Return the logarithm of each head's mask (K, N); where the mask is 0, -inf without a gradient."""
        steps = steps_K[:, None]
        mask = ((self.ramp + self.spans - steps) / self.ramp).clamp(0, 1)
        smallest = torch.finfo(mask.dtype).tiny
        logarithm = mask.clamp(min=smallest).log()
        is_hidden = (mask == 0) | (steps >= self.limit)
        return logarithm.masked_fill(is_hidden, -math.inf)


def measure_spans(spans: Iterable[Span]) -> None:
    """Clamp spans to [0, S] before a forward pass in training, and update the `longest` span of each module.

    This synchronises once with a GPU. The published code clamps at the same point; a checkpoint therefore holds spans
    as the last update left them.
    """
    spans = list(spans)
    if not spans:
        return
    with torch.no_grad():
        for span in spans:
            if span.training:
                # Through `data`, out of sight of autograd: the graph of an earlier pass may still be alive.
                span.shares.data.clamp_(0, 1)
        if not has_numbers(spans[0].shares):
            return
        largest = torch.stack([span.shares.max() for span in spans]).tolist()
    for span, share in zip(spans, largest, strict=True):
        span.set_longest(share)


class _Bounded(torch.autograd.Function):
    """A clamp to [0, 1] that drops gradients that lead out of this interval.

    In half precision the optimizer updates copies of its own, which :func:`measure_spans` does not clamp. Without this
    function they could drift far beyond the bound, and the head would need as many updates to come back.
    """

    @staticmethod
    def forward(ctx: Any, shares: Tensor) -> Tensor:
        ctx.save_for_backward(shares)
        return shares.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        leads_out = ((shares <= 0) & (gradient > 0)) | ((shares >= 1) & (gradient < 0))
        return gradient.masked_fill(leads_out, 0)
