"""Back end ``fused``: it writes nothing n x n to memory. Triton on a GPU, piece by piece in torch on a processor."""

import functools
import os
from collections.abc import Callable, Set
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention import block_gradient
from lazyformer_fairseq.modules.attention.block_kernels import BlockKernels, Counted, as_operators, dense_scores
from lazyformer_fairseq.modules.attention.blocks import blockwise
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.memory_costs import SINGLE, AttentionSize, Memory
from lazyformer_fairseq.modules.processor import compute_capability

# Features of scores (:attr:`Scores.features`) that the Triton kernels lack, and "synthetic", queries of another size
# than the values': there the piecewise ones compute.
NOT_IN_TRITON = frozenset({"causal", "positions", "holes", "learned", "synthetic"})
LARGEST_HEAD = 128  # of the Triton kernels
LOWEST_CAPABILITY = (8, 0)  # of a GPU: Triton supports none below


def attend(
    q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, scores: Scores, dropout: float, consumers: int
) -> tuple[Tensor, block_gradient.SharedAttention]:
    """As :func:`lazyformer_fairseq.modules.attention.attend`, without dropout."""
    assert not dropout, "it has none"
    is_plain = q_BNTD.size(-1) == v_BNKD.size(-1) and not scores.features & NOT_IN_TRITON
    by_triton = is_plain and uses_triton(q_BNTD.device)
    kernels = triton_kernels() if by_triton else _KERNELS
    return block_gradient.attend(kernels, q_BNTD, k_BNKD, v_BNKD, scores, consumers, dropout)


def runs_on(device: str) -> bool:
    """Whether it is offered there: on processors, and on GPUs of :data:`LOWEST_CAPABILITY` and above."""
    return device != "cuda" or compute_capability() >= LOWEST_CAPABILITY


def supports(device: str, features: Set[str], head_size: int) -> bool:
    """Whether it can compute this: on a GPU what the Triton kernels can; elsewhere everything."""
    if device != "cuda":
        return True
    can = features.isdisjoint(NOT_IN_TRITON) and head_size <= LARGEST_HEAD
    return can and has_triton() and runs_on(device)


def uses_triton(device: torch.device) -> bool:
    """Whether Triton computes: on a GPU if it is installed, elsewhere if its interpreter is turned on."""
    return (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1") and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether the installed Triton's kernels may take tuples."""
    try:
        major, minor, *_ = version("triton").split(".")
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 3)


@functools.cache
def triton_kernels(name: str = "triton", count_scores: Callable[..., Counted] = dense_scores) -> BlockKernels:
    """As operators of that name. With a mask they compute the tiles alone that it shows."""
    from lazyformer_fairseq.modules.attention.triton import kernels

    return as_operators(
        name,
        BlockKernels(*(getattr(kernels, name) for name in BlockKernels._fields)),
        saved_like=lambda q, k, scores: q.new_empty(q.shape[:-1], dtype=torch.float32),
        keeps_distribution=False,
        count_scores=count_scores,
    )


_KERNELS = blockwise.kernels("blockwise", store=False)


def count_memory(size: AttentionSize) -> Memory:
    """Of an ``s``, besides queries, keys, values and output."""
    if not _is_for_triton(size):
        return blockwise.count_memory(size, store=False)
    sums = size.rows * SINGLE  # a number of each row: log-sum-exp; in the backward pass delta
    backward = size.queries + 2 * size.values + 2 * sums
    return Memory(sums, 0, backward, size.consumers * (size.queries + size.values + sums))


def count_reuse_memory(size: AttentionSize) -> Memory:
    """Of an ``l``, besides values and output."""
    if not _is_for_triton(size):
        return blockwise.count_reuse_memory(size, store=False)
    return Memory(0, 0, size.queries + size.values)


def _is_for_triton(size: AttentionSize) -> bool:
    return size.device == "cuda" and size.features.isdisjoint(NOT_IN_TRITON)
