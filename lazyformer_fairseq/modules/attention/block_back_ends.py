"""Back ends whose ``s`` gathers the gradients of its block (:mod:`.lazy_block`): materialize, fused and tiles.

``materialize`` keeps the distribution in the values' precision, and each ``l`` is one product. ``fused`` writes nothing
n x n to memory: Triton on a GPU, piece by piece in torch on a processor. ``tiles`` computes what the mask shows, and
little more, in torch.
"""

import functools
import os
from collections.abc import Set
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention import blockwise, lazy_block, tiles
from lazyformer_fairseq.modules.attention.lazy_block import BlockKernels, Implementation
from lazyformer_fairseq.modules.attention.scores import BackEnd, Scores
from lazyformer_fairseq.modules.memory_costs import SINGLE, AttentionSize, Memory
from lazyformer_fairseq.modules.processor import compute_capability

# Features of scores (:attr:`Scores.features`) that the Triton kernels lack, and "synthetic", queries of another size
# than the values': there the piecewise ones compute.
NOT_IN_TRITON = frozenset({"causal", "positions", "holes", "learned", "synthetic"})
LARGEST_HEAD = 128  # of the Triton kernels
LOWEST_CAPABILITY = (8, 0)  # of a GPU: Triton supports none below
# By the name of their operators; those of Triton are made when they are first needed.
KERNELS = {
    "materialize": BlockKernels("materialize", blockwise.STORING),
    "blockwise": BlockKernels("blockwise", blockwise.COMPUTING),
    "stored_tiles": BlockKernels("stored_tiles", tiles.STORING),
    "tiles": BlockKernels("tiles", tiles.COMPUTING),
}


@functools.cache
def has_triton() -> bool:
    """Whether the installed Triton's kernels may take tuples."""
    try:
        major, minor, *_ = version("triton").split(".")
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= (3, 3)


def runs_triton(device: str) -> bool:
    """Whether such a device is none for Triton's kernels, or one that they run on, above :data:`LOWEST_CAPABILITY`."""
    return device != "cuda" or compute_capability() >= LOWEST_CAPABILITY


class InTriton(Implementation):
    """The Triton kernels, :mod:`.triton_kernels`."""

    def __init__(self):
        from lazyformer_fairseq.modules.attention import triton_kernels as made

        self.attend_forward, self.reuse_forward = made.attend_forward, made.reuse_forward
        self.value_gradient, self.block_gradient = made.value_gradient, made.block_gradient

    def saved_like(self, q: Tensor, k: Tensor, scores: Scores) -> Tensor:
        return q.new_empty(q.shape[:-1], dtype=torch.float32)


@functools.cache
def triton_kernels() -> BlockKernels:
    return BlockKernels("triton", InTriton())


class _BlockBackEnd(BackEnd):
    def kernels(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, dropout: float, consumers: int) -> BlockKernels:
        """Those that compute this."""
        raise NotImplementedError

    def attend(
        self, q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, scores: Scores, dropout: float, consumers: int = 0
    ) -> tuple[Tensor, lazy_block.SharedAttention]:
        assert self.has_dropout or not dropout, "it has none"
        inputs = q_BNTD, k_BNKD, v_BNKD, scores
        kernels = self.kernels(*inputs, dropout, consumers)
        return lazy_block.attend(kernels, *inputs, consumers, dropout)


class Materialize(_BlockBackEnd):
    keeps_distribution = True
    lacks = blockwise.LACKS

    def kernels(self, q, k, v, scores, dropout, consumers) -> BlockKernels:
        return KERNELS["materialize"]

    def count_memory(self, size: AttentionSize) -> Memory:
        return blockwise.count_memory(size, store=True)

    def count_reuse_memory(self, size: AttentionSize) -> Memory:
        return blockwise.count_reuse_memory(size, store=True)


class Fused(_BlockBackEnd):
    lacks = blockwise.LACKS

    def kernels(self, q, k, v, scores, dropout, consumers) -> BlockKernels:
        """Triton computes on a GPU if it is installed, elsewhere if its interpreter is turned on.

        Its programs add gradients of queries up in any order: not where torch must be deterministic.
        """
        is_plain = q.size(-1) == v.size(-1) and not scores.features & NOT_IN_TRITON
        uses_triton = (q.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1") and has_triton()
        is_free = not torch.are_deterministic_algorithms_enabled()
        return triton_kernels() if is_plain and uses_triton and is_free else KERNELS["blockwise"]

    def supports(self, device: str, features: Set[str], head_size: int) -> bool:
        """On a GPU what the Triton kernels can; elsewhere everything."""
        if device != "cuda":
            return True
        can = features.isdisjoint(NOT_IN_TRITON) and head_size <= LARGEST_HEAD
        return can and has_triton() and self.runs_on(device)

    def runs_on(self, device: str) -> bool:
        return runs_triton(device)

    def count_memory(self, size: AttentionSize) -> Memory:
        if not _is_for_triton(size):
            return blockwise.count_memory(size, store=False)
        sums = size.rows * SINGLE  # a number of each row: log-sum-exp; in the backward pass delta
        backward = size.queries + 2 * size.values + 2 * sums
        return Memory(sums, 0, backward, size.consumers * (size.queries + size.values + sums))

    def count_reuse_memory(self, size: AttentionSize) -> Memory:
        if not _is_for_triton(size):
            return blockwise.count_reuse_memory(size, store=False)
        return Memory(0, 0, size.queries + size.values)


def _is_for_triton(size: AttentionSize) -> bool:
    return size.device == "cuda" and size.features.isdisjoint(NOT_IN_TRITON)


class Tiles(_BlockBackEnd):
    has_dropout = True
    lacks = tiles.LACKS

    def kernels(self, q, k, v, scores, dropout, consumers) -> BlockKernels:
        """Keeps the distribution only if somebody reads it: computing it once more is cheaper than memory."""
        return KERNELS["stored_tiles" if consumers else "tiles"]

    def count_memory(self, size: AttentionSize) -> Memory:
        return tiles.count_memory(size)

    def count_reuse_memory(self, size: AttentionSize) -> Memory:
        return tiles.count_reuse_memory(size)
