"""What pieces of a distribution add to the products of queries and keys, and the gradients of that.

What depends on distances is a view of something smaller: see :mod:`.blockwise`.
"""

from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention.block_kernels import missing_gradients
from lazyformer_fairseq.modules.attention.blocks import kept_memory
from lazyformer_fairseq.modules.attention.scores import Scores, relative_shift


class Piece(NamedTuple):
    """A part of the distribution, (sequences, heads, rows); no query of it sees a key beyond `keys`."""

    sequences: slice
    heads: slice
    rows: slice
    keys: int

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        return self.sequences, self.heads, self.rows

    @property
    def shape(self) -> tuple[int, int, int]:
        """(sequences x heads, rows, keys)."""
        sequences, heads, rows = (part.stop - part.start for part in self.queries)
        return sequences * heads, rows, self.keys


class Dense:
    """Learned scores of every query and key: (B, N, T, K), or (1, N, T, K) for all sequences alike."""

    def __init__(self, learned: Tensor, batch: int, is_reversed: bool):
        self.learned = learned
        self.is_shared = learned.size(0) < batch
        self.is_reversed = is_reversed
        self.gradient: Optional[Tensor] = None

    def _part(self, x: Tensor, piece: Piece) -> Tensor:
        """A piece's part of x, (sequences or 1, heads, rows, K)."""
        return x[slice(None) if self.is_shared else piece.sequences, piece.heads, piece.rows]

    def view(self, piece: Piece) -> Tensor:
        """(sequences or 1, heads, rows, keys), in the piece's order."""
        part = self._part(self.learned, piece)[..., : piece.keys]
        return part.flip(-2) if self.is_reversed else part

    def room(self, piece: Piece, like: Tensor) -> Tensor:
        """Memory for dS of a piece: that of the gradient, where no other piece adds to it."""
        part = self._part(self._sums(), piece)
        has_gaps = part.size(0) > 1 and part.size(1) < self.learned.size(1)  # between sequences, for other heads
        if self.is_shared or self.is_reversed or has_gaps:
            return kept_memory.scratch("scores", piece.shape, like)
        return part.view(-1, *part.shape[2:])[..., : piece.keys]

    def add_gradient(self, piece: Piece, d_scores: Tensor) -> None:
        """Adds dS of a piece, which may stand in :meth:`room`."""
        part = self._part(self._sums(), piece)
        seen, hidden = part[..., : piece.keys], part[..., piece.keys :]
        found = d_scores.flip(1) if self.is_reversed else d_scores
        found = found.unflatten(0, (-1, part.size(1)))
        found = found.sum(0, keepdim=True) if found.size(0) > seen.size(0) else found
        if self.is_shared and piece.sequences.start:
            seen += found
        else:
            hidden.zero_()
            if found.data_ptr() != seen.data_ptr():
                seen.copy_(found)

    def _sums(self) -> Tensor:
        """Memory for the gradient; over several sequences it sums in single precision or better."""
        if self.gradient is None:
            dtype = _sum_dtype(self.learned) if self.is_shared else self.learned.dtype
            self.gradient = kept_memory.empty(self.learned.shape, self.learned.new_empty((), dtype=dtype))
        return self.gradient

    def gradients(self) -> Tensor:
        return self._sums().to(self.learned.dtype)


