"""The kernels that a lazy block needs, as operators that torch.compile takes as they are."""

import functools
from collections.abc import Callable
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention.scores import FlatScores, Scores


class BlockKernels(NamedTuple):
    """The four functions of an implementation.

    In all of them q is (B, N, T, D), k and values (B, N, K, D); `saved` is what the implementation keeps of the
    distribution P.

    Attributes:
        attend_forward: (q, k, v, scores) -> (P V, saved).
        reuse_forward: (q, k, v, saved, scores) -> P V.
        value_gradient: (q, k, d_output, saved, scores) -> P^T dO.
        block_gradient: (q, k, values, d_outputs, delta, saved, scores) -> [dQ, dK, dV of the first values, and the
            gradients of ``scores.learned``, (0,) where a part is missing]. `delta` (B, N, T) is the sum of
            rowsum(dO_i * O_i).
    """

    attend_forward: Callable[[Tensor, Tensor, Tensor, Scores], tuple[Tensor, Tensor]]
    reuse_forward: Callable[[Tensor, Tensor, Tensor, Tensor, Scores], Tensor]
    value_gradient: Callable[[Tensor, Tensor, Tensor, Tensor, Scores], Tensor]
    block_gradient: Callable[[Tensor, Tensor, list[Tensor], list[Tensor], Tensor, Tensor, Scores], list[Tensor]]


def as_operators(name: str, kernels: BlockKernels, saved_like: Callable[[Tensor, Tensor], Tensor]) -> BlockKernels:
    """The same functions as operators ``lazyformer::NAME_attend_forward`` and so on, which take flat scores.

    Args:
        name: of the implementation.
        kernels: its functions.
        saved_like: (q, k) -> an empty tensor like `saved`.
    """

    def operator(implementation: Callable, fake: Callable) -> Callable:
        @functools.wraps(implementation)
        def in_given_precision(*args):
            with torch.autocast(args[0].device.type, enabled=False):
                return implementation(*args)

        made = torch.library.custom_op(f"lazyformer::{name}_{implementation.__name__}", mutates_args=())
        made = made(in_given_precision)
        made.register_fake(fake)
        return lambda *args: made(*args[:-1], *args[-1].flat())

    def attend_forward(
        q: Tensor, k: Tensor, v: Tensor, tensors: list[Optional[Tensor]], numbers: list[int]
    ) -> tuple[Tensor, Tensor]:
        return kernels.attend_forward(q, k, v, FlatScores(tensors, numbers).scores())

    def reuse_forward(
        q: Tensor, k: Tensor, v: Tensor, saved: Tensor, tensors: list[Optional[Tensor]], numbers: list[int]
    ) -> Tensor:
        return kernels.reuse_forward(q, k, v, saved, FlatScores(tensors, numbers).scores())

    def value_gradient(
        q: Tensor, k: Tensor, d_output: Tensor, saved: Tensor, tensors: list[Optional[Tensor]], numbers: list[int]
    ) -> Tensor:
        return kernels.value_gradient(q, k, d_output, saved, FlatScores(tensors, numbers).scores())

    def block_gradient(
        q: Tensor,
        k: Tensor,
        values: list[Tensor],
        d_outputs: list[Tensor],
        delta: Tensor,
        saved: Tensor,
        tensors: list[Optional[Tensor]],
        numbers: list[int],
    ) -> list[Tensor]:
        return kernels.block_gradient(q, k, values, d_outputs, delta, saved, FlatScores(tensors, numbers).scores())

    return BlockKernels(
        operator(attend_forward, lambda q, k, v, *_: (empty_heads(q), saved_like(q, k))),
        operator(reuse_forward, lambda q, *_: empty_heads(q)),
        operator(value_gradient, lambda q, k, *_: empty_heads(k)),
        operator(block_gradient, _fake_block_gradient),
    )


def empty_heads(like: Tensor) -> Tensor:
    """(B, N, T, D) whose heads lie side by side in memory, so that merging them is a view."""
    batch, heads, time, size = like.shape
    return like.new_empty(batch, time, heads, size).transpose(1, 2)


def empty_gradients(scores: Scores, q: Tensor) -> list[Tensor]:
    """Uninitialised gradients of ``scores.learned``, (0,) where a part is missing."""
    return [q.new_empty(0) if part is None else torch.empty_like(part) for part in scores.learned]


def _fake_block_gradient(q, k, values, d_outputs, delta, saved, tensors, numbers):
    learned = empty_gradients(FlatScores(tensors, numbers).scores(), q)
    return [empty_heads(q), empty_heads(k), empty_heads(k), *learned]
