"""Back ends of torch's own attention: ``eager``, the reference, and ``recompute``.

``eager``: torch writes scores and distribution to memory and differentiates each step. ``recompute``: every attention
is torch's fused one over the Q and K of its ``s``, which never keeps P. torch's kernels differ in what they take of a
bias that learns, a dense matrix to them:

| device | kernel | gradient of the bias | dropout |
|---|---|---|---|
| CPU | flash | none: our own ``fused`` takes its place | none: unfused |
| GPU | memory-efficient, compute capability 5.0 and above | yes | yes |
| GPU | flash (no bias at all) and cuDNN's, 8.0 and above | none | yes |

Source: can_use_mem_efficient_attention and its neighbours in torch's
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lazyformer_fairseq.modules.attention import blockwise
from lazyformer_fairseq.modules.attention.block_back_ends import Fused
from lazyformer_fairseq.modules.attention.scores import BackEnd, Scores
from lazyformer_fairseq.modules.attention.weights import distribution
from lazyformer_fairseq.modules.memory_costs import SINGLE, AttentionSize, Memory

# The memory-efficient kernel writes a gradient of the bias for each sequence, and torch sums them afterwards: so many
# numbers at a time, unless one sequence alone has more. 128 MiB in half precision.
PIECE_NUMBERS = 2**26
ALIGNMENT = 8  # numbers: where that kernel wants the rows of a bias to begin
_FUSED = Fused()


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
        if self._learns and added is not None and is_on_gpu:
            return attention_with_learned_bias(self.q_BNTD, self.k_BNKD, v_BNKD, added, dropout)
        return F.scaled_dot_product_attention(self.q_BNTD, self.k_BNKD, v_BNKD, attn_mask=added, dropout_p=dropout)

    def _dense(self) -> Tensor | None:
        layout = aligned if self._learns and self.q_BNTD.device.type == "cuda" else None
        return self.scores.dense(self.q_BNTD.size(-2), self.k_BNKD.size(-2), self.q_BNTD, layout)


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
    has_mask = "mask" in size.features
    if not is_on_gpu and (size.dropout or has_positions or learns or has_mask):
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
