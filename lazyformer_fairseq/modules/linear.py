"""The linear maps of all sublayers, by the faster of two libraries."""

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.products import MKL, ROWS, has_onednn, linear_by_onednn, onednn_wins
from lazyformer_fairseq.modules.timing import half_octaves

WORTH_IT = 2**24  # multiply-adds of a map, whose rows may need filling up
MOST_ZEROS = 1 / 8  # of the rows, to fill them up; more would cost what oneDNN saves
MOST_ROWS = 1024  # that are timed: more take the same time each


class Linear(nn.Linear):
    """torch's ``nn.Linear``: the same parameters and, up to rounding, results; faster where oneDNN beats MKL.

    That is, in single precision, without autocast or torch.compile, for batches whose tokens are at most an eighth less
    than a multiple of 32 (of 64 above 512 tokens, of 128 above 1,024).
    ``torch.backends.mkldnn.flags(enabled=False)`` switches to torch's own product there too.

    Attributes:
        blocks: maps of equal size that its weight stacks, such as those to queries, keys and values; Muon
            orthogonalises the update of each alone.
    """

    blocks: int = 1

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., C) to (..., C')."""
        return self.multiply(input, self.weight, self.bias)

    def multiply(self, input: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        """Multiply by these weights of its own, all or a part."""
        # Compilers and exporters know torch's own operator; check for them first, since they record every later check.
        watched = torch.compiler.is_compiling() or torch.jit.is_tracing()
        is_plain = type(self.weight) is nn.Parameter  # others, such as quantised weights, multiply in their own way
        if not watched and is_plain and _has_choice(input, weight):
            rows = input.shape[:-1].numel()
            faster = faster_products(rows, self.in_features, weight.size(0), torch.is_grad_enabled())
            if any(faster):
                flat = input.flatten(0, -2)
                if zeros := _zeros(rows):
                    padded = F.pad(flat, (0, 0, 0, zeros))
                else:
                    padded = flat
                return _Product.apply(padded, weight, bias, faster)[:rows].unflatten(0, input.shape[:-1])
        return F.linear(input, weight, bias)


def multiply_by_part(linear: Linear, input: Tensor, start: int, stop: int, has_bias: bool = True) -> Tensor:
    """Return the outputs of a linear map from `start` to `stop` alone: (..., C) -> (..., stop - start).

    A map that something has wrapped, such as an adapter of peft, computes all of them, for its weight is not all of it.
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
    """Return x (..., I) times the transpose of weight (O, I), plus bias (O); fp32 on a CPU, differentiable."""
    return _Product.apply(x, weight, bias, Products(True, True, True))


class Products(NamedTuple):
    """Products of a linear map that oneDNN computes.

    Attributes:
        forward: x W^T.
        input_gradient: the output's gradient times W.
        weight_gradient: the transpose of the output's gradient times x.
    """

    forward: bool
    input_gradient: bool
    weight_gradient: bool


def faster_products(rows: int, inputs: int, outputs: int, is_training: bool) -> Products:
    """Return which products of a map of so many rows oneDNN computes; the first alone where there are no gradients."""
    rows = min(rows + _zeros(rows), MOST_ROWS)
    shape = f"about {half_octaves(rows):.0f} rows of a map of {inputs} to {outputs}"

    def wins(product: str, mkl: Callable, onednn: Callable, *shapes: tuple[int, int]) -> bool:
        def timed(name: str) -> Callable[[], list[Tensor]]:
            factors = [torch.ones(each, dtype=torch.float32, device="cpu") for each in shapes]
            return lambda: [(mkl if name == MKL else onednn)(*factors)]

        return onednn_wins(f"{product} of {shape}", is_training, timed)

    x = (rows, inputs)
    gradient = (rows, outputs)
    weight = (outputs, inputs)
    return Products(
        wins("product", F.linear, linear_by_onednn, x, weight),
        is_training and wins("input's gradient", torch.mm, _times_by_onednn, gradient, weight),
        is_training and wins("weight's gradient", _weight_gradient, _weight_gradient_by_onednn, gradient, x),
    )


def _has_choice(x: Tensor, weight: Tensor) -> bool:
    rows = x.shape[:-1].numel()
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * weight.size(0) >= WORTH_IT
        and _zeros(rows) <= MOST_ZEROS * rows
        and weight.is_contiguous()  # oneDNN takes a thousand times the work for part of a matrix
        and has_onednn()
        and not torch.is_autocast_enabled("cpu")
    )


def _zeros(rows: int) -> int:
    """Return how many rows to add as zeros: oneDNN keeps 1 to 9 MB for each number of rows, so let few differ."""
    return -rows % (ROWS if rows > 8 * ROWS else ROWS // 2 if rows > 4 * ROWS else ROWS // 4)


def _times_by_onednn(gradient: Tensor, weight: Tensor) -> Tensor:
    return multiply_by_onednn(gradient, weight.t())


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a weight (O, I) from that of the output (M, O) and the input (M, I)."""
    return F.linear(gradient.t(), x.t())


def _weight_gradient_by_onednn(gradient: Tensor, x: Tensor) -> Tensor:
    return multiply_by_onednn(gradient.t().contiguous(), x.t())  # the copy gains up to two fifths


class _Product(torch.autograd.Function):
    """A linear map; oneDNN computes what `by_onednn` names, torch the rest."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Optional[Tensor], by_onednn: Products) -> Tensor:
        return (linear_by_onednn if by_onednn.forward else F.linear)(x, weight, bias)

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