class Bias:
    """A learned bias by distance. A piece sees a view of it: row i, the last query first, is the window at i."""

    def __init__(self, scores: Scores, q: Tensor, k: Tensor):
        self.table, self.bucket_by_distance = scores.table_KN, scores.bucket_by_distance
        self.by_distance = self.table[self.bucket_by_distance].t().contiguous().to(q.dtype)
        self.time = q.size(-2)
        self.gradient: Optional[Tensor] = None

    def view(self, piece: Piece) -> Tensor:
        """(heads, rows, keys), for every sequence alike."""
        return self.by_distance[piece.heads].unfold(-1, piece.keys, 1)[:, self._windows(piece)]

    def _windows(self, piece: Piece) -> slice:
        """Where, among the K + T - 1 distances, the rows' windows begin."""
        return slice(self.time - piece.rows.stop, self.time - piece.rows.start)

    def room(self, piece: Piece, like: Tensor) -> Tensor:
        """Scratch memory for dS of a piece; each row leaves room for zeros behind it, see _sum_along_diagonals."""
        groups, rows, keys = piece.shape
        self.padded = kept_memory.scratch("scores", (groups, rows, keys + rows), like)
        return self.padded[..., :keys]

    def add_gradient(self, piece: Piece, d_scores: Tensor) -> None:
        """Adds the gradient of dS, which stands in :meth:`room`."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.by_distance, dtype=_sum_dtype(self.by_distance))
        self.padded[..., piece.keys :] = 0
        total = self.gradient[piece.heads]
        sums = _sum_along_diagonals(self.padded).unflatten(0, (-1, total.size(0))).sum(0)
        first = self._windows(piece).start
        total[:, first : first + sums.size(-1)] += sums

    def gradients(self) -> list[Tensor]:
        """Gradients of table, positions and distances."""
        d_table = torch.zeros_like(self.table, dtype=self.gradient.dtype)
        d_table.index_add_(0, self.bucket_by_distance, self.gradient.t())
        return [d_table.to(self.table.dtype), *missing_gradients(self.table, 2)]


class Positions:
    """Transformer-XL's positions: scores by query and distance, of which those by query and key are a view."""

    def __init__(self, scores: Scores, q: Tensor, k: Tensor):
        self.position_queries, self.all_distances = scores.position_queries_BNTD, scores.distances_NKD
        self.keys = k.size(-2)
        self.d_queries = torch.empty_like(self.position_queries)
        self.d_distances = torch.zeros_like(self.all_distances)

    def _queries(self, piece: Piece) -> Tensor:
        return self.position_queries[piece.queries].flatten(0, 1)

    def _distances(self, piece: Piece) -> Tensor:
        """A piece's distances, (sequences x heads, keys + 1, D)."""
        found = self.all_distances[piece.heads, self.keys - piece.keys :]
        return found.repeat(piece.sequences.stop - piece.sequences.start, 1, 1)

    def view(self, piece: Piece) -> Tensor:
        """(sequences x heads, rows, keys)."""
        groups, rows, keys = piece.shape
        by_distance = kept_memory.scratch("by_distance", (groups, rows, keys + 1), self.position_queries)
        torch.bmm(self._queries(piece), self._distances(piece).transpose(1, 2), out=by_distance)
        return relative_shift(by_distance)

    def room(self, piece: Piece, like: Tensor) -> Tensor:
        """Scratch memory for dS of a piece: a view of dS by distance."""
        groups, rows, keys = piece.shape
        self.by_distance = kept_memory.scratch("scores", (groups, rows, keys + 1), like)
        flat = self.by_distance.flatten(1)
        flat[:, : rows - 1] = 0
        flat[:, rows - 1 + rows * keys :] = 0
        return relative_shift(self.by_distance)

    def add_gradient(self, piece: Piece, d_scores: Tensor) -> None:
        """Adds the gradient of dS, which stands in :meth:`room`."""
        d_queries = torch.bmm(self.by_distance, self._distances(piece))
        self.d_queries[piece.queries] = d_queries.view_as(self.d_queries[piece.queries])
        total = self.d_distances[piece.heads, self.keys - piece.keys :]
        product = torch.bmm(self.by_distance.transpose(1, 2), self._queries(piece))
        total += product.unflatten(0, (-1, total.size(0))).sum(0)

    def gradients(self) -> list[Tensor]:
        """Gradients of table, positions and distances."""
        return [*missing_gradients(self.d_queries, 1), self.d_queries, self.d_distances]


def added_by_distance(scores: Scores, q: Tensor, k: Tensor) -> Union[Bias, Positions, None]:
    """What the scores add by distance to the products of queries and keys: at most one of the two."""
    if scores.table_KN is not None:
        return Bias(scores, q, k)
    return None if scores.position_queries_BNTD is None else Positions(scores, q, k)


def _sum_dtype(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)


def _sum_along_diagonals(padded: Tensor) -> Tensor:
    """(H, R, K + R), each row followed by R zeros -> (H, K + R - 1): entry d is the sum of all (i, j) with i + j = d.

    Entry (i, j) is number i (K + R) + j, and so entry (i, i + j) of rows that are one shorter.
    """
    heads, rows, width = padded.shape
    return padded.flatten(1)[:, : rows * (width - 1)].view(heads, rows, width - 1).sum(1, dtype=_sum_dtype(padded))
