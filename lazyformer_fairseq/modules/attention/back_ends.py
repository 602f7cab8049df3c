"""The back ends but ``flex``: ``eager``, the reference, and those that never keep P or gather a block's gradients.

``eager``: torch writes scores and distribution to memory and differentiates each step. The ``s`` of ``materialize``,
``fused`` and ``tiles`` gathers the gradients of its block (:mod:`.lazy_block`). ``materialize`` keeps the distribution
in the values' precision, and each ``l`` is one product. ``fused`` writes nothing n x n to memory: Triton on a GPU,
piece by piece in torch on a processor. ``tiles`` computes what the mask shows, and little more, in torch.
``recompute``: every attention is torch's fused one over the Q and K of its ``s``, which never keeps P. torch's kernels
differ in what they take of a bias that learns, a dense matrix to them:

| device | kernel | gradient of the bias | dropout |
|---|---|---|---|
| CPU | flash | none: our own ``fused`` takes its place | none: unfused |
| GPU | memory-efficient, compute capability 5.0 and above | yes | yes |
| GPU | flash (no bias at all) and cuDNN's, 8.0 and above | none | yes |

Source: can_use_mem_efficient_attention and its neighbours in torch's
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

import functools
import math
import os
from collections.abc import Set
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lazyformer_fairseq.modules.attention import blockwise, lazy_block, tiles
from lazyformer_fairseq.modules.attention.lazy_block import BlockKernels, Implementation
from lazyformer_fairseq.modules.attention.scores import BackEnd, Scores
from lazyformer_fairseq.modules.attention.weights import distribution
from lazyformer_fairseq.modules.memory_costs import SINGLE, AttentionSize, Memory
from lazyformer_fairseq.modules.processor import compute_capability

# The memory-efficient kernel writes a gradient of the bias for each sequence, and torch sums them afterwards: so many
# numbers at a time, unless one sequence alone has more. 128 MiB in half precision.
PIECE_NUMBERS = 2**26
ALIGNMENT = 8  # numbers: where that kernel wants the rows of a bias to begin
# What the Triton kernels lack: features of scores (:attr:`Scores.features`); "synthetic", queries of another size than
# the values'; "unturned", queries of twice that size; "oblong", more or fewer keys than queries, beyond whose end they
# would read. There the piecewise ones compute.
NOT_IN_TRITON = frozenset({"causal", "positions", "learned", "synthetic", "unturned", "oblong"})
LARGEST_HEAD = 128  # of the Triton kernels
LOWEST_CAPABILITY = (8, 0)  # of a GPU: Triton supports none below
# By the name of their operators; those of Triton are made when they are first needed.
KERNELS = {
    "materialize": BlockKernels("materialize", blockwise.STORING),
    "blockwise": BlockKernels("blockwise", blockwise.COMPUTING),
    "stored_tiles": BlockKernels("stored_tiles", tiles.STORING),
    "tiles": BlockKernels("tiles", tiles.COMPUTING),
}


class StoredDistribution(NamedTuple):
    """A distribution in memory, from before dropout."""

    probabilities: Tensor  # (B, N, T, K)

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """P V (B, N, T, D); each call draws its own dropout mask."""
        return torch.matmul(F.dropout(self.probabilities, dropout), v_BNKD)


class Eager(BackEnd):
    has_dropout = True
    keeps_distribution = True

    def attend(
        self, q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, scores: Scores, dropout: float, consumers: int = 0
    ) -> tuple[Tensor, StoredDistribution]:
        added = scores.dense(q_BNTD.size(-2), k_BNKD.size(-2), q_BNTD)
        scale = math.sqrt(max(1, q_BNTD.size(-1)))  # queries without numbers: all products are 0
        scores_BNTK = torch.matmul(q_BNTD / scale, k_BNKD.transpose(-2, -1))
        if added is not None:
            scores_BNTK = scores_BNTK + added
        # Of a row that sees nothing, softmax makes NaN; torch's fused attention and this one, zeros.
        has_blind_rows = scores.mask is not None
        stored = StoredDistribution(distribution(scores_BNTK, scores.exponent_N, v_BNKD.dtype, has_blind_rows))
        return stored.attend(v_BNKD, dropout), stored

    def count_memory(self, size: AttentionSize) -> Memory:
        stored, single = size.pairs * size.number, size.pairs * size.single
        is_half = size.number < size.single
        has_positions = "positions" in size.features
        kept = single + _dropped(size) + (stored if is_half and not size.dropout else 0)
        if has_positions:  # torch multiplies with a copy of the distances for each sequence
            kept += size.batch * (size.keys + 1) * size.width * size.number
        forward = stored * (1 + has_positions) + (single if is_half else 0)
        forward += stored if is_half and size.dropout else 0
        # softmax's gradient needs P, dP and dS at once; the product's and dropout's own are gone by then.
        backward = single if size.dropout else 2 * single - (stored if is_half else 0)
        if "mask" in size.features and not is_half:  # rows that see nothing are looked for
            backward += single
        if "entmax" in size.features:
            forward, backward = forward + 3 * single, backward + 3 * single
        if size.features & {"bias", "learned"}:  # written once for all sequences
            added = size.heads * size.time * size.keys * size.number
            forward, backward = forward + added, backward + added
        pending = stored if size.consumers else 0
        return Memory(kept, forward, backward - pending, pending)  # its own dP adds to that of its consumers

    def count_reuse_memory(self, size: AttentionSize) -> Memory:
        """Dropout of its own, and dP."""
        stored = size.pairs * size.number
        return Memory(_dropped(size), stored if size.dropout else 0, stored * (1 + size.dropout) - _dropped(size) // 2)


def _dropped(size: AttentionSize) -> int:
    """A dropout mask, and the distribution behind it."""
    return size.pairs * (size.mask + size.number) if size.dropout else 0


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
        schema = "(Tensor d_output, Tensor output) -> Tensor"
        operator = torch.library.custom_op("lazyformer::triton_row_sums", made.row_sums, mutates_args=(), schema=schema)
        operator.register_fake(lambda d_output, output: output.new_empty(output.shape[:-1], dtype=torch.float32))
        self.row_sums = operator

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

    count_memory = staticmethod(partial(blockwise.count_memory, store=True))
    count_reuse_memory = staticmethod(partial(blockwise.count_reuse_memory, store=True))

    def kernels(self, q, k, v, scores, dropout, consumers) -> BlockKernels:
        return KERNELS["materialize"]


class Fused(_BlockBackEnd):
    lacks = blockwise.LACKS

    def kernels(self, q, k, v, scores, dropout, consumers) -> BlockKernels:
        """Triton computes on a GPU if it is installed, elsewhere if its interpreter is turned on.

        Its programs add gradients of queries up in any order: not where torch must be deterministic.
        """
        is_plain = q.size(-1) == v.size(-1) and q.size(-2) == k.size(-2) and not scores.features & NOT_IN_TRITON
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
    return size.device == "cuda" and size.time == size.keys and size.features.isdisjoint(NOT_IN_TRITON)


class Tiles(_BlockBackEnd):
    has_dropout = True
    lacks = tiles.LACKS
    count_memory, count_reuse_memory = staticmethod(tiles.count_memory), staticmethod(tiles.count_reuse_memory)

    def kernels(self, q, k, v, scores, dropout, consumers) -> BlockKernels:
        """Keeps the distribution only if somebody reads it: computing it once more is cheaper than memory."""
        return KERNELS["stored_tiles" if consumers else "tiles"]


_FUSED = Fused()


class RecomputedAttention:
    """Queries and keys to attend with anew."""

    def __init__(self, q_BNTD: Tensor, k_BNKD: Tensor, scores: Scores):
        self.q_BNTD = q_BNTD
        self.k_BNKD = k_BNKD
        self.scores = scores
        self._learns = scores.is_learning
        # We write positions out once for all consumers: they are no smaller than what torch adds to scores.
        self._added = None if scores.position_queries_BNTD is None else self._dense()

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """softmax(QK^T / sqrt(D) + additions) V (B, N, T, D); each call draws its own dropout mask.

        On a CPU torch fuses no attention whose bias is learned: there our own fused kernel takes its place, unless
        dropout is on, which that kernel lacks. torch keeps Transformer-XL's positions: to it they are a dense bias.
        """
        is_on_gpu = v_BNKD.device.type == "cuda"
        can_fuse = self.scores.features.isdisjoint(blockwise.LACKS) and not (dropout or is_on_gpu)
        if self._added is None and self._learns and can_fuse:
            return _FUSED.attend(self.q_BNTD, self.k_BNKD, v_BNKD, self.scores, dropout)[0]
        added = self._dense() if self._added is None else self._added
        # Queries that keep what they were before a turn are wider than values, and torch fuses equal sizes alone.
        size = v_BNKD.size(-1)
        if self.q_BNTD.size(-1) > size:
            v_BNKD = F.pad(v_BNKD, (0, self.q_BNTD.size(-1) - size))
        vectors = self.q_BNTD, self.k_BNKD, v_BNKD
        if self._learns and added is not None and is_on_gpu:
            return attention_with_learned_bias(*vectors, added, dropout)[..., :size]
        return F.scaled_dot_product_attention(*vectors, attn_mask=added, dropout_p=dropout)[..., :size]

    def _dense(self) -> Tensor | None:
        layout = aligned if self._learns and self.q_BNTD.device.type == "cuda" else None
        added = self.scores.dense(self.q_BNTD.size(-2), self.k_BNKD.size(-2), self.q_BNTD, layout)
        return added[None] if added is not None and added.dim() == 3 else added  # else torch fuses none on a processor


class Recompute(BackEnd):
    has_dropout = True
    lacks = frozenset({"entmax", "synthetic"})

    def attend(
        self, q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, scores: Scores, dropout: float, consumers: int = 0
    ) -> tuple[Tensor, RecomputedAttention]:
        attention = RecomputedAttention(q_BNTD, k_BNKD, scores)
        return attention.attend(v_BNKD, dropout), attention

    def count_memory(self, size: AttentionSize) -> Memory:
        own = _count_attention(size)
        # Each consumer differentiates queries and keys too.
        return own._replace(pending=size.consumers and size.queries + size.values)

    def count_reuse_memory(self, size: AttentionSize) -> Memory:
        """An attention of its own."""
        own = _count_attention(size._replace(consumers=0))
        by_steps = own.kept > size.pairs * size.number
        return own._replace(kept=own.kept + (size.queries + size.values if by_steps else 0))


def _count_attention(size: AttentionSize) -> Memory:
    has_positions, learns = "positions" in size.features, not size.features.isdisjoint({"bias", "learned"})
    is_on_gpu = size.device == "cuda"
    if learns and not (has_positions or size.dropout or is_on_gpu) and size.features.isdisjoint(blockwise.LACKS):
        return _FUSED.count_memory(size)
    if not is_on_gpu and (size.dropout or has_positions or learns):
        return _count_by_steps(size)
    # One kernel: a number of each row, and what is added to scores, where that is a sublayer's own.
    added = size.pairs * size.number if has_positions else 0
    at_once = min(size.pairs, max(PIECE_NUMBERS, size.pairs // size.batch))
    gradient = at_once * size.number if has_positions or learns else 0
    return Memory(added + size.rows * SINGLE, added, size.queries + 2 * size.values + added + gradient)


def _count_by_steps(size: AttentionSize) -> Memory:
    """torch's attention where it is not fused; in single precision inside."""
    single, has_positions = size.pairs * size.single, "positions" in size.features
    copies = (size.queries + 2 * size.values) * (size.single // size.number - 1)  # in place of those given
    kept = single * (1 + 2 * size.dropout) + copies
    if has_positions:
        kept += size.batch * (size.keys + 1) * size.width * size.number
    forward = single * (2 if has_positions and size.number == size.single else 1)
    return Memory(kept, forward, single * (1 + (not size.dropout)))


def attention_with_learned_bias(
    q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, added: Tensor, dropout: float = 0.0
) -> Tensor:
    """torch's attention with additions that get a gradient, by its memory-efficient kernel where that runs.

    Elsewhere, as on a CPU, torch writes the distribution. The sequences go through in pieces of
    :data:`PIECE_NUMBERS`; torch.compile sees one piece, as pieces would be a graph for each size.

    Args:
        added: broadcastable to (B, N, T, K), in the precision of the queries.

    Returns:
        (B, N, T, D).
    """
    # Flash takes no additions. cuDNN's is preferred on some GPUs, and has no gradient for them. And where nothing but
    # the additions learns torch's forward pass leaves out what the memory-efficient backward pass reads.
    has_others = any(part.requires_grad for part in (q_BNTD, k_BNKD, v_BNKD))
    kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH] if has_others else [SDPBackend.MATH]
    with sdpa_kernel(kernels):
        if torch.compiler.is_compiling():
            return F.scaled_dot_product_attention(q_BNTD, k_BNKD, v_BNKD, attn_mask=added, dropout_p=dropout)
        batch = q_BNTD.size(0)
        at_once = max(1, PIECE_NUMBERS // (q_BNTD.size(1) * q_BNTD.size(2) * k_BNKD.size(2)))
        parts = (q_BNTD, k_BNKD, v_BNKD, added)
        outputs = [
            F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
            for q, k, v, bias in (
                [part if len(part) < batch else part[first : first + at_once] for part in parts]
                for first in range(0, batch, at_once)
            )
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def aligned(added: Tensor) -> Tensor:
    """The same numbers, laid out so that the memory-efficient kernel reads them as they are.

    It wants rows without gaps that begin at multiples of :data:`ALIGNMENT` numbers. torch would copy others in each
    call, and knows nothing of where the first one begins.
    """
    if torch.compiler.is_compiling():  # it lays out anew what it computes, and torch copies the rest
        return added
    starts = (*added.stride()[:-1], added.storage_offset())
    if added.stride(-1) == 1 and all(start % ALIGNMENT == 0 for start in starts):
        return added
    keys = added.size(-1)
    return F.pad(added.contiguous(), (0, -keys % ALIGNMENT))[..., :keys]


def has_kernel(precision: torch.dtype, head_size: int, capability: tuple[int, int]) -> bool:
    """Whether the memory-efficient kernel takes this on a GPU of that compute capability."""
    half = precision in (torch.float16, torch.bfloat16)
    if not half and precision != torch.float32:
        return False
    if capability < (8, 0) and precision == torch.bfloat16:
        return False
    return capability >= (5, 0) and head_size % (8 if half else 4) == 0
