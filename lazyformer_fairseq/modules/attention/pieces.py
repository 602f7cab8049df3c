"""A distribution by pieces, as many entries at a time as a cache holds, and the memory that they take.

Each update writes distributions of a few hundred megabytes. The operating system hands out new memory page by page,
which took a third as long as computing what goes in: so a processor's is kept from one update to the next
(:func:`empty`, :func:`scratch`). GPUs need none of this: torch keeps their memory.
"""

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention.lazy_block import Implementation, empty_rows
from lazyformer_fairseq.modules.attention.scores import Scores

_free: list[np.ndarray] = []
_scratch = threading.local()


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialised contiguous tensor with the device and precision of `like`.

    Once nothing refers to it, its memory serves the next request of this size; a request of another size returns all
    free memory to the system.
    """
    if like.device.type != "cpu":
        return like.new_empty(shape)
    size = math.prod(shape) * like.element_size()
    if not size:
        return like.new_empty(shape)
    if _free and _free[-1].nbytes != size:
        _free.clear()
    memory = _free.pop() if _free else torch.empty(size, dtype=torch.uint8).numpy()
    lease = memory.view()  # the tensor's storage keeps this array alive until it is freed
    weakref.finalize(lease, _free.append, memory).atexit = False
    return torch.from_numpy(lease).view(like.dtype).view(*shape)


def scratch(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """As :func:`empty`, for what a function needs only while it runs: the next request of that name reuses the memory.

    Each thread has its own memory, as large as the largest request under each name.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size:
        return like.new_empty(shape)
    memory = getattr(_scratch, name, None)
    if memory is None or memory.nbytes < size:
        memory = torch.empty(size, dtype=torch.uint8).numpy()
        setattr(_scratch, name, memory)
    # A new tensor each time: code outside inference mode cannot write to one made inside it.
    return torch.from_numpy(memory[:size]).view(like.dtype).view(*shape)


def give_back() -> None:
    """Returns all free memory and this thread's scratch memory to the system, for example before measuring memory."""
    _free.clear()
    vars(_scratch).clear()


class Distribution:
    """P by pieces: read if it is stored, else computed.

    A subclass says what a piece is, how it is computed and multiplied. Rows of a piece are (X, L, ...): X its sequences
    times its heads, L its queries. It has:

    - ``stored_size(q, k, scores)``: how many numbers a stored distribution takes; a class method.
    - ``cut()``: all pieces; each has the `shape` of its probabilities.
    - ``compute(piece, out)``: P of a piece, into `out` if given.
    - ``combine(piece, probabilities, v)``: the rows of P V.
    - ``rows(x, piece)``, ``put_rows(out, piece, rows)``: a piece's rows of x (B, N, T, ...), and back.
    - ``sums(like)``: memory of this layout for sums over all pieces.
    - ``add_product(total, piece, probabilities, rows)``: total += P^T rows.
    - ``block_gradient(values, d_outputs, delta)``: as of an implementation.
    """

    def __init__(self, q: Tensor, k: Tensor, scores: Scores, stored: Optional[Tensor] = None):
        self.q, self.k, self.scores = q, k, scores
        self.scale = 1 / math.sqrt(max(1, q.size(-1)))
        self.stored = stored if stored is None or stored.numel() else None

    def pieces(self) -> Iterator[tuple[Any, Optional[Tensor]]]:
        """All pieces, each with its part of the stored distribution, where they lie one behind the other."""
        start = 0
        for piece in self.cut():
            end = start + math.prod(piece.shape)
            yield piece, None if self.stored is None else self.stored[start:end].view(piece.shape)
            start = end

    def read(self, piece: Any, stored: Optional[Tensor]) -> Tensor:
        """P of a piece, read if stored, else computed."""
        return self.compute(piece) if stored is None else stored

    def thinned(self, piece: Any, probabilities: Tensor) -> Tensor:
        """P of a piece after dropout."""
        return probabilities

    def multiply(self, v: Tensor, find: Callable[[Any, Optional[Tensor]], Tensor]) -> Tensor:
        """P V (B, N, T, D), of pieces of P as `find` has them."""
        output = empty_rows(self.q, v)
        for piece, part in self.pieces():
            self.put_rows(output, piece, self.combine(piece, self.thinned(piece, find(piece, part)), v))
        return output


class ByPieces(Implementation):
    """A kind of distribution as an implementation, which stores P or not: then each function computes it anew."""

    def __init__(self, kind: type[Distribution], store: bool):
        self.kind, self.keeps_distribution = kind, store

    def saved_like(self, q: Tensor, k: Tensor, scores: Scores) -> Tensor:
        return q.new_empty(self._size(q, k, scores))

    def _size(self, q: Tensor, k: Tensor, scores: Scores) -> int:
        return self.kind.stored_size(q, k, scores) if self.keeps_distribution else 0

    def attend_forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        stored = empty((self._size(q, k, scores),), q)
        distribution = self.kind(q, k, scores, stored)
        return distribution.multiply(v, distribution.compute), stored

    def reuse_forward(self, q: Tensor, k: Tensor, v: Tensor, saved: Tensor, scores: Scores) -> Tensor:
        distribution = self.kind(q, k, scores, saved)
        return distribution.multiply(v, distribution.read)

    def value_gradient(self, q: Tensor, k: Tensor, d_output: Tensor, saved: Tensor, scores: Scores) -> Tensor:
        distribution = self.kind(q, k, scores, saved)
        d_v = distribution.sums(empty_rows(k, d_output))
        for piece, part in distribution.pieces():
            probabilities = distribution.thinned(piece, distribution.read(piece, part))
            distribution.add_product(d_v, piece, probabilities, distribution.rows(d_output, piece))
        return d_v.to(d_output.dtype)

    def block_gradient(self, q, k, values, d_outputs, delta, saved, scores) -> list[Tensor]:
        return self.kind(q, k, scores, saved).block_gradient(values, d_outputs, delta)


class BiasByDistance:
    """A learned bias (N, K + T - 1), by how far key is ahead of query, and its gradient."""

    def __init__(self, scores: Scores, q: Tensor):
        self.table, self.bucket_by_distance = scores.table_KN, scores.bucket_by_distance
        self.by_distance = self.table[self.bucket_by_distance].t().contiguous().to(q.dtype)
        self.gradient = torch.zeros_like(self.by_distance, dtype=sum_dtype(q))

    def gradients(self) -> dict[int, Tensor]:
        """By their number in ``scores.learned``."""
        d_table = torch.zeros_like(self.table, dtype=self.gradient.dtype)
        d_table.index_add_(0, self.bucket_by_distance, self.gradient.t())
        return {0: d_table.to(self.table.dtype)}


def sum_along_diagonals(padded: Tensor) -> Tensor:
    """(H, R, K + R), each row followed by R zeros -> (H, K + R - 1): entry d is the sum of all (i, j) with i + j = d.

    Entry (i, j) is number i (K + R) + j, and so entry (i, i + j) of rows that are one shorter.
    """
    heads, rows, width = padded.shape
    return padded.flatten(1)[:, : rows * (width - 1)].view(heads, rows, width - 1).sum(1, dtype=sum_dtype(padded))


def sum_dtype(like: Tensor) -> torch.dtype:
    """Single precision or better, to sum in."""
    return torch.promote_types(like.dtype, torch.float32)
