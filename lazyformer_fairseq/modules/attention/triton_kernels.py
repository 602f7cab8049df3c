"""Back end ``fused`` on a GPU: attention of a lazy block in Triton, which writes nothing n x n to memory.

The four functions of an :class:`~lazyformer_fairseq.modules.attention.lazy_block.Implementation`; what an ``s`` saves
is the log-sum-exp of each row of scores, (B, N, T) in float32, natural logarithm. In units of one n x n x D product per
head, a forward pass takes 2, the gradient of an ``l`` 2, and that of an ``s`` with m - 1 consumers m + 4. Any T and
D <= 128, fp16, bf16 and fp32; q, k, values and gradients may be views of any strides.

A GPU tries the tiles once for each kind of input and keeps the fastest. Lists are short and hold what fits:
``tests/modules/attention/triton_in_compiler.py`` has the compiler say how many registers and how much shared
memory each takes. A GPU passes over tiles too large for it; the first of each list fits an A100.
"""

import functools
import math
import os
from typing import Any, NamedTuple, Optional, Union

import torch
import triton
from torch import Tensor

from lazyformer_fairseq.modules.attention import triton_passes
from lazyformer_fairseq.modules.attention.lazy_block import empty_heads, learned_gradients
from lazyformer_fairseq.modules.attention.scores import Scores


class Tiles(NamedTuple):
    """Queries and keys of a tile, the warps that share it, and how many tiles load from memory at once."""

    queries: int
    keys: int
    warps: int
    stages: int

    @property
    def config(self) -> triton.Config:
        """Return the same as Triton's config."""
        sizes = {"BLOCK_Q": self.queries, "BLOCK_K": self.keys}
        return triton.Config(sizes, num_warps=self.warps, num_stages=self.stages)


FEWEST_KEYS = 32  # of all tiles here
MOST_LAYERS = 6  # whose values fit side by side
_ANYWHERE = (Tiles(32, 32, 8, 1),)  # in the interpreter, in single precision
# {kernel: {largest D, as a power of two: {largest m: tiles}}}
_TILES = {
    "attend": {
        64: {1: (Tiles(128, 64, 8, 3), Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3))},
        128: {1: (Tiles(128, 64, 8, 2), Tiles(128, 128, 8, 2), Tiles(64, 64, 8, 2))},
    },
    "reuse": {
        64: {1: (Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2))},
        128: {1: (Tiles(128, 64, 8, 3), Tiles(128, 128, 8, 2), Tiles(64, 64, 4, 3))},
    },
    "value_gradient": {
        64: {1: (Tiles(64, 128, 8, 3), Tiles(64, 128, 4, 3), Tiles(64, 64, 4, 3), Tiles(32, 128, 4, 3))},
        128: {1: (Tiles(64, 128, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 3))},
    },
    "key_side": {
        64: {
            1: (Tiles(64, 64, 8, 2), Tiles(64, 64, 4, 3), Tiles(64, 128, 8, 3), Tiles(32, 64, 4, 3)),
            3: (Tiles(64, 64, 8, 2), Tiles(64, 128, 8, 3), Tiles(64, 64, 4, 3), Tiles(32, 64, 4, 2)),
            6: (Tiles(32, 64, 8, 2), Tiles(32, 128, 8, 3), Tiles(64, 64, 8, 2)),
        },
        128: {2: (Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 2)), 6: (Tiles(32, 32, 4, 2),)},
    },
}


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
        """Return the bias for these queries."""
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
            triton_passes.write_rows[grid](
                rows, table_KN, *table_KN.stride(), bucket_by_distance, time, reach, BLOCK=256
            )
        return cls(rows, reach, bucket_by_distance[time - 1 - reach : time + reach])

    def band_like(self, q: Tensor) -> Optional[Tensor]:
        """Return zeros (B, N, T, 2 reach + 1) for gradients of scores by query and distance; None without a bias."""
        return None if self.rows is None else q.new_zeros(*q.shape[:3], 2 * self.reach + 1)

    def table_gradient(self, band: Tensor, far_sums: Tensor, table_KN: Tensor) -> Tensor:
        """Return d table (K, N), summed in the same order every time.

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


def tiles_for(kernel: str, q: Tensor, layers: int = 1) -> tuple[Tiles, ...]:
    """Return tiles to choose from, most promising first.

    Args:
        kernel: a key of the table above.
        q: queries (B, N, T, D), for D and the precision.
        layers: m, of a kernel that goes over all values of a block.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" or q.element_size() > 2:
        return _ANYWHERE
    by_layers = _TILES[kernel][64 if q.size(-1) <= 64 else 128]
    return next(tiles for most, tiles in by_layers.items() if layers <= most)


def launch(
    kernel: triton.JITFunction,
    kept: str,
    q: Tensor,
    strided: dict[str, Union[Tensor, tuple[Tensor, ...]]],
    tiles: tuple[Tiles, ...],
    set_to_zero: tuple[str, ...] = (),
    **others: Any,
) -> None:
    """Run a kernel, one program for each tile of each head.

    Args:
        kernel: which.
        kept: the tile that a program keeps while it walks over the others: BLOCK_Q or BLOCK_K.
        q: its queries (B, N, T, D), for the sizes.
        strided: arguments that come with an argument NAME_strides: (B, N, T, D), or several of them.
        tiles: to choose from.
        set_to_zero: arguments that programs add to; every trial of tiles starts with zeros in them.
        others: the kernel's other arguments.
    """
    batch, heads, time, size = q.shape
    with torch.cuda.device_of(q):  # Triton launches on the current device
        _tuned(kernel, tiles, set_to_zero)[lambda sizes: (triton.cdiv(time, sizes[kept]) * batch * heads,)](
            **strided,
            **{f"{name}_strides": _strides(tensor) for name, tensor in strided.items()},
            **others,
            scale=1 / math.sqrt(size),
            time=time,
            heads=heads,
            time_class=time.bit_length(),
            HEAD=size,
            BLOCK_D=max(16, triton.next_power_of_2(size)),
        )


