"""The back end ``fused`` on a GPU: lazy-block attention in Triton, which writes no T x T matrix to memory.

An ``s`` saves the log-sum-exp (natural logarithm) of each row of scores, (B, N, T) in float32. In units of one T x T x
D matmul per head, a forward pass costs 2, the gradient of an ``l`` costs 2, and the gradient of an ``s`` with m - 1
consumers costs m + 4. The kernels support any T, D <= 128, fp16, bf16 and fp32. q, k, values and gradients may be views
with arbitrary strides.

Autotuning tries the tile sizes in a kernel's list once for each class of inputs and keeps the fastest one. The lists
are short and contain only tiles that fit: ``tests/modules/attention/triton_in_compiler.py`` queries the compiler for
the registers and shared memory that each of them needs. Tiles that are too large for a GPU are skipped. The first tile
of each list fits an A100.

Two things are left to others where they are faster. Without a bias or padding, cuDNN computes the forward pass of an
``s``. On a Hopper GPU, autotuning also tries tiles that the GPU's own copy engine moves, through tensor descriptors.
"""

import functools
import math
import os
from typing import Any, NamedTuple, Optional, Union

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override

from lazyformer_fairseq.modules.attention import triton_passes
from lazyformer_fairseq.modules.attention.lazy_block import Implementation, empty_heads, learned_gradients
from lazyformer_fairseq.modules.attention.scores import Scores


