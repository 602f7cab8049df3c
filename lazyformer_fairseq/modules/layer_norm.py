"""Normalization layers: LayerNorm, with or without a bias, and RMSNorm.

Both use torch's implementation, except for RMSNorm on a CPU. There, torch's RMSNorm consists of eight operators, which
we replace with a single one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.patterns.kinds import LAYER, RMS

EPS = 1e-5  # torch's default; BERT uses 1e-12


class NormOptions(NamedTuple):
    """Options for all normalization layers of a network.

    Attributes:
        eps: the constant added to the variance (LayerNorm) or to the mean square (RMSNorm).
        type: LAYER or RMS.
        has_bias: whether a LayerNorm has a bias; an RMSNorm never has one.
    """

    eps: float = EPS
    type: str = LAYER
    has_bias: bool = True


def layer_norm(embed_dim: int, eps: float = EPS, norm_type: str = LAYER, has_bias: bool = True) -> nn.Module:
    """Build a normalization layer over the last dimension, which has size `embed_dim`.

    For the other arguments, see :class:`NormOptions`.
    """
    if norm_type == RMS:
        return RMSNorm(embed_dim, eps=eps)
    return nn.LayerNorm(embed_dim, eps=eps, bias=has_bias)


class RMSNorm(nn.RMSNorm):
    """RMSNorm: x / sqrt(mean(x^2) + eps) * g, where g is the weight (Zhang and Sennrich, 2019, equation 4).

    The mean is computed in single precision or better.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x (..., C) and return the result in the dtype of x."""
        is_watched = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if x.device.type == "cpu" and not is_watched:
            return _RMSNorm.apply(x, self.weight, self.eps)[0]
        return F.rms_norm(x, tuple(self.normalized_shape), self.weight.to(x.dtype), self.eps)


class _RMSNorm(torch.autograd.Function):
    """An RMSNorm for CPUs that saves only its arguments and one value per row, and halves torch's memory reads."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        exact = _exactly(x)
        norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        mean_square = norm.square_().div_(x.size(-1))
        inverse = mean_square.add_(eps).rsqrt_()
        return (exact * inverse).mul_(weight).to(x.dtype), inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:2], output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        exact = _exactly(x)
        gradient = _exactly(gradient)
        products = (gradient * exact).flatten(0, -2)
        scale = weight.to(products)
        rows = inverse.flatten()
        along = torch.mv(products, scale).mul_(rows**3).div_(-x.size(-1))
        of_x = (gradient * inverse).mul_(scale).addcmul_(exact, along.view_as(inverse))
        of_weight = torch.mv(products.t(), rows)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


def _exactly(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