@functools.cache
def _tuned(kernel: triton.JITFunction, tiles: tuple[Tiles, ...], set_to_zero: tuple[str, ...]) -> Any:
    """Return the kernel; its first call tries the tiles for each class of T (by powers of two), m, D and dtype."""
    configs = [choice.config for choice in tiles]
    key = [name for name in ("time_class", "M", "HEAD") if name in kernel.arg_names]
    return triton.autotune(configs, key=key, reset_to_zero=set_to_zero)(kernel)


def _strides(tensors: Union[Tensor, tuple[Tensor, ...]]) -> tuple:
    """Return the strides of B, N and T."""
    if isinstance(tensors, tuple):
        return tuple(map(_strides, tensors))
    return tensors.stride()[:3]


def attend_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return P V and the log-sum-exp of an ``s``: (B, N, T, D) and (B, N, T)."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return _forward(q, k, v, lse, scores, reuses=False), lse


def reuse_forward(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scores: Scores) -> Tensor:
    """Return P V (B, N, T, D) of an ``l``: exp(scores - lse) V, without a running maximum or rescaling."""
    return _forward(q, k, v, lse, scores, reuses=True)


def value_gradient(q: Tensor, k: Tensor, d_output: Tensor, lse: Tensor, scores: Scores) -> Tensor:
    """Return dV = P^T dO (B, N, T, D) of an ``l``."""
    dv = empty_heads(k)
    launch(
        triton_passes.value_gradient_kernel,
        "BLOCK_K",
        q,
        strided={"q": _rows(q), "k": _rows(k), "d_output": _rows(d_output), "dv": dv},
        tiles=tiles_for("value_gradient", q),
        **_read_by_all(lse, scores, NearBias.of(scores, q)),
    )
    return dv


def row_sums(d_output: Tensor, output: Tensor) -> Tensor:
    """Return rowsum(dO * O), (B, N, T) in float32."""
    batch, heads, time, size = output.shape
    sums = output.new_empty(output.shape[:3], dtype=torch.float32)
    rows = 64
    grid = (triton.cdiv(time, rows) * batch * heads,)
    given = [_rows(d_output), _rows(output)]
    with torch.cuda.device_of(output):
        triton_passes.row_sums_kernel[grid](
            *given, sums, *map(_strides, given), time, heads, size, max(16, triton.next_power_of_2(size)), rows
        )
    return sums


def block_gradient(
    q: Tensor, k: Tensor, values: list[Tensor], d_outputs: list[Tensor], delta: Tensor, lse: Tensor, scores: Scores
) -> list[Tensor]:
    """Return dQ, dK, dV of the first values, and those of ``scores.learned``: one pass for a whole block.

    Programs add to dQ in float32, in any order. All other sums always run in the same order.
    """
    if len(values) > MOST_LAYERS:  # all gradients are linear in (dO_i, delta)
        first, rest = slice(MOST_LAYERS), slice(MOST_LAYERS, None)
        d_q, d_k, d_v, d_table, *others = block_gradient(q, k, values[first], d_outputs[first], delta, lse, scores)
        more = block_gradient(q, k, values[rest], d_outputs[rest], torch.zeros_like(delta), lse, scores)
        return [d_q + more[0], d_k + more[1], d_v, d_table + more[3], *others]
    batch, heads, time, _ = q.shape
    bias = NearBias.of(scores, q)
    band = bias.band_like(q)
    slots = math.ceil(time / FEWEST_KEYS)
    far_sums = None if band is None else q.new_zeros(batch, heads, slots, 2, dtype=torch.float32)
    dq = empty_heads(q.new_empty(()).float().expand(q.shape)).zero_()
    dk, dv = empty_heads(q), empty_heads(q)
    of_layers = {"values": tuple(map(_rows, values)), "d_outputs": tuple(map(_rows, d_outputs))}
    launch(
        triton_passes.key_side_kernel,
        "BLOCK_K",
        q,
        strided={"q": _rows(q), "k": _rows(k), **of_layers, "dq": dq, "dk": dk, "dv": dv},
        tiles=tiles_for("key_side", q, len(values)),
        set_to_zero=("dq",) if band is None else ("dq", "far_sums"),
        band=band,
        far_sums=far_sums,
        far_slots=slots,
        **_read_by_all(lse, scores, bias),
        delta=delta.contiguous(),
        M=len(values),
    )
    learned = {} if band is None else {"table_KN": bias.table_gradient(band, far_sums, scores.table_KN)}
    return [dq.to(q.dtype), dk, dv, *learned_gradients(learned, q)]


def _forward(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scores: Scores, reuses: bool) -> Tensor:
    output = empty_heads(q)
    launch(
        triton_passes.forward_kernel,
        "BLOCK_Q",
        q,
        strided={"q": _rows(q), "k": _rows(k), "v": _rows(v), "o": output},
        tiles=tiles_for("reuse" if reuses else "attend", q),
        **_read_by_all(lse, scores, NearBias.of(scores, q)),
        REUSES=reuses,
    )
    return output


def _read_by_all(lse: Tensor, scores: Scores, bias: NearBias) -> dict[str, Any]:
    return {"lse": lse, "lengths": scores.lengths_B, "bias": bias.rows, "reach": bias.reach}


def _rows(x: Tensor) -> Tensor:
    """Return the same, with the entries of a head side by side in memory, as in views of projections already."""
    return x if x.stride(-1) == 1 else x.contiguous()
