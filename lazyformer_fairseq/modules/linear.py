"""The linear layer that all sublayers use. On a CPU, it chooses the faster of two libraries."""

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.products import MKL, ROWS, has_onednn, linear_by_onednn, onednn_wins
from lazyformer_fairseq.modules.timing import half_octaves

WORTH_IT = 2**24  # minimum number of multiply-adds for which choosing a library pays off, even with padding
MOST_ZEROS = 1 / 8  # maximum ratio of padding rows to input rows; more padding would cancel oneDNN's advantage
MOST_ROWS = 1024  # maximum number of rows to time; beyond it the time per row is constant


class Linear(nn.Linear):
    """A linear layer equivalent to ``nn.Linear`` up to rounding, but faster if oneDNN beats MKL.

    oneDNN is used only in single precision, without autocast or torch.compile. The number of tokens is padded to a
    multiple of 32 (64 above 512 tokens, 128 above 1,024); if this would add more than an eighth, oneDNN is not used. To
    disable oneDNN, use ``torch.backends.mkldnn.flags(enabled=False)``.

    Attributes:
        blocks: the number of equally sized matrices stacked in the weight, such as 3 for queries, keys and values. Muon
            orthogonalizes each matrix's update separately.
    """

    blocks: int = 1

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to an input (..., C); return (..., C')."""
        return self.multiply(input, self.weight, self.bias)

    def multiply(self, input: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        """Multiply the input by all or part of this layer's weight (C', C), and add the bias (C').

        Args:
            input: (..., C).
            weight: this layer's weight or some of its rows.
            bias: the matching part of the bias, if any.
        """
        # Compilers and exporters support only torch's own operator. Check for them first, because they would trace any
        # later checks.
        watched = torch.compiler.is_compiling() or torch.jit.is_tracing()
        is_plain = type(self.weight) is nn.Parameter  # other types, such as quantized weights, define their own matmul
        if not watched and is_plain and _has_choice(input, weight):
            rows = input.shape[:-1].numel()
            faster = faster_products(rows, self.in_features, weight.size(0), torch.is_grad_enabled())
            if any(faster):
                flat = input.flatten(0, -2)
                if zeros := _zeros(rows):
                    padded = F.pad(flat, (0, 0, 0, zeros))
                else:
                    padded = flat
                output = _Product.apply(padded, weight, bias, faster)
                return output[:rows].unflatten(0, input.shape[:-1])
        return F.linear(input, weight, bias)


def multiply_by_part(linear: Linear, input: Tensor, start: int, stop: int, has_bias: bool = True) -> Tensor:
    """Compute only the outputs `start` to `stop` of a linear layer: (..., C) -> (..., stop - start).

    If the layer is wrapped, such as by a peft adapter, all outputs are computed and then sliced, because they do not
    depend on the layer's weight alone.
    """
    if linear.bias is None:
        bias = None
    else:
        bias = linear.bias[start:stop]
    if not isinstance(linear, nn.Linear):
        output = linear(input)[..., start:stop]
        if has_bias or bias is None:
            return output
        return output - bias
    return linear.multiply(input, linear.weight[start:stop], bias if has_bias else None)


def multiply_by_onednn(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Return x W^T + b for x (..., I), weight (O, I) and bias (O), all in fp32 on a CPU. Autograd is supported."""
    return _Product.apply(x, weight, bias, Products(True, True, True))


class Products(NamedTuple):
    """Flags that determine which of a linear layer's matmuls use oneDNN.

    Attributes:
        forward: x W^T.
        input_gradient: the output gradient times W.
        weight_gradient: the transposed output gradient times x.
    """

    forward: bool
    input_gradient: bool
    weight_gradient: bool


def faster_products(rows: int, inputs: int, outputs: int, is_training: bool) -> Products:
    """Determine which matmuls of a linear layer are faster with oneDNN.

    Args:
        rows: the number of input rows.
        inputs: the number of input features.
        outputs: the number of output features.
        is_training: whether gradients are computed; otherwise only the forward matmul is considered.
    """
    rows = min(rows + _zeros(rows), MOST_ROWS)
    shape = f"about {half_octaves(rows):.0f} rows of a map of {inputs} to {outputs}"

    def wins(product: str, mkl: Callable, onednn: Callable, *shapes: tuple[int, int]) -> bool:
        def timed(name: str) -> Callable[[], list[Tensor]]:
            factors = [torch.ones(each, dtype=torch.float32, device="cpu") for each in shapes]
            multiply = mkl if name == MKL else onednn
            return lambda: [multiply(*factors)]

        return onednn_wins(f"{product} of {shape}", is_training, timed)

    x = (rows, inputs)
    gradient = (rows, outputs)
    weight = (outputs, inputs)
    forward = wins("product", F.linear, linear_by_onednn, x, weight)
    if not is_training:
        return Products(forward, input_gradient=False, weight_gradient=False)
    return Products(
        forward,
        input_gradient=wins("input's gradient", torch.mm, _times_by_onednn, gradient, weight),
        weight_gradient=wins("weight's gradient", _weight_gradient, _weight_gradient_by_onednn, gradient, x),
    )


def _has_choice(x: Tensor, weight: Tensor) -> bool:
    rows = x.shape[:-1].numel()
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * weight.size(0) >= WORTH_IT
        and _zeros(rows) <= MOST_ZEROS * rows
        and weight.is_contiguous()  # oneDNN is a thousand times slower for part of a matrix
        and has_onednn()
        and not torch.is_autocast_enabled("cpu")
    )


def _zeros(rows: int) -> int:
    """Return the number of zero rows to append.

    oneDNN keeps 1 to 9 MB for each number of rows that it has seen, so the number is rounded up to one of a small set
    of values.
    """
    if rows > 8 * ROWS:
        multiple = ROWS
    elif rows > 4 * ROWS:
        multiple = ROWS // 2
    else:
        multiple = ROWS // 4
    return -rows % multiple


def _times_by_onednn(gradient: Tensor, weight: Tensor) -> Tensor:
    return multiply_by_onednn(gradient, weight.t())


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Compute the gradient of a weight (O, I) from the output gradient (M, O) and the input (M, I)."""
    return F.linear(gradient.t(), x.t())


def _weight_gradient_by_onednn(gradient: Tensor, x: Tensor) -> Tensor:
    return multiply_by_onednn(gradient.t().contiguous(), x.t())  # the copy saves up to 40% of the time


class _Product(torch.autograd.Function):
    """A linear layer that uses oneDNN for the matmuls flagged in `by_onednn`, and torch for the others."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Optional[Tensor], by_onednn: Products) -> Tensor:
        if by_onednn.forward:
            return linear_by_onednn(x, weight, bias)
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Optional[Tensor], Products], _: Tensor) -> None:
        x, weight, _bias, ctx.by_onednn = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor], None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        times_weight: Callable[[Tensor, Tensor], Tensor] = torch.matmul
        if ctx.by_onednn.input_gradient:
            times_weight = _times_by_onednn
        times_x = _weight_gradient
        if ctx.by_onednn.weight_gradient:
            times_x = _weight_gradient_by_onednn
        rows = gradient.flatten(0, -2)
        return (
            times_weight(gradient, weight) if of_x else None,
            times_x(rows, x.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
            None,
        )
