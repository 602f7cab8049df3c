"""Attention weights from scores: softmax or alpha-entmax (Peters et al., 2019, section 3), and their gradients.

With eps = alpha - 1, entmax assigns each key the weight p = [1 + eps (s - tau)]_+^(1 / eps), where tau is chosen so
that each row sums to one. Keys that score far enough below the best key have a weight of exactly zero. The limit eps ->
0 is softmax, and eps = 1 is sparsemax.

We find tau with Newton's method on the (1 / eps)-norm of the row, which is convex in tau and almost linear for alpha up
to 2. This takes 4 to 10 steps, whereas bisection takes one step per bit, and the exact algorithms, which exist for
alpha = 1.5 and 2, sort each row.
"""

import math
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# The maximum number of Newton steps. In our tests, rows of up to 16,384 scores took at most 10 steps until their sums
# were within 1e-9 of one.
_STEPS = 12
# The number of scores that a CPU processes at once, so that they fit into its cache.
_PIECE_ELEMENTS = 2**17
# The Taylor coefficients of (1 - (1 - z) e^z) / z^2, from the highest order to the lowest.
_SERIES = [(k - 1) / math.factorial(k) for k in range(10, 1, -1)]


def distribution(
    scores: Tensor,
    exponent_N: Optional[Tensor],
    dtype: torch.dtype,
    has_blind_rows: bool = False,
) -> Tensor:
    """Compute the distribution P from scores, in float32 or higher precision.

    P is differentiable with respect to the scores and the exponents.

    Args:
        scores: The scores (..., N, T, K), -inf at hidden keys.
        exponent_N: The alpha of each head, in (1, 2]; None for softmax.
        dtype: The data type of P.
        has_blind_rows: Whether some queries may see no key at all. Their rows become zeros; softmax would return NaN.
    """
    exact = torch.promote_types(scores.dtype, torch.float32)
    if exponent_N is not None:
        probabilities = _Entmax.apply(scores.to(exact), exponent_N.to(exact))
    elif has_blind_rows:
        # The scores are converted first, because torch cannot differentiate this function if it converts them itself.
        # torch.compile supports the function only under this name.
        probabilities = torch.ops.aten._safe_softmax(scores.to(exact), -1)
    else:
        probabilities = torch.softmax(scores, dim=-1, dtype=exact)
    return probabilities.to(dtype)


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, exponent_N: Tensor) -> Tensor:
        probabilities = entmax(scores, exponent_N)
        ctx.save_for_backward(probabilities, exponent_N)
        return probabilities

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_probabilities: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        probabilities, exponent_N = ctx.saved_tensors
        d_scores = _entmax_gradient(probabilities, d_probabilities, exponent_N)
        if not ctx.needs_input_grad[1]:
            return d_scores, None
        return d_scores, _exponent_gradient(probabilities, d_scores, exponent_N)


@torch.library.custom_op("lazyformer::entmax", mutates_args=())
def entmax(scores: Tensor, exponent_N: Tensor) -> Tensor:
    """Compute alpha-entmax of rows (..., N, T, K) in their own precision, without a gradient.

    Rows without a visible key become zero. This is a custom operator because torch.compile would unroll the loop over
    steps, which takes minutes.

    Args:
        scores: The scores, -inf at hidden keys.
        exponent_N: The alpha of each head.
    """
    exponent = exponent_N[:, None, None]
    if not _is_on_processor(scores):
        return _rows(scores, exponent)
    rows = _PIECE_ELEMENTS * scores.size(-2) // max(1, scores.numel())
    pieces = [_rows(piece, exponent) for piece in scores.split(max(1, rows), dim=-2)]
    return torch.cat(pieces, dim=-2)


@entmax.register_fake
def _(scores: Tensor, _exponent_N: Tensor) -> Tensor:
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _is_on_processor(scores: Tensor) -> bool:
    """Return whether reading values is free; on a GPU it requires synchronizing, and compiled graphs have no values."""
    return scores.device.type == "cpu" and not torch.compiler.is_compiling()


