"""``s[span=S]``: each head learns how far it looks (Sukhbaatar et al., 2019a: adaptive attention span)."""

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

# In the `common` of a network's options: its spans.
SPANS = "spans"
# Positions by which the longest span grows for those that compute it, as in the published code: scores then seldom
# change their shape.
STEP = 64


class Span(VariantModule):
    """Weights fall with the distance (section 2.2): softmax of the scores plus log min(max((R + z - x) / R, 0), 1).

    x is the distance in positions, R the ramp. Each head learns its z, from 0 to S. That is the paper's product of mask
    and exponentials, normalised. An encoder looks as far to the right. In the paper the nearest key is the one before
    the query, with x = 1 (x = 0 in the published code); here it is the query's own, with x = 0.

    With entmax the logarithm is added to its scores in the same way.

    Attributes:
        shares: z / S of each head, (N,), 0 at first, as in the published code.
        longest: positions to a side that the longest span sees, the query's own included, up to the next multiple of
            STEP. Keys beyond are not computed. :func:`measure_spans` keeps it up to date.
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
        else:  # where costs are counted without numbers, a span is as long as it may become
            self.set_longest(1.0)
        options.common.setdefault(SPANS, []).append(self)

    @property
    @override
    def reach(self) -> int:
        """Positions before a query's own that the longest span sees."""
        return self.longest - 1

    @property
    def spans(self) -> Tensor:
        """The span z of each head in tokens (N,), in single precision or better."""
        exact = torch.promote_types(self.shares.dtype, torch.float32)
        return _Bounded.apply(self.shares).to(exact) * self.limit

    def penalty(self) -> Tensor:
        """Return the weight of the loss times the mean span, to be added to the loss of a token in nats."""
        return self.penalty_weight * self.spans.mean()

    def set_longest(self, share: float) -> None:
        """Keep the longest span up to date, given the largest of `shares`."""
        share = min(max(share, 0.0), 1.0)
        seen = math.ceil(share * self.limit) + self.ramp
        seen_in_steps = math.ceil(seen / STEP) * STEP
        self.longest = min(seen_in_steps, self.limit)

    @override
    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Attend within the spans; T5's bias stays in the table by distance."""
        scores = attention.scores
        keys = attention.x_BKC.size(1)
        time = attention.x_BTC.size(1)
        far = min(self.longest, keys)  # the first step beyond all spans
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
        """Return the logarithm of each head's mask (K, N); -inf, with no gradient, where that is 0."""
        steps = steps_K[:, None]
        mask = ((self.ramp + self.spans - steps) / self.ramp).clamp(0, 1)
        smallest = torch.finfo(mask.dtype).tiny
        logarithm = mask.clamp(min=smallest).log()
        is_hidden = (mask == 0) | (steps >= self.limit)
        return logarithm.masked_fill(is_hidden, -math.inf)


def measure_spans(spans: Iterable[Span]) -> None:
    """Clamp z to [0, S] before a forward pass, and look how far the longest heads see. Waits for a GPU, once.

    The published code clamps at the same time; a checkpoint holds z as the update before left it.
    """
    spans = list(spans)
    if not spans:
        return
    with torch.no_grad():
        for span in spans:
            if span.training:
                span.shares.data.clamp_(0, 1)  # past autograd: a graph of a pass before may still be alive
        if not has_numbers(spans[0].shares):
            return
        largest = torch.stack([span.shares.max() for span in spans]).tolist()
    for span, share in zip(spans, largest, strict=True):
        span.set_longest(share)


class _Bounded(torch.autograd.Function):
    """Clamps to [0, 1]; drops gradients that lead out of it.

    In half precision the optimizer has copies of its own, which no clamp of ours reaches: pushed on, they would drift
    away from the bound, and a head could not come back for as long.
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
