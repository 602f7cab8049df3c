"""The norms of all networks: LayerNorm, with a bias or without, or RMSNorm.

Both are torch's. On a processor torch puts RMSNorm together of eight operators, and one of our own takes its place.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.patterns.kinds import LAYER, RMS

EPS = 1e-5  # torch's own; BERT's is 1e-12


class NormOptions(NamedTuple):
    """Options of all norms of a network.

    Attributes:
        eps: added to the variance, by RMSNorm to the mean square.
        type: LAYER or RMS.
        has_bias: whether LayerNorms have one; RMSNorm has none.
    """

    eps: float = EPS
    type: str = LAYER
    has_bias: bool = True


def layer_norm(embed_dim: int, eps: float = EPS, norm_type: str = LAYER, has_bias: bool = True) -> nn.Module:
    """Build a norm over the last dimension, of size `embed_dim`; see :class:`NormOptions` for the others."""
    if norm_type == RMS:
        return RMSNorm(embed_dim, eps=eps)
    return nn.LayerNorm(embed_dim, eps=eps, bias=has_bias)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) g (Zhang and Sennrich, 2019, equation 4); the mean is in single precision or better."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., C), in the precision of its input."""
        if x.device.type == "cpu" and not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
            return _RMSNorm.apply(x, self.weight, self.eps)[0]
        return F.rms_norm(x, tuple(self.normalized_shape), self.weight.to(x.dtype), self.eps)


class _RMSNorm(torch.autograd.Function):
    """On a processor: it keeps its input and a number for each row, and goes over them half as often as torch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        exact = _exactly(x)
        mean_square = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_().div_(x.size(-1))
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
        return of_x.to(x.dtype), torch.mv(products.t(), rows).to(weight.dtype), None


def _exactly(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
