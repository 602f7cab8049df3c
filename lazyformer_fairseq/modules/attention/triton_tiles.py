"""What the Triton kernels read besides queries, keys and values: tiles to visit, a bias.

A program keeps one tile of queries (or keys) and walks over tiles of keys (or queries). Distances are key - query.
All tiles that lie wholly `reach` or more away from the kept one share one bias and need no mask: they are *far*, and
the loop over them is a plain attention loop. The others are *near*: they look the bias up, element by element, in a row
of 2 reach + 1 entries (:class:`NearBias`), and mask padding.
"""

from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazyformer_fairseq.modules.attention.scores import Scores

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Triton must not specialize on whether these arguments are 1 or multiples of 16: it would compile each case anew.
NOT_SPECIALIZED = ["reach", "time_class"]


@triton.jit
def own_tile(time, heads, KEPT: tl.constexpr):
    """(first row of this program's tile, its KEPT rows, row of the batch, head); a head's are neighbours."""
    tiles = (time + KEPT - 1) // KEPT
    program = tl.program_id(0)
    head_of_batch = program // tiles
    first = program % tiles * KEPT
    return first, first + tl.arange(0, KEPT), head_of_batch // heads, head_of_batch % heads


@triton.jit
def head_of(tensor, strides, b, n):
    """Where the (T, D) of one head starts in a (B, N, T, D); `strides` are of B, N and T."""
    return tensor + tl.cast(b, tl.int64) * strides[0] + tl.cast(n, tl.int64) * strides[1]


