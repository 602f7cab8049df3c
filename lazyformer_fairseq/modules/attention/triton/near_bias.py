"""The learned bias as the Triton kernels read it, and how they return its gradient."""

from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.attention.triton.shared import LOG2_E


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
