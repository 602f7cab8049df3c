"""The linear maps of all sublayers.

In single precision on a processor torch multiplies with Intel's MKL, although it ships oneDNN too. Which of them is
faster depends on the processor, on the shape, and on which factor is transposed: on a Zen 5 oneDNN is twice as fast for
every product, on a Zen 4 by a fifth for some, on a Zen 3 it is slower; on an Intel processor held to AVX2 it is as fast
in the forward pass and takes up to seven times as long for an input's gradient (docs/performance.md). So we measure
both for each shape and product, once per machine, and oneDNN multiplies where it wins.
"""

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.processor import device_kind
from lazyformer_fairseq.storage.json_files import remembered

logger = logging.getLogger(__name__)

WORTH_IT = 2**24  # multiply-adds of a product; below, oneDNN's 10 to 20 microseconds a call are more than it saves
ROWS = 128  # oneDNN keeps about 1 MB per shape it meets: so only multiples of this, zeros filling up the last one
MOST_ZEROS = 1 / 8  # of the rows; more would cost what oneDNN saves
CLEARLY = 0.95  # share of MKL's time: oneDNN wins a turn below it
WINS, LOSSES = 5, 3  # turns after which it has won, or lost, whichever comes first
FILE = "matrix_products.json"  # in the cache folder: a resumed run must round as before


class Linear(nn.Linear):
    """torch's ``nn.Linear``: the same parameters and, up to rounding, results; faster where oneDNN beats MKL.

    That is, in single precision, without autocast or torch.compile, for batches of a multiple of 128 tokens or up to an
    eighth less.
    ``torch.backends.mkldnn.flags(enabled=False)`` switches to torch's own product there too.
    """

    def forward(self, input: Tensor) -> Tensor:
        """(..., C) -> (..., C')."""
        return self.multiply(input, self.weight, self.bias)

    def multiply(self, input: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        """By these weights of its own, all or a part."""
        # Compilers and exporters know torch's own operator; check for them first, since they record every later check.
        watched = torch.compiler.is_compiling() or torch.jit.is_tracing()
        is_plain = type(self.weight) is nn.Parameter  # others, such as quantised weights, multiply in their own way
        if not watched and is_plain and _has_choice(input, weight):
            faster = onednn_wins(self.in_features, weight.size(0), torch.get_num_threads())
            if any(faster):
                rows = input.flatten(0, -2)
                padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS)) if len(rows) % ROWS else rows
                return _Product.apply(padded, weight, bias, faster)[: len(rows)].unflatten(0, input.shape[:-1])
        return F.linear(input, weight, bias)


def multiply_by_part(linear: Linear, input: Tensor, start: int, stop: int, has_bias: bool = True) -> Tensor:
    """The outputs of a linear map from `start` to `stop` alone: (..., C) -> (..., stop - start)."""
    bias = linear.bias[start:stop] if has_bias and linear.bias is not None else None
    return linear.multiply(input, linear.weight[start:stop], bias)


class Products(NamedTuple):
    """One value for each product of a linear map that two libraries can compute.

    Attributes:
        forward: x W^T.
        input_gradient: the output's gradient times W.
        weight_gradient: the transpose of the output's gradient times x.
    """

    forward: Any
    input_gradient: Any
    weight_gradient: Any


def has_onednn() -> bool:
    """Whether torch multiplies with MKL here, also has oneDNN, and may use it."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def multiply_by_onednn(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """x (..., I) times the transpose of weight (O, I), plus bias (O): (..., O); fp32 on a CPU, differentiable."""
    return _Product.apply(x, weight, bias, Products(True, True, True))


@functools.cache
def onednn_wins(inputs: int, outputs: int, threads: int) -> Products:
    """Which products of a map `inputs` -> `outputs` oneDNN computes in clearly less time than MKL.

    Measured (a tenth of a second at base size) unless an earlier process of this user has done so on such a machine,
    with this torch and as many threads.
    """
    machine = f"{device_kind('cpu')}, torch {torch.__version__}, {threads} threads"
    wins = Products(*remembered(FILE, machine, f"{inputs} to {outputs}", lambda: _compare(inputs, outputs)))
    logger.info("linear maps of %d to %d: forward by %s, input's gradient by %s, weight's by %s (measured)",
                inputs, outputs, *("oneDNN" if won else "MKL" for won in wins))  # fmt: skip
    return wins


def _compare(inputs: int, outputs: int) -> Products:
    """As :func:`onednn_wins`, from products of 128 rows, or of enough more to be worth it."""
    rows = ROWS * -(-WORTH_IT // (ROWS * inputs * outputs))

    def compare() -> Products:
        x, gradient, weight = (
            torch.ones(shape, dtype=torch.float32, device="cpu")
            for shape in ((rows, inputs), (rows, outputs), (outputs, inputs))
        )
        return Products(
            _wins_turns(_onednn, F.linear, x, weight),
            _wins_turns(_onednn, F.linear, gradient, weight.t()),
            _wins_turns(_weight_gradient_by_onednn, _weight_gradient, gradient, x),
        )

    # A separate thread escapes the caller's autograd, autocast, FLOP counter and function transforms.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(compare).result()


@torch.inference_mode()
def _wins_turns(onednn: Callable, mkl: Callable, first: Tensor, second: Tensor) -> bool:
    # Other processes do not affect thread time; but it misses how long several threads wait for each other.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def seconds(multiply: Callable[[Tensor, Tensor], Tensor]) -> float:
        start = clock()
        multiply(first, second)
        return clock() - start

    onednn(first, second), mkl(first, second)  # both prepare
    turns = Counter()
    while turns[True] < WINS and turns[False] < LOSSES:
        turns[seconds(onednn) < CLEARLY * seconds(mkl)] += 1
    return turns[True] == WINS


def _has_choice(x: Tensor, weight: Tensor) -> bool:
    rows = x.shape[:-1].numel()
    return (
        type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * weight.size(0) >= WORTH_IT
        and -rows % ROWS <= MOST_ZEROS * rows
        and weight.is_contiguous()  # oneDNN takes a thousand times the work for part of a matrix
        and has_onednn()
        and not torch.is_autocast_enabled("cpu")
    )


def _onednn(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """(M, O) and (M, I) -> (O, I)."""
    return F.linear(gradient.t(), x.t())


def _weight_gradient_by_onednn(gradient: Tensor, x: Tensor) -> Tensor:
    return multiply_by_onednn(gradient.t().contiguous(), x.t())  # the copy gains up to two fifths


class _Product(torch.autograd.Function):
    """A linear map; oneDNN computes what `by_onednn` names, torch the rest."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Optional[Tensor], by_onednn: Products) -> Tensor:
        return (_onednn if by_onednn.forward else F.linear)(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Optional[Tensor], Products], output: Tensor) -> None:
        x, weight, _bias, ctx.by_onednn = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor], None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        times_weight = multiply_by_onednn if ctx.by_onednn.input_gradient else F.linear
        times_x = _weight_gradient_by_onednn if ctx.by_onednn.weight_gradient else _weight_gradient
        rows = gradient.flatten(0, -2)
        return (
            times_weight(gradient, weight.t()) if of_x else None,
            times_x(rows, x.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
            None,
        )