def _rows(scores: Tensor, exponent: Tensor) -> Tensor:
    """Compute entmax of some rows. In the code, `above` is tau relative to the row's best score."""
    step = exponent - 1
    limits = torch.finfo(scores.dtype)
    best = scores.amax(-1, keepdim=True).clamp(min=limits.min)
    below_best = (scores - best) * step
    above = torch.zeros_like(below_best[..., :1])
    may_look = _is_on_processor(scores)
    enough = 1 + 4 * limits.eps
    for _ in range(_STEPS):
        bases = (below_best - above).clamp_(min=-1)
        slopes, powers = _powers(bases, exponent, may_look)
        mass = powers.sum(-1, keepdim=True)
        slope = _positive(slopes.sum(-1, keepdim=True))
        if may_look and bool((mass <= enough).all()):
            break
        # On this side of tau, the mass is at least 1, except for rounding errors and in rows without a visible key.
        mass = mass.clamp(min=1)
        excess = torch.expm1(-step * mass.log())
        above = above - mass / slope * excess
    else:
        bases = (below_best - above).clamp_(min=-1)
        _, powers = _powers(bases, exponent, may_look)
    return powers / _positive(powers.sum(-1, keepdim=True))


def _positive(sums: Tensor) -> Tensor:
    """Clamp sums to be positive, because the sum of a row without a visible key is zero and must not be a divisor."""
    return sums.clamp(min=torch.finfo(sums.dtype).tiny)


def _powers(bases: Tensor, exponent: Tensor, may_look: bool) -> tuple[Tensor, Tensor]:
    """Return x^(1 / eps - 1) and x^(1 / eps) for x = 1 + `bases`; both are 0 where x is 0."""
    if may_look and bool((exponent == 1.5).all()):
        roots = 1 + bases
        return roots, roots * roots
    if may_look and bool((exponent == 2).all()):
        powers = 1 + bases
        return (powers > 0).to(powers.dtype), powers
    # Near softmax, x is close to 1 and its distance from 1 matters, so log1p is needed.
    power = 1 / (exponent - 1) - 1
    slopes = torch.exp(torch.log1p(bases) * power)
    slopes = slopes.masked_fill_(bases <= -1, 0)
    return slopes, slopes * (1 + bases)


def _entmax_gradient(probabilities: Tensor, d_probabilities: Tensor, exponent_N: Tensor) -> Tensor:
    """Compute dS = w (dP - m), where w = p^(2 - alpha) and m is the mean of dP weighted by w.

    See Peters et al., 2019, section 3.
    """
    exponent = exponent_N[:, None, None]
    slopes = probabilities ** (2 - exponent)
    slopes = slopes.masked_fill_(probabilities == 0, 0)
    weighted = slopes * d_probabilities
    sum_of_slopes = _positive(slopes.sum(-1, keepdim=True))
    mean = weighted.sum(-1, keepdim=True) / sum_of_slopes
    return weighted - slopes * mean


def _exponent_gradient(probabilities: Tensor, d_scores: Tensor, exponent_N: Tensor) -> Tensor:
    """Compute the gradient of the exponents (N,), in a form that is also accurate near softmax.

    See Correia et al., 2019, section 3. Differentiating p^eps = 1 + eps (s - tau) with respect to alpha yields dp = w
    (c - l^2 phi(eps l)), where l = log p, w = p^(2 - alpha), phi(z) = (1 - (1 - z) e^z) / z^2, and c is chosen so that
    each row sums to 0. The gradient of the exponent is therefore the sum of -dS l^2 phi(eps l). The paper's formula
    instead takes the difference of two numbers as large as 1 / eps^2.
    """
    logs = torch.where(probabilities > 0, probabilities, 1).log()
    scaled = logs * (exponent_N - 1)[:, None, None]
    series = torch.zeros_like(scaled)
    for coefficient in _SERIES:
        series = series * scaled + coefficient
    is_small = scaled.abs() < 0.1
    others = torch.where(is_small, 1, scaled)
    exact = (1 - (1 - others) * others.exp()) / others.square()
    curvature = torch.where(is_small, series, exact)
    by_head = (d_scores * logs.square() * curvature).sum((-2, -1))
    return -by_head.sum_to_size(exponent_N.shape)