class Tiles(NamedTuple):
    """The tile size and launch parameters of a kernel.

    Attributes:
        queries: The number of queries per tile.
        keys: The number of keys per tile.
        warps: The number of warps per tile.
        stages: The number of pipeline stages, that is, of tiles loaded at the same time.
        descriptors: Whether tensor descriptors load the tiles in the kernel's loop and add to them; see
            :func:`supports_descriptors`.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    descriptors: bool = False

    @property
    def config(self) -> triton.Config:
        """The corresponding Triton config."""
        sizes = {"BLOCK_Q": self.queries, "BLOCK_K": self.keys, "DESCRIPTORS": self.descriptors}
        return triton.Config(sizes, num_warps=self.warps, num_stages=self.stages)


FEWEST_KEYS = 32  # the smallest number of keys per tile in this file
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention  # only this returns the log-sum-exp
HOPPER = 90  # Triton's number for compute capability 9.0
MOST_LAYERS = 6  # the maximum number of layers whose values fit into a tile
_FALLBACK_TILES = (Tiles(32, 32, 8, 1),)  # for the interpreter and float32
# The tiles by kernel, maximum D (a power of two) and maximum m.
_TILES: dict[str, dict[int, dict[int, tuple[Tiles, ...]]]] = {
    "attend": {
        64: {
            1: (
                Tiles(128, 64, 8, 3),
                Tiles(128, 64, 4, 3),
                Tiles(64, 64, 4, 3),
                Tiles(128, 64, 8, 3, descriptors=True),
                Tiles(128, 64, 4, 3, descriptors=True),
                Tiles(128, 128, 8, 2, descriptors=True),
            ),
        },
        128: {
            1: (
                Tiles(128, 64, 8, 2),
                Tiles(128, 128, 8, 2),
                Tiles(64, 64, 8, 2),
                Tiles(128, 64, 8, 3, descriptors=True),
                Tiles(128, 128, 8, 2, descriptors=True),
            ),
        },
    },
    "reuse": {
        64: {
            1: (
                Tiles(128, 64, 4, 3),
                Tiles(64, 64, 4, 3),
                Tiles(64, 64, 4, 2),
                Tiles(128, 64, 8, 3, descriptors=True),
                Tiles(128, 64, 4, 3, descriptors=True),
                Tiles(128, 128, 8, 2, descriptors=True),
            ),
        },
        128: {
            1: (
                Tiles(128, 64, 8, 3),
                Tiles(128, 128, 8, 2),
                Tiles(64, 64, 4, 3),
                Tiles(128, 64, 8, 3, descriptors=True),
                Tiles(128, 128, 8, 2, descriptors=True),
            ),
        },
    },
    "value_gradient": {
        64: {
            1: (
                Tiles(64, 128, 8, 3),
                Tiles(64, 128, 4, 3),
                Tiles(64, 64, 4, 3),
                Tiles(32, 128, 4, 3),
                Tiles(64, 128, 8, 3, descriptors=True),
                Tiles(128, 128, 8, 2, descriptors=True),
            ),
        },
        128: {
            1: (
                Tiles(64, 128, 8, 3),
                Tiles(128, 64, 8, 2),
                Tiles(64, 64, 4, 3),
                Tiles(64, 128, 8, 3, descriptors=True),
                Tiles(128, 128, 8, 2, descriptors=True),
            ),
        },
    },
    "key_side": {
        64: {
            1: (
                Tiles(64, 64, 8, 2),
                Tiles(64, 64, 4, 3),
                Tiles(64, 128, 8, 3),
                Tiles(32, 64, 4, 3),
                Tiles(64, 64, 8, 2, descriptors=True),
                Tiles(64, 128, 8, 3, descriptors=True),
                Tiles(128, 128, 8, 2, descriptors=True),
            ),
            3: (
                Tiles(64, 64, 8, 2),
                Tiles(64, 128, 8, 3),
                Tiles(64, 64, 4, 3),
                Tiles(32, 64, 4, 2),
                Tiles(64, 64, 8, 2, descriptors=True),
                Tiles(64, 128, 8, 2, descriptors=True),
                Tiles(128, 128, 8, 2, descriptors=True),
            ),
            6: (
                Tiles(32, 64, 8, 2),
                Tiles(32, 128, 8, 3),
                Tiles(64, 64, 8, 2),
                Tiles(64, 64, 8, 2, descriptors=True),
            ),
        },
        128: {
            2: (
                Tiles(32, 64, 8, 2),
                Tiles(64, 64, 8, 2),
                Tiles(64, 64, 8, 2, descriptors=True),
            ),
            6: (Tiles(32, 32, 4, 2),),
        },
    },
}


class NearBias(NamedTuple):
    """The bias for distances up to `reach`, at and beyond which all distances on the same side share one bucket.

    Attributes:
        rows: The bias (N, 2 reach + 1), multiplied by log2(e); the distance key - query is at index reach + (key -
            query). The rows are in float16 if q is in half precision, because Triton would pass wider numbers through
            shared memory, one tile at a time. None without a bias.
        reach: The scores' `far`, or less for shorter sequences.
        buckets: The buckets of the distances from -reach to reach, (2 reach + 1,).
    """

    rows: Optional[Tensor]
    reach: int
    buckets: Optional[Tensor]

    @classmethod
    def of(cls, scores: Scores, q_BNTD: Tensor) -> "NearBias":
        """Compute the bias for these queries."""
        table_KN = scores.table_KN
        bucket_by_distance = scores.bucket_by_distance
        if table_KN is None or bucket_by_distance is None:
            return cls(None, 0, None)
        _, heads, time, _ = q_BNTD.shape
        reach = min(scores.far, time - 1)
        width = 2 * reach + 1
        dtype = torch.float16
        if q_BNTD.dtype == torch.float32:
            dtype = torch.float32
        rows = table_KN.new_empty(heads, width, dtype=dtype)
        block = 256
        grid = (triton.cdiv(width, block), heads)
        with torch.cuda.device_of(q_BNTD):
            triton_passes.write_rows[grid](
                rows,
                table_KN,
                *table_KN.stride(),
                bucket_by_distance,
                time,
                reach,
                BLOCK=block,
            )
        first = time - 1 - reach
        return cls(rows, reach, bucket_by_distance[first : first + width])


class BiasGradient:
    """Buffers for dS, the gradient of the scores, from which the gradient of a bias is computed.

    Args:
        bias: The bias.
        q: The queries (B, N, T, D).

    Attributes:
        band: dS at distances less than `reach`, (B, N, T, 2 reach + 1), initially zero.
        far_sums: Partial sums of dS at distances <= -reach and at distances >= reach, (B, N, number of sums, 2),
            initially zero.
    """

    def __init__(self, bias: NearBias, q: Tensor):
        batch, heads, time, _ = q.shape
        self.bias = bias
        self.band = q.new_zeros(batch, heads, time, 2 * bias.reach + 1)
        self.far_sums = q.new_zeros(batch, heads, far_slots(time), 2, dtype=torch.float32)

    def of_table(self, table_KN: Tensor) -> Tensor:
        """Compute the gradient of the bias table (K, N), summing in a deterministic order."""
        by_distance = self.band.sum((0, 2), dtype=torch.float32).double()
        below, above = self.far_sums.double().sum((0, 2)).unbind(-1)
        by_distance[:, 0] += below
        by_distance[:, -1] += above
        # index_add_ is nondeterministic on a GPU.
        assert self.bias.buckets is not None, "there is a bias"
        buckets_K = torch.arange(table_KN.size(0), device=table_KN.device)
        is_in_bucket = torch.eq(self.bias.buckets, buckets_K[:, None, None])
        return by_distance.where(is_in_bucket, 0).sum(-1).to(table_KN.dtype)


def far_slots(time: int) -> int:
    """Return the maximum number of key tiles, each of which writes its partial sums over far distances."""
    return math.ceil(time / FEWEST_KEYS)


def tiles_for(kernel: str, q: Tensor, layers: int = 1) -> tuple[Tiles, ...]:
    """Return the candidate tiles, starting with the most promising.

    Args:
        kernel: A key of the table of tiles.
        q: The queries (B, N, T, D), which determine D and the precision.
        layers: m, for a kernel that uses the values of all layers of a block.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" or q.element_size() > 2:
        return _FALLBACK_TILES
    if q.size(-1) <= 64:
        by_layers = _TILES[kernel][64]
    else:
        by_layers = _TILES[kernel][128]
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
    """Launch a kernel with one program per tile and head.

    Args:
        kernel: The kernel.
        kept: BLOCK_Q or BLOCK_K, the size of the tile that a program keeps while it loops over the tiles of the other
            dimension.
        q: The queries (B, N, T, D), which determine the sizes.
        strided: Tensors (B, N, T, D), or tuples of such tensors, each of which is passed with an additional argument
            NAME_strides.
        tiles: The candidate tiles.
        set_to_zero: The names of the tensors to which programs add. These tensors are zeroed before each autotuning
            trial.
        others: The kernel's other arguments.
    """
    batch, heads, time, size = q.shape
    strides = {f"{name}_strides": _strides(tensor) for name, tensor in strided.items()}

    def grid(sizes: dict[str, int]) -> tuple[int]:
        tiles_of_head = triton.cdiv(time, sizes[kept])
        return (tiles_of_head * batch * heads,)

    with torch.cuda.device_of(q):  # Triton launches on the current device
        if any(choice.descriptors for choice in tiles):
            if supports_descriptors(strided):
                triton.set_allocator(_scratch_memory)  # of this thread; descriptors are written to this memory
            else:
                tiles = tuple(choice for choice in tiles if not choice.descriptors)
        _tuned(kernel, tiles, set_to_zero)[grid](
            **strided,
            **strides,
            **others,
            scale=1 / math.sqrt(size),
            time=time,
            heads=heads,
            time_class=time.bit_length(),
            HEAD=size,
            BLOCK_D=block_of_head(size),
        )


