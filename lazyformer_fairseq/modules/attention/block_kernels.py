"""The kernels that a lazy block needs, as operators that torch.compile takes as they are."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Optional, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lazyformer_fairseq.modules.attention.scores import FlatScores, Scores


class BlockKernels(NamedTuple):
    """The four functions of an implementation.

    In all of them q is (B, N, T, E), k (B, N, K, E) and values (B, N, K, D); E may differ from D, and is 0 where
    learned scores alone make the distribution P. `saved` is what the implementation keeps of P.

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


class Counted(NamedTuple):
    """How many scores an implementation computes, of all sequences and heads: by key, and by distance."""

    by_key: int
    by_distance: int


def dense_scores(q: Sequence[int], k: Sequence[int], scores: FlatScores) -> Counted:
    """All of them."""
    distances = scores.tensors[2]
    queries = math.prod(q[:3])
    return Counted(queries * k[2], 0 if distances is None else queries * distances[1])


def as_operators(
    name: str,
    kernels: BlockKernels,
    saved_like: Callable[[Tensor, Tensor, Scores], Tensor],
    keeps_distribution: bool,
    count_scores: Callable[[Sequence[int], Sequence[int], FlatScores], Counted] = dense_scores,
) -> BlockKernels:
    """The same functions as operators ``lazyformer::NAME_attend_forward`` and so on, which take flat scores.

    Args:
        saved_like: makes from (q, k, scores) an empty tensor like `saved`.
        keeps_distribution: whether `saved` has it.
        count_scores: how many scores are computed, from the shapes of q, k and all tensors of scores.
    """

    def operator(function: str, schema: str, fake: Callable) -> Callable:
        def in_given_precision(*args):
            *others, tensors, numbers = args
            with torch.autocast(args[0].device.type, enabled=False):
                return getattr(kernels, function)(*others, FlatScores(tensors, numbers).scores())

        arguments, result = schema.split(" -> ")
        made = torch.library.custom_op(
            f"lazyformer::{name}_{function}",
            in_given_precision,
            mutates_args=(),
            schema=f"({arguments}, Tensor?[] tensors, int[] numbers) -> {result}",
        )
        made.register_fake(fake)
        register_flop_formula(getattr(torch.ops.lazyformer, f"{name}_{function}"))(
            partial(_count_flops, function, keeps_distribution, count_scores)
        )
        return lambda *args: made(*args[:-1], *args[-1].flat())

    return BlockKernels(
        operator(
            "attend_forward",
            "Tensor q, Tensor k, Tensor v -> (Tensor, Tensor)",
            lambda q, k, v, *flat: (empty_rows(q, v), saved_like(q, k, FlatScores(*flat).scores())),
        ),
        operator(
            "reuse_forward",
            "Tensor q, Tensor k, Tensor v, Tensor saved -> Tensor",
            lambda q, _k, v, *_: empty_rows(q, v),
        ),
        operator(
            "value_gradient",
            "Tensor q, Tensor k, Tensor d_output, Tensor saved -> Tensor",
            lambda _q, k, d_output, *_: empty_rows(k, d_output),
        ),
        operator(
            "block_gradient",
            "Tensor q, Tensor k, Tensor[] values, Tensor[] d_outputs, Tensor delta, Tensor saved -> Tensor[]",
            _fake_block_gradient,
        ),
    )


class HasShape(Protocol):
    """A piece of a distribution, which implementations compute piece by piece."""

    @property
    def shape(self) -> Sequence[int]:
        """Of its probabilities."""


PieceT = TypeVar("PieceT", bound=HasShape)


def with_stored(pieces: Iterable[PieceT], stored: Optional[Tensor]) -> Iterator[tuple[PieceT, Optional[Tensor]]]:
    """Each piece with its part of `stored`, where they lie one behind the other; None where nothing is stored."""
    start = 0
    for piece in pieces:
        end = start + math.prod(piece.shape)
        yield piece, None if stored is None else stored[start:end].view(piece.shape)
        start = end


def empty_heads(like: Tensor) -> Tensor:
    """(B, N, T, D) whose heads lie side by side in memory, so that merging them is a view."""
    batch, heads, time, size = like.shape
    return like.new_empty(batch, time, heads, size).transpose(1, 2)


def empty_rows(rows: Tensor, like: Tensor) -> Tensor:
    """As :func:`empty_heads`, as many rows as `rows` has, and as wide as `like`."""
    return empty_heads(like.new_empty(()).expand(*rows.shape[:-1], like.size(-1)))


def empty_gradients(scores: Scores, q: Tensor) -> list[Tensor]:
    """Uninitialised gradients of ``scores.learned``, (0,) where a part is missing."""
    *parts, dense = scores.learned
    gradients = [q.new_empty(0) if part is None else torch.empty_like(part) for part in parts]
    return [*gradients, q.new_empty(0) if dense is None else dense.new_empty(dense.shape)]


def missing_gradients(like: Tensor, count: int) -> list[Tensor]:
    """In place of gradients of parts that are missing."""
    return [like.new_empty(0) for _ in range(count)]


def _fake_block_gradient(q, k, values, d_outputs, delta, saved, tensors, numbers):
    learned = empty_gradients(FlatScores(tensors, numbers).scores(), q)
    return [empty_heads(q), empty_heads(k), empty_heads(values[0]), *learned]


def _count_flops(function: str, keeps_distribution: bool, count_scores: Callable, q, k, *others, out_shape=None) -> int:
    """For torch's FlopCounterMode, which hands shapes: products of scores with keys, with values, with distances."""
    *others, tensors, numbers = others
    is_block = function == "block_gradient"
    by_key, by_value, by_distance = (2, 1 + len(others[0]), 2) if is_block else (0, 1, 0)
    if function == "attend_forward" or not keeps_distribution:  # it computes P
        by_key, by_distance = by_key + 1, by_distance + 1
    values = others[0][0] if is_block else others[0]
    counted = count_scores(q, k, FlatScores(tensors, numbers))
    distance_size = 0 if tensors[2] is None else tensors[2][2]
    of_keys = counted.by_key * (by_key * q[3] + by_value * values[3])
    return 2 * (of_keys + counted.by_distance * by_distance * distance_size)
