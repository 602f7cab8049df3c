"""Products of matrices on a processor, by the faster of two libraries.

In single precision torch multiplies with Intel's MKL, although it ships oneDNN too. Which of them is faster depends on
the processor, on the shape, and on which factor is transposed: on a Zen 5 oneDNN is twice as fast for every product, on
a Zen 4 by a fifth for some, on a Zen 3 it is slower; on an Intel processor held to AVX2 it is as fast in the forward
pass and takes up to seven times as long for an input's gradient (docs/performance.md). So each product of each shape is
timed where it runs (:mod:`.timing`), and oneDNN multiplies where it wins. In half precision torch takes oneDNN itself.
"""

from functools import partial
from typing import Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.timing import LARGEST_ERROR, SELECTOR, Prepare

MKL = "MKL"
ONEDNN = "oneDNN"
WORTH_IT = 2**22  # multiply-adds of a product; below, oneDNN's 10 to 20 microseconds a call are more than it saves
ROWS = 128  # oneDNN keeps about 1 MB per shape it meets: so only multiples of this


def has_onednn() -> bool:
    """Return whether torch multiplies with MKL here, also has oneDNN, and may use it."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def onednn_wins(what: str, is_training: bool, prepare: Prepare) -> bool:
    """Return whether oneDNN is known to be faster, or found to be now; see :meth:`TimedSelector.pays`.

    Args:
        what: is multiplied.
        is_training: whether the caller trains.
        prepare: returns the product by :data:`MKL` and by :data:`ONEDNN`.
    """
    found = SELECTOR.known_fastest("cpu", what)
    if found is None:
        if not SELECTOR.pays(what, is_training, candidates=2):
            return False
        found = SELECTOR.select("cpu", what, (MKL, ONEDNN), prepare, LARGEST_ERROR[torch.float32])
    return found == ONEDNN


def linear_by_onednn(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """Return x (..., I) times the transpose of weight (O, I), plus bias (O): (..., O); fp32 on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(x, _whole(weight), bias, "none", [], "")


def _whole(matrix: Tensor) -> Tensor:
    """Return the matrix, or a copy without gaps: oneDNN takes a thousand times as long for part of a larger one."""
    if matrix.stride(0) == 1:
        return matrix.t().contiguous().t()
    return matrix.contiguous()


def multiply(a: Tensor, b: Tensor, out: Optional[Tensor] = None, adds: bool = False) -> Tensor:
    """Multiply pairs of matrices.

    Args:
        a: (X, L, M).
        b: (X, M, R).
        out: (X, L, R), for the result.
        adds: to what stands in `out`.
    """
    if out is None:
        out = a.new_empty(a.size(0), a.size(1), b.size(2))
    if _may_choose(a, b):
        turned = " turned" * (a.stride(2) != 1)
        what = f"products of {a.size(1)} x {a.size(2)}{turned} and {b.size(1)} x {b.size(2)}"

        def timed(name: str) -> partial[list[Tensor]]:
            result = torch.empty(out.shape)
            return partial(_BATCHED[name], a.detach(), b.detach(), result, False)

        if onednn_wins(what, False, timed):
            return _multiply_by_onednn(a, b, out, adds)[0]
    return _multiply_by_mkl(a, b, out, adds)[0]


def _may_choose(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN may multiply these; a size that is no multiple is one of heads, the same in all batches."""
    sizes = a.size(1), a.size(2), b.size(2)
    return (
        a.device.type == "cpu"
        and a.dtype == b.dtype == torch.float32
        and sizes[0] * sizes[1] * sizes[2] >= WORTH_IT
        and sum(size % ROWS == 0 for size in sizes) >= 2
        and has_onednn()
    )


def _multiply_by_mkl(a: Tensor, b: Tensor, out: Tensor, adds: bool) -> list[Tensor]:
    return [torch.baddbmm(out, a, b, out=out) if adds else torch.bmm(a, b, out=out)]


def _multiply_by_onednn(a: Tensor, b: Tensor, out: Tensor, adds: bool) -> list[Tensor]:
    """Multiply one pair after the other."""
    for first, second, result in zip(a, b, out, strict=True):
        columns = second.t().contiguous()
        # It would copy a first factor that is turned: better the product of the other two, turned.
        is_turned = first.stride(1) != 1
        if is_turned:
            product = linear_by_onednn(columns, first).t()
        else:
            product = linear_by_onednn(first, columns)
        result.add_(product) if adds else result.copy_(product)
    return [out]


_BATCHED = {MKL: _multiply_by_mkl, ONEDNN: _multiply_by_onednn}