def supports_descriptors(strided: dict[str, Union[Tensor, tuple[Tensor, ...]]]) -> bool:
    """Return whether the GPU, Triton and the layout of the tensors support tensor descriptors.

    With a descriptor, a GPU of compute capability 9.0 or above (Hopper) copies a tile, or adds it to a tensor,
    asynchronously and without the registers that hold a tile's addresses. Heads and rows must start at multiples of 16
    bytes. Descriptors exist since Triton 3.4.
    """
    if not hasattr(tl, "make_tensor_descriptor"):
        return False
    if triton.runtime.driver.active.get_current_target().arch < HOPPER:
        return False
    for tensors in strided.values():
        for tensor in tensors if isinstance(tensors, tuple) else (tensors,):
            starts = [tensor.storage_offset(), *_strides(tensor)]
            if any(start * tensor.element_size() % 16 for start in starts):
                return False
    return True


def _scratch_memory(size: int, _alignment: int, _stream: Optional[int]) -> Tensor:
    """Allocate memory on the current device for a kernel's descriptors; torch aligns it to 512 bytes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def block_of_head(size: int) -> int:
    """Return the number of elements per tile row for heads of size D."""
    return max(16, triton.next_power_of_2(size))


@functools.cache
def _tuned(kernel: triton.JITFunction, tiles: tuple[Tiles, ...], set_to_zero: tuple[str, ...]) -> Any:
    """Return the autotuned kernel, which tries the tiles on the first call for each class of T, m, D and dtype.

    The classes of T are separated by powers of two.
    """
    configs = [choice.config for choice in tiles]
    key = [name for name in ("time_class", "M", "HEAD") if name in kernel.arg_names]
    return triton.autotune(configs, key=key, reset_to_zero=set_to_zero)(kernel)


def _strides(tensors: Union[Tensor, tuple[Tensor, ...]]) -> tuple:
    """Return the strides of B, N and T for a tensor, or for each tensor in a tuple."""
    if isinstance(tensors, tuple):
        return tuple(map(_strides, tensors))
    return tensors.stride()[:3]


@torch.library.custom_op("lazyformer::triton_row_sums", mutates_args=())
def row_sums(d_output: Tensor, output: Tensor) -> Tensor:
    """Compute rowsum(dO * O), (B, N, T) in float32."""
    batch, heads, time, size = output.shape
    sums = one_per_row(output)
    rows_of_tile = 64
    grid = (triton.cdiv(time, rows_of_tile) * batch * heads,)
    d_rows = contiguous_rows(d_output)
    rows = contiguous_rows(output)
    with torch.cuda.device_of(output):
        triton_passes.row_sums_kernel[grid](
            d_rows,
            rows,
            sums,
            _strides(d_rows),
            _strides(rows),
            time,
            heads,
            HEAD=size,
            BLOCK_D=block_of_head(size),
            BLOCK_Q=rows_of_tile,
        )
    return sums


@row_sums.register_fake
def _(_d_output: Tensor, output: Tensor) -> Tensor:
    return one_per_row(output)


def one_per_row(x: Tensor) -> Tensor:
    """Return an uninitialized float32 tensor (B, N, T) for x (B, N, T, D)."""
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


def _forward(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scores: Scores, reuses: bool) -> Tensor:
    output = empty_heads(q)
    if reuses:
        tiles = tiles_for("reuse", q)
    else:
        tiles = tiles_for("attend", q)
    launch(
        triton_passes.forward_kernel,
        "BLOCK_Q",
        q,
        strided={
            "q": contiguous_rows(q),
            "k": contiguous_rows(k),
            "v": contiguous_rows(v),
            "o": output,
        },
        tiles=tiles,
        **_read_by_all(lse, scores, NearBias.of(scores, q)),
        REUSES=reuses,
    )
    return output


def _has_cudnn(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> bool:
    """Return whether cuDNN computes a forward pass faster than our kernel.

    On an H200 without a bias, cuDNN reached 454 to 482 TFLOP/s, and our kernel 409 to 440 (docs/measurements.md). With
    padding, cuDNN would need a dense mask.
    """
    if scores.table_KN is not None or scores.lengths_B is not None:
        return False
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) < (9, 0):
        return False
    inputs = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, False)
    return torch.backends.cuda.can_use_cudnn_attention(inputs)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute P V (B, N, T, D), laid out as by :func:`empty_heads`, and the log-sum-exp (B, N, T)."""
    output, lse, *_ = cudnn_attention(q, k, v, None, compute_log_sumexp=True)
    # torch returns the log-sum-exp as (B, N, T, 1).
    return output.transpose(1, 2).contiguous().transpose(1, 2), lse.reshape(q.shape[:-1]).contiguous()


