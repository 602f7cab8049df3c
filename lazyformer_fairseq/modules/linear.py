"""The linear maps of all sublayers.

In single precision torch multiplies by Intel's MKL. On an AMD processor (EPYC, Zen 4, two cores) that reaches 145 to
180 GFLOP/s where oneDNN, which torch brings along and takes for bf16, reaches 190 to 205: linear maps are three fourths
of an update there (docs/performance.md). So there oneDNN multiplies, in the forward pass and for the input's gradient;
for the weight's, whose factors lie the other way round, it is no faster.
"""

from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from lazyformer_fairseq.modules.processor import is_amd

WORTH_IT = 2**24  # multiply-adds of a product; below, oneDNN's 10 to 20 microseconds a call are more than it saves
ROWS = 128  # oneDNN keeps 1 MB or so for each shape it has met: so not each number of rows, but multiples of this


class Linear(nn.Linear):
    """torch's ``nn.Linear``: the same parameters and, up to rounding, results; faster on AMD's processors.

    That is, in single precision, without autocast or torch.compile, for batches of a multiple of 128 tokens.
    ``torch.backends.mkldnn.flags(enabled=False)`` has torch's own product there too.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., C) -> (..., C')."""
        # Compilers and exporters know torch's own operator; asked first, as they would note whatever else is asked.
        watched = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if not watched and _pays_off(input, self.weight):
            return multiply_by_onednn(input, self.weight, self.bias)
        return super().forward(input)


def has_onednn() -> bool:
    """Whether torch multiplies by MKL here, has oneDNN beside it and may use it."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def multiply_by_onednn(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """x (..., I) times the transpose of weight (O, I), plus bias (O): (..., O); fp32 on a CPU, differentiable."""
    return _Product.apply(x, weight, bias)


def _pays_off(x: Tensor, weight: Tensor) -> bool:
    return (
        (type(x), type(weight))
        == (Tensor, nn.Parameter)  # others, such as a quantised weight, multiply in their own way
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * weight.size(0) >= WORTH_IT
        and x.shape[:-1].numel() % ROWS == 0
        and weight.is_contiguous()  # of a part of a matrix oneDNN makes a thousand times the work
        and is_amd()
        and has_onednn()
        and not torch.is_autocast_enabled("cpu")
    )


class _Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Optional[Tensor]], output: Tensor) -> None:
        x, weight, _bias = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            multiply_by_onednn(gradient, weight.t()) if of_x else None,
            rows.t() @ x.flatten(0, -2) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _count_flops() -> None:
    """Tells torch's FlopCounterMode, which knows no operator of oneDNN's."""
    operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if operator is not None and operator not in flop_registry:

        @register_flop_formula(operator)
        def _flops(x_shape, weight_shape, *_others: Any, **_more: Any) -> int:
            return 2 * weight_shape[0] * x_shape.numel()


_count_flops()
