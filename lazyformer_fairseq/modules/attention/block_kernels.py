"""What a kernel of a lazy block has to offer, as operators that torch.compile takes as they are."""

import functools
from collections.abc import Callable
from typing import NamedTuple, Optional

import torch
from torch import Tensor


class BlockKernels(NamedTuple):
    """The four functions of an implementation.

    In all of them q, k and values are (B, N, T, D); `table` (K, N), `bucket_by_distance` (2T - 1,), `far` and `lengths`
    (B,) are :class:`~lazyformer_fairseq.modules.attention.scores.ScoreBias`'s, or None; `saved` is what the
    implementation keeps of the distribution P.

    Attributes:
        attend_forward: (q, k, v, table, bucket_by_distance, far, lengths) -> (P V, saved).
        reuse_forward: (q, k, v, saved, table, bucket_by_distance, far, lengths) -> P V.
        value_gradient: (q, k, d_output, saved, table, bucket_by_distance, far, lengths) -> P^T dO.
        block_gradient: (q, k, values, d_outputs, delta, saved, table, bucket_by_distance, far, lengths) -> dQ, dK, dV
            of the first values, d table ((0,) without a table). `delta` (B, N, T) is the sum of rowsum(dO_i * O_i).
    """

    attend_forward: Callable
    reuse_forward: Callable
    value_gradient: Callable
    block_gradient: Callable


def as_operators(name: str, kernels: BlockKernels, saved_like: Callable[[Tensor], Tensor]) -> BlockKernels:
    """The same functions as operators ``lazyformer::NAME_attend_forward`` and so on.

    Args:
        name: of the implementation.
        kernels: its functions.
        saved_like: an empty tensor as `saved` would be, from q.
    """

    def operator(function: str, implementation: Callable) -> Callable:
        @functools.wraps(implementation)
        def in_given_precision(*args):
            with torch.autocast(args[0].device.type, enabled=False):
                return implementation(*args)

        return torch.library.custom_op(f"lazyformer::{name}_{function}", mutates_args=())(in_given_precision)

    def attend_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Optional[Tensor],
        bucket_by_distance: Optional[Tensor],
        far: int,
        lengths: Optional[Tensor],
    ) -> tuple[Tensor, Tensor]:
        return kernels.attend_forward(q, k, v, table, bucket_by_distance, far, lengths)

    def reuse_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        saved: Tensor,
        table: Optional[Tensor],
        bucket_by_distance: Optional[Tensor],
        far: int,
        lengths: Optional[Tensor],
    ) -> Tensor:
        return kernels.reuse_forward(q, k, v, saved, table, bucket_by_distance, far, lengths)

    def value_gradient(
        q: Tensor,
        k: Tensor,
        d_output: Tensor,
        saved: Tensor,
        table: Optional[Tensor],
        bucket_by_distance: Optional[Tensor],
        far: int,
        lengths: Optional[Tensor],
    ) -> Tensor:
        return kernels.value_gradient(q, k, d_output, saved, table, bucket_by_distance, far, lengths)

    def block_gradient(
        q: Tensor,
        k: Tensor,
        values: list[Tensor],
        d_outputs: list[Tensor],
        delta: Tensor,
        saved: Tensor,
        table: Optional[Tensor],
        bucket_by_distance: Optional[Tensor],
        far: int,
        lengths: Optional[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return kernels.block_gradient(q, k, values, d_outputs, delta, saved, table, bucket_by_distance, far, lengths)

    operators = BlockKernels(
        operator("attend_forward", attend_forward),
        operator("reuse_forward", reuse_forward),
        operator("value_gradient", value_gradient),
        operator("block_gradient", block_gradient),
    )
    operators.attend_forward.register_fake(lambda q, k, v, *bias: (empty_output(v), saved_like(q)))
    operators.reuse_forward.register_fake(lambda q, k, v, *rest: empty_output(v))
    operators.value_gradient.register_fake(lambda q, k, d_output, *rest: empty_output(d_output))
    operators.block_gradient.register_fake(_fake_block_gradient)
    return operators


def empty_output(v: Tensor) -> Tensor:
    """(B, N, T, D) whose heads lie side by side in memory, so that merging them is a view."""
    batch, heads, time, size = v.shape
    return v.new_empty(batch, time, heads, size).transpose(1, 2)


def _fake_block_gradient(q, k, values, d_outputs, delta, saved, table, bucket_by_distance, far, lengths):
    d_table = q.new_empty(0) if table is None else torch.empty_like(table)
    return empty_output(q), empty_output(q), empty_output(q), d_table
