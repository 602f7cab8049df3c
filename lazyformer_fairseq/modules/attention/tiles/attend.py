"""Back end ``tiles``: it computes what the mask shows, and little more. Triton on a GPU where it can, else torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention import block_gradient, fused
from lazyformer_fairseq.modules.attention.block_kernels import Counted
from lazyformer_fairseq.modules.attention.blocks import blockwise
from lazyformer_fairseq.modules.attention.mask_blocks import blocks_of
from lazyformer_fairseq.modules.attention.scores import FlatScores, Scores
from lazyformer_fairseq.modules.attention.tiles import kernels
from lazyformer_fairseq.modules.attention.tiles.geometry import STRETCH_ELEMENTS, TILE
from lazyformer_fairseq.modules.memory_costs import SINGLE, AttentionSize, Memory

# What the Triton kernels lack, of what these have.
_NOT_IN_TRITON = fused.NOT_IN_TRITON | (blockwise.LACKS - {"mask"})


def attend(
    q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, scores: Scores, dropout: float, consumers: int
) -> tuple[Tensor, block_gradient.SharedAttention]:
    """As :func:`lazyformer_fairseq.modules.attention.attend`.

    In torch it keeps the distribution only if somebody reads it: computing it anew once is cheaper than much memory.
    Triton's kernels have no dropout.
    """
    if not dropout and _is_for_triton(q_BNTD, k_BNKD, v_BNKD, scores):
        chosen = fused.triton_kernels("triton_tiles", _count_listed)
    else:
        chosen = _KEEPING if consumers else _RECOMPUTING
    return block_gradient.attend(chosen, q_BNTD, k_BNKD, v_BNKD, scores, consumers, dropout)


def has_triton(device: str, features: frozenset[str], head_size: int) -> bool:
    """Whether Triton computes it on such a device."""
    can = device == "cuda" and "mask" in features and features.isdisjoint(_NOT_IN_TRITON)
    return can and head_size <= fused.LARGEST_HEAD and fused.has_triton() and fused.runs_on(device)


def _is_for_triton(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> bool:
    is_plain = q.shape == k.shape == v.shape and q.dtype != torch.float64
    return is_plain and has_triton(q.device.type, scores.features, q.size(-1))


def _count_listed(q: Sequence[int], k: Sequence[int], flat: FlatScores) -> Counted:
    """Scores of the tiles that are listed, if they have 64 queries and keys, without those of keys that all see."""
    shown = blocks_of(flat.scores().mask, int(q[2]), int(k[2]), 0, False, (64, 64), torch.device("cpu")).shown
    return Counted(q[0] * int(shown.expand(q[1], -1, -1).sum()) * 64 * 64, 0)


_KEEPING = kernels.kernels("stored_tiles", store=True)
_RECOMPUTING = kernels.kernels("tiles", store=False)


def count_memory(size: AttentionSize) -> Memory:
    """Of an ``s``, besides queries, keys, values and output."""
    kept = size.shown * size.number if size.consumers else 0
    piece, share = _count_piece(size)
    has_positions, rows = "positions" in size.features, int(size.queries * share)
    # Scores by distance have as many columns more as a tile has rows.
    in_tile, columns = TILE if size.in_tiles else size.time, size.shown // size.rows
    by_distance = piece + int(size.rows * share) * in_tile
    scratch = (piece * (not size.consumers) + by_distance * has_positions) * size.number + (3 + has_positions) * rows
    more_scratch = piece * size.number + rows * (1 + size.consumers)
    sums = 2 * (size.values // size.number) * size.single  # of gradients of keys and values
    backward = size.queries + sums + 2 * size.values * (size.number < SINGLE) + size.rows * SINGLE + 2 * rows
    is_half, of_tiles = size.number < SINGLE, 0
    if "bias" in size.features:  # a tile of each head, which is summed along diagonals
        of_tiles = size.heads * in_tile * (2 * columns + in_tile) * SINGLE + is_half * piece * SINGLE
    if "entmax" in size.features:
        of_tiles = 9 * piece * SINGLE
    backward += max(of_tiles, 2 * is_half * piece * SINGLE)  # dS in single precision, where sums are taken from it
    pending = size.consumers * (size.queries + size.values)
    forward = rows
    if size.dropout:
        scratch += piece * size.number
        more_scratch += (piece * size.number + rows) * bool(size.consumers)
        forward, backward = forward + _count_masks(size, 1), backward + _count_masks(size, 1 + size.consumers)
    if size.device == "cpu":
        return Memory(kept, forward, backward, pending, scratch, more_scratch)
    return Memory(kept, forward + scratch, backward + scratch + more_scratch, pending)


def count_reuse_memory(size: AttentionSize) -> Memory:
    """Of an ``l``, besides values and output."""
    _, share = _count_piece(size)
    rows, masks = int(size.queries * share), _count_masks(size, 1) if size.dropout else 0
    return Memory(0, rows + masks, size.queries + (size.values // size.number) * size.single + rows + masks)


def _count_masks(size: AttentionSize, layers: int) -> int:
    """Dropout's of a piece, and on a GPU the 16 bits that one is drawn from; a processor's are no tensor of torch's."""
    piece, _ = _count_piece(size)
    return piece * (layers + (0 if size.device == "cpu" else 2))


def _count_piece(size: AttentionSize) -> tuple[int, float]:
    """Entries of a piece, and which share of all that is."""
    piece = min(size.shown, STRETCH_ELEMENTS) if size.device == "cpu" else size.shown
    return piece, piece / size.shown