@triton.jit
def rows_of(head, start, stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers (ROWS, BLOCK_D) to the rows from `start` on."""
    first = head + start * tl.cast(stride, tl.int64)
    return first + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def inside(start, limit, HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """(ROWS, BLOCK_D): True at rows below `limit` and at the HEAD entries that a head has."""
    return ((start + tl.arange(0, ROWS))[:, None] < limit) & (tl.arange(0, BLOCK_D)[None, :] < HEAD)


@triton.jit
def store_rows(
    tensor, strides, b, n, start, values, limit, HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Writes a head's rows from `start` on, those below `limit`; in the tensor's precision."""
    pointers = rows_of(head_of(tensor, strides, b, n), start, strides[2], ROWS, BLOCK_D)
    tl.store(pointers, values.to(tensor.dtype.element_ty), mask=inside(start, limit, HEAD, ROWS, BLOCK_D))


@triton.jit
def load_rows(
    head,
    start,
    stride,
    limit,
    HEAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The rows from `start` on, (ROWS, BLOCK_D), zeros outside; WHOLE promises that all rows are below `limit`."""
    pointers = rows_of(head, start, stride, ROWS, BLOCK_D)
    if WHOLE and HEAD == BLOCK_D:
        loaded = tl.load(pointers)
    else:
        loaded = tl.load(pointers, mask=inside(start, limit, HEAD, ROWS, BLOCK_D), other=0.0)
    return loaded


@triton.jit
def far_tiles(kept, full, bias, reach, KEPT: tl.constexpr, MOVING: tl.constexpr):
    """(low, high): of the `full` whole tiles of MOVING rows, those before `low` and from `high` on are far.

    `kept` is the first of the KEPT rows that stay; without a bias every whole tile is far.
    """
    if bias is None:
        low = full
        high = full
    else:
        low = tl.minimum(tl.maximum(kept - reach + 1, 0) // MOVING, full)
        high = tl.minimum((kept + KEPT - 1 + reach + MOVING - 1) // MOVING, full)
    return low, high


@triton.jit
def count_tiles(low, high, full, total, NEAR: tl.constexpr):
    """How many of all `total` tiles are near (the last one, where it is not whole, is), or how many are far."""
    return high - low + total - full if NEAR else low + full - high


@triton.jit
def nth_tile(j, low, high, full, NEAR: tl.constexpr):
    """The index of the j-th of them."""
    return low + j + tl.where(j < high - low, 0, full - high) if NEAR else j + tl.where(j < low, 0, high - low)


@triton.jit
def near_scores(products, distance, is_key, scale, bias, reach):
    """Scores of a near tile, in powers of two, -inf where there is no key; `bias` points at distance 0."""
    scores = products * (scale * LOG2_E)
    if bias is not None:
        # One look-up each: the compiler would preload predictable addresses into registers it lacks.
        scores += tl.load(bias + tl.minimum(tl.maximum(distance, -reach), reach))
    return tl.where(is_key, scores, float("-inf"))


@triton.jit
def bias_of(bias, n, reach):
    """(distance 0 in the head's row of a NearBias, what all from -reach down share, what all from reach up share)."""
    below = 0.0
    above = 0.0
    if bias is not None:
        bias += n * (2 * reach + 1) + reach
        below = tl.load(bias - reach)
        above = tl.load(bias + reach)
    return bias, below, above


@triton.jit
def length_of(lengths, b, time):
    """How many keys of a row of the batch are not padding."""
    return time if lengths is None else tl.load(lengths + b).to(tl.int32)


class NearBias(NamedTuple):
    """Bias by distance up to `reach`; from there on, on either side, all distances share a bucket.

    Attributes:
        rows: (N, 2 reach + 1), in powers of two: entry reach + (key - query). None without a bias. In float16 where q
            is in half precision: Triton would send wider numbers through shared memory, a tile at a time.
        reach: `far`, or less where sequences are shorter.
        buckets: (2 reach + 1,), those of the distances from -reach to reach.
    """

    rows: Optional[Tensor]
    reach: int
    buckets: Optional[Tensor]

    @classmethod
    def of(cls, scores: Scores, q_BNTD: Tensor) -> "NearBias":
        """For these queries."""
        table_KN, bucket_by_distance = scores.table_KN, scores.bucket_by_distance
        if table_KN is None or bucket_by_distance is None:
            return cls(None, 0, None)
        heads, time = q_BNTD.shape[1:3]
        reach = min(scores.far, time - 1)
        width = 2 * reach + 1
        dtype = torch.float32 if q_BNTD.dtype == torch.float32 else torch.float16
        rows = table_KN.new_empty(heads, width, dtype=dtype)
        grid = (triton.cdiv(width, 256), heads)
        with torch.cuda.device_of(q_BNTD):
            _write_rows[grid](rows, table_KN, *table_KN.stride(), bucket_by_distance, time, reach, BLOCK=256)
        return cls(rows, reach, bucket_by_distance[time - 1 - reach : time + reach])

    def band_like(self, q: Tensor) -> Optional[Tensor]:
        """Zeros (B, N, T, 2 reach + 1) for gradients of scores by query and distance; None without a bias."""
        return None if self.rows is None else q.new_zeros(*q.shape[:3], 2 * self.reach + 1)

    def table_gradient(self, band: Tensor, far_sums: Tensor, table_KN: Tensor) -> Tensor:
        """d table (K, N), summed in the same order every time.

        Args:
            band: gradients of the scores at distances nearer than `reach`, (B, N, T, 2 reach + 1).
            far_sums: (B, N, any number, 2): partial sums at distances <= -reach, and >= reach.
            table_KN: the table.
        """
        by_distance = band.sum((0, 2), dtype=torch.float32).double()
        below, above = far_sums.double().sum((0, 2)).unbind(-1)
        by_distance[:, 0] += below
        by_distance[:, -1] += above
        # Not index_add_: on a GPU it adds in any order.
        in_bucket = self.buckets == torch.arange(table_KN.size(0), device=table_KN.device)[:, None, None]
        return by_distance.where(in_bucket, 0).sum(-1).to(table_KN.dtype)


@triton.jit(do_not_specialize=["time", "reach"])
def _write_rows(rows, table, bucket_stride, head_stride, bucket_by_distance, time, reach, BLOCK: tl.constexpr):
    """`rows` of a NearBias: one program for BLOCK distances of a head."""
    n = tl.program_id(1)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = entry <= 2 * reach
    bucket = tl.load(bucket_by_distance + time - 1 - reach + entry, mask=exists, other=0)
    bias = tl.load(table + bucket * bucket_stride + n * head_stride).to(tl.float32) * LOG2_E
    tl.store(rows + n * (2 * reach + 1) + entry, bias.to(rows.dtype.element_ty), mask=exists)