def _read_by_all(lse: Tensor, scores: Scores, bias: NearBias) -> dict[str, Any]:
    return {
        "lse": lse,
        "lengths": scores.lengths_B,
        "bias": bias.rows,
        "reach": bias.reach,
    }


def contiguous_rows(x: Tensor) -> Tensor:
    """Return the tensor with contiguous rows. Views of projections already have contiguous rows and are not copied."""
    if x.stride(-1) == 1:
        return x
    return x.contiguous()


class InTriton(Implementation):
    """The Triton implementation of lazy blocks. `saved` is the log-sum-exp of each row of scores."""

    @override
    def saved_like(self, q: Tensor, k: Tensor, scores: Scores) -> Tensor:
        return one_per_row(q)

    @override
    def attend_forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Compute P V (B, N, T, D) and the log-sum-exp (B, N, T) of an ``s``."""
        if _has_cudnn(q, k, v, scores):
            return _cudnn_forward(q, k, v)
        lse = one_per_row(q)
        return _forward(q, k, v, lse, scores, reuses=False), lse

    @override
    def reuse_forward(self, q: Tensor, k: Tensor, v: Tensor, saved: Tensor, scores: Scores) -> Tensor:
        """Compute an ``l`` as exp(scores - log-sum-exp) V (B, N, T, D), which needs no running maximum."""
        return _forward(q, k, v, saved, scores, reuses=True)

    @override
    def value_gradient(self, q: Tensor, k: Tensor, d_output: Tensor, saved: Tensor, scores: Scores) -> Tensor:
        """Compute dV = P^T dO (B, N, T, D) of an ``l``."""
        dv = empty_heads(k)
        launch(
            triton_passes.value_gradient_kernel,
            "BLOCK_K",
            q,
            strided={
                "q": contiguous_rows(q),
                "k": contiguous_rows(k),
                "d_output": contiguous_rows(d_output),
                "dv": dv,
            },
            tiles=tiles_for("value_gradient", q),
            **_read_by_all(saved, scores, NearBias.of(scores, q)),
        )
        return dv

    @override
    def row_sums(self, d_output: Tensor, output: Tensor) -> Tensor:
        return row_sums(d_output, output)

    @override
    def block_gradient(
        self,
        q: Tensor,
        k: Tensor,
        values: list[Tensor],
        d_outputs: list[Tensor],
        delta: Tensor,
        saved: Tensor,
        scores: Scores,
    ) -> list[Tensor]:
        """Compute dQ, dK, the dV of the first layer, and the gradients of ``scores.learned`` in one pass for the block.

        Programs add to dQ in float32, in a nondeterministic order. All other sums are deterministic.
        """
        if len(values) > MOST_LAYERS:
            return self._sum_of_halves(q, k, values, d_outputs, delta, saved, scores)
        bias = NearBias.of(scores, q)
        d_bias = None
        band = None
        far_sums = None
        added_to = ["dq"]
        if bias.rows is not None:
            d_bias = BiasGradient(bias, q)
            band = d_bias.band
            far_sums = d_bias.far_sums
            added_to.append("far_sums")
        single = q.new_empty((), dtype=torch.float32)
        dq = empty_heads(single.expand(q.shape)).zero_()
        dk = empty_heads(q)
        dv = empty_heads(q)
        launch(
            triton_passes.key_side_kernel,
            "BLOCK_K",
            q,
            strided={
                "q": contiguous_rows(q),
                "k": contiguous_rows(k),
                "values": tuple(map(contiguous_rows, values)),
                "d_outputs": tuple(map(contiguous_rows, d_outputs)),
                "dq": dq,
                "dk": dk,
                "dv": dv,
            },
            tiles=tiles_for("key_side", q, len(values)),
            set_to_zero=tuple(added_to),
            band=band,
            far_sums=far_sums,
            far_slots=far_slots(q.size(2)),
            **_read_by_all(saved, scores, bias),
            delta=delta.contiguous(),
            M=len(values),
        )
        learned = {}
        if d_bias is not None and scores.table_KN is not None:
            learned["table_KN"] = d_bias.of_table(scores.table_KN)
        return [dq.to(q.dtype), dk, dv, *learned_gradients(learned, q)]

    def _sum_of_halves(
        self,
        q: Tensor,
        k: Tensor,
        values: list[Tensor],
        d_outputs: list[Tensor],
        delta: Tensor,
        saved: Tensor,
        scores: Scores,
    ) -> list[Tensor]:
        """Compute the gradients of a block with more than MOST_LAYERS layers.

        All gradients are linear in (dO_i, delta), so they are the sum of the gradients of two parts of the block.
        """
        d_q, d_k, d_v, d_table, *others = self.block_gradient(
            q,
            k,
            values[:MOST_LAYERS],
            d_outputs[:MOST_LAYERS],
            delta,
            saved,
            scores,
        )
        more_d_q, more_d_k, _, more_d_table, *_ = self.block_gradient(
            q,
            k,
            values[MOST_LAYERS:],
            d_outputs[MOST_LAYERS:],
            torch.zeros_like(delta),
            saved,
            scores,
        )
        return [d_q + more_d_q, d_k + more_d_k, d_v, d_table + more_d_table, *others]
