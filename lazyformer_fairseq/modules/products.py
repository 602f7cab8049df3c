"""Matrix multiplication on CPUs with the faster of two libraries, MKL or oneDNN.

In single precision torch uses Intel's MKL for matmuls, although it also ships oneDNN. Which library is faster depends
on the CPU, the shape, and which operand is transposed. On a Zen 5 oneDNN is twice as fast for every matmul; on a Zen 4
it is a fifth faster for some matmuls; on a Zen 3 it is slower. On an Intel CPU restricted to AVX2 it is as fast as MKL
in the forward pass, but takes up to seven times as long for input gradients (docs/performance.md). Therefore each
matmul is timed per shape on the current machine (:mod:`.timing`), and oneDNN is used where it is faster. In half
precision torch already uses oneDNN.
"""

from functools import partial
from typing import Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.timing import LARGEST_ERROR, SELECTOR, Prepare

MKL = "MKL"
ONEDNN = "oneDNN"
# Minimum number of multiply-adds; for fewer, oneDNN's overhead of 10 to 20 microseconds per call is too high.
WORTH_IT = 2**22
ROWS = 128  # oneDNN is used only for multiples of this number of rows, because it keeps about 1 MB per shape


def has_onednn() -> bool:
    """Return True if torch was built with both MKL and oneDNN, and oneDNN is enabled."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def onednn_wins(what: str, is_training: bool, prepare: Prepare) -> bool:
    """Return True if oneDNN is faster than MKL, according to an earlier measurement or a new one.

    :meth:`Autotuner.is_worth_timing` determines whether to measure.

    Args:
        what: a description of the matmul.
        is_training: whether the caller is training.
        prepare: returns a function that computes the matmul with :data:`MKL` or :data:`ONEDNN`.
    """
    found = SELECTOR.known_fastest("cpu", what)
    if found is None:
        if not SELECTOR.is_worth_timing(what, is_training, candidates=2):
            return False
        found = SELECTOR.select("cpu", what, (MKL, ONEDNN), prepare, LARGEST_ERROR[torch.float32])
    return found == ONEDNN


def linear_by_onednn(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Return x W^T + b (..., O) for x (..., I), weight (O, I) and bias (O), in fp32 on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(x, _whole(weight), bias, "none", [], "")


def _whole(matrix: Tensor) -> Tensor:
    """Return the matrix or a contiguous copy, because oneDNN is a thousand times slower for part of a larger matrix."""
    if matrix.stride(0) == 1:
        return matrix.t().contiguous().t()
    return matrix.contiguous()


def multiply(a: Tensor, b: Tensor, out: Optional[Tensor] = None, adds: bool = False) -> Tensor:
    """Multiply a batch of matrices a (X, L, M) by b (X, M, R).

    Args:
        a: the left operand.
        b: the right operand.
        out: a tensor (X, L, R) for the result; by default a new one.
        adds: whether to add the result to `out` instead of overwriting it.
    """
    if out is None:
        out = a.new_empty(a.size(0), a.size(1), b.size(2))
    if _may_choose(a, b):
        turned = " turned" if a.stride(2) != 1 else ""
        what = f"products of {a.size(1)} x {a.size(2)}{turned} and {b.size(1)} x {b.size(2)}"

        def timed(name: str) -> partial[list[Tensor]]:
            result = torch.empty(out.shape)
            return partial(_BATCHED[name], a.detach(), b.detach(), result, False)

        if onednn_wins(what, False, timed):
            return _multiply_by_onednn(a, b, out, adds)[0]
    return _multiply_by_mkl(a, b, out, adds)[0]


def _may_choose(a: Tensor, b: Tensor) -> bool:
    """Return True if oneDNN may be used.

    One of the three sizes, the head size, does not have to be a multiple of :data:`ROWS`, because it is the same in all
    batches.
    """
    sizes = a.size(1), a.size(2), b.size(2)
    return (
        a.device.type == "cpu"
        and a.dtype == b.dtype == torch.float32
        and sizes[0] * sizes[1] * sizes[2] >= WORTH_IT
        and sum(size % ROWS == 0 for size in sizes) >= 2
        and has_onednn()
    )


def _multiply_by_mkl(a: Tensor, b: Tensor, out: Tensor, adds: bool) -> list[Tensor]:
    if adds:
        torch.baddbmm(out, a, b, out=out)
    else:
        torch.bmm(a, b, out=out)
    return [out]


def _multiply_by_onednn(a: Tensor, b: Tensor, out: Tensor, adds: bool) -> list[Tensor]:
    """Multiply the matrices one by one, because oneDNN's operator is not batched."""
    for first, second, result in zip(a, b, out, strict=True):
        columns = second.t().contiguous()
        # oneDNN would copy a transposed left operand, so compute the transposed result instead.
        is_turned = first.stride(1) != 1
        if is_turned:
            product = linear_by_onednn(columns, first).t()
        else:
            product = linear_by_onednn(first, columns)
        if adds:
            result.add_(product)
        else:
            result.copy_(product)
    return [out]


_BATCHED = {MKL: _multiply_by_mkl, ONEDNN: _multiply_by_onednn}
