"""Everything that determines an attention distribution except queries and keys.

This includes the bias, padding, causality, relative positions, the mask, keys that are not tokens, and the function
that turns scores into weights.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention.masks import AttentionMask, mask_of

# LEARNED lists the tensors that may have gradients, in the order in which back ends return the gradients. _FIXED lists
# the tensors that never have gradients.
LEARNED = ("table_KN", "position_queries_BNTD", "distances_NKD", "exponent_N", "learned_BNTK")
_FIXED = ("bucket_by_distance", "lengths_B", "seen_BK")
Layout = Callable[[Tensor], Tensor]
_BY_SEQUENCE = (
    "lengths_B",
    "seen_BK",
    "given_BK",
    "given_places_BG",
    "places_BT",
    "position_queries_BNTD",
    "learned_BNTK",
)
# The parts that determine the additions shared by sublayers, as computed by :meth:`Scores.dense`.
_SHARED = {"table_KN", "bucket_by_distance", "lengths_B", "is_causal", "seen_BK"}


@dataclass(eq=False)
class Scores:
    """The additions to the scores of an attention call, and the keys that its queries see.

    There are T queries and K keys; the queries are the last T of the K positions. Back ends use the individual parts,
    none of which grows with T x K except `learned_BNTK`. For back ends that need a matrix, :meth:`dense` combines them.

    Attributes:
        table_KN: The learned bias, indexed by bucket and head; None for no bias.
        bucket_by_distance: The bucket of each distance, integers (K + T - 1,). The bucket of the distance key - query
            is at index K - 1 + (key - query). None without a bias.
        far: The distance at and beyond which all distances on the same side of the query share one bucket.
        lengths_B: The number of keys before the padding in each sequence; padding is always on the right. None without
            padding.
        is_causal: Whether later keys are hidden from queries.
        position_queries_BNTD: (Q + v) / sqrt(D) for Transformer-XL's positions; None without these positions.
        distances_NKD: The projected distances K - 1, ..., 0 and -1, (N, K + 1, D). The last one is for a future key,
            which no query sees; it is included so that :func:`relative_shift` can return a view.
        mask: The keys that queries see; None for all keys. The output of a query that sees no key is zero.
        seen_BK: True at keys that every query sees regardless of the mask; None if there are none.
        extra: The number of keys at the end that are not tokens. Every query sees them, without bias or positions.
        exponent_N: The alpha of entmax for each head; None for softmax.
        given_BK, given_places_BG: True at the positions marked by the caller, and the indices of these positions,
            padded with T. Back ends ignore them; an attention variant derives `seen_BK` from them.
        learned_BNTK: Learned scores to add; (1, N, T, K) if all sequences share them. None for no such scores.
        places_BT: The position of each token in its text; None if positions equal the tokens' indices. Back ends ignore
            it.
    """

    table_KN: Optional[Tensor] = None
    bucket_by_distance: Optional[Tensor] = None
    far: int = 0
    lengths_B: Optional[Tensor] = None
    is_causal: bool = False
    position_queries_BNTD: Optional[Tensor] = None
    distances_NKD: Optional[Tensor] = None
    mask: Optional[AttentionMask] = None
    seen_BK: Optional[Tensor] = None
    extra: int = 0
    exponent_N: Optional[Tensor] = None
    learned_BNTK: Optional[Tensor] = None
    given_BK: Optional[Tensor] = None
    given_places_BG: Optional[Tensor] = None
    places_BT: Optional[Tensor] = None

    def __post_init__(self) -> None:
        self._cache: dict[Hashable, Any] = {}  # a cache shared by the sublayers of a forward pass
        self.outlasts_checkpoints = False  # whether cached values outlive the activation checkpoint that computes them

    def with_padding(self, padding_mask_BK: Tensor) -> "Scores":
        """Return a copy for sequences with padding.

        In a sequence that consists only of padding, queries see the first key. Otherwise its distribution, and
        therefore every gradient, would be NaN.

        Args:
            padding_mask_BK: True at padding, which must follow the text in each sequence.
        """
        num_padding_B = padding_mask_BK.sum(-1)
        lengths_B = (padding_mask_BK.size(1) - num_padding_B).clamp(min=1)
        return replace(self, lengths_B=lengths_B)

    def with_given(self, given_BK: Tensor) -> "Scores":
        """Return a copy with positions marked by the caller. This synchronizes with the GPU.

        Args:
            given_BK: True at the marked positions.
        """
        time = given_BK.size(1)
        # A compiled graph must work for any number of marked positions.
        if torch.compiler.is_compiling():
            most = time
        else:
            most = max(1, int(given_BK.sum(-1).max()))
        all_places = torch.arange(time, device=given_BK.device)
        given_first = torch.where(given_BK, all_places, time).sort(-1).values
        return replace(self, given_BK=given_BK, given_places_BG=given_first[:, :most])

    def with_own(self, **parts: Any) -> "Scores":
        """Return a copy with some parts replaced for one sublayer.

        Values cached by :meth:`cached` stay shared unless they depend on the replaced parts.
        """
        own = replace(self, **parts)
        if not parts.keys() & _SHARED:
            own._cache = self._cache
            own.outlasts_checkpoints = self.outlasts_checkpoints
        return own

    def first_sequences(self, count: int) -> "Scores":
        """Return a copy for the first `count` sequences of a batch, with detached parts and an empty cache."""
        parts = {}
        for name in _BY_SEQUENCE:
            part = getattr(self, name)
            if part is not None:
                parts[name] = part[:count]
        for name in LEARNED:
            part = getattr(self, name)
            if part is not None:
                first = parts.get(name, part).detach()
                parts[name] = first.requires_grad_(part.requires_grad)
        return replace(self, **parts)

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return `make()`, called only once per cache key in each forward pass and shared by all sublayers."""
        if key in self._cache:
            return self._cache[key]
        if self.outlasts_checkpoints:
            # Make autograd save the same tensors that it would save outside the activation checkpoint.
            context: AbstractContextManager = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda kept: kept)
        else:
            context = nullcontext()
        with context:
            made = make()
        self._cache[key] = made
        return made

    @property
    def learned(self) -> tuple[Optional[Tensor], ...]:
        """The parts that may have gradients, in the order in which back ends return the gradients."""
        return tuple(getattr(self, name) for name in LEARNED)

    @property
    def is_learning(self) -> bool:
        """True if any part needs a gradient in this pass."""
        if not torch.is_grad_enabled():
            return False
        return any(part is not None and part.requires_grad for part in self.learned)

    def flat(self) -> "FlatScores":
        """Flatten the parts into a list of tensors and a list of integers, for autograd and torch's operators."""
        tensors = [getattr(self, name) for name in (*LEARNED, *_FIXED)]
        numbers = [self.far, int(self.is_causal), self.extra]
        if self.mask is not None:
            numbers += self.mask.flat()
        return FlatScores(tensors, numbers)

    def is_padding(self, keys: int) -> Optional[Tensor]:
        """Return a mask (B, K) that is True at padding; None without padding.

        Args:
            keys: K, the number of keys that are tokens.
        """
        if self.lengths_B is None:
            return None
        places = torch.arange(keys, device=self.lengths_B.device)
        return places >= self.lengths_B[:, None]

    def dense(
        self,
        time: int,
        keys: int,
        like: Tensor,
        layout: Optional[Layout] = None,
    ) -> Optional[Tensor]:
        """Return the additions to the scores as a tensor that broadcasts to (B, N, T, K); None if there are none.

        Additions shared by several sublayers are computed only once per forward pass.

        Args:
            time: T, the number of queries.
            keys: K, the number of keys, including `extra`.
            like: A tensor with the scores' device and data type.
            layout: A function that converts a tensor to the memory layout that a back end needs, without a copy if it
                already has that layout. None for any layout. torch.compile cannot trace a forward pass in which a
                function is part of a cache key.
        """
        tokens = keys - self.extra
        # The sizes are part of the key, because a sublayer may drop memory beyond the reach of its mask. Under
        # torch.compile they are not, because torch would compile a graph for each size.
        key: tuple[Hashable, ...] = (self.mask, layout)
        if not torch.compiler.is_compiling():
            key = (*key, time, tokens)
        added = self.cached(key, lambda: self._write(time, tokens, like, layout))
        if self.position_queries_BNTD is not None and self.distances_NKD is not None:
            by_distance = torch.matmul(self.position_queries_BNTD, self.distances_NKD.transpose(-2, -1))
            added = _sum(relative_shift(by_distance), added)
        if self.learned_BNTK is not None:
            added = _sum(self.learned_BNTK, added)
        if added is None:
            return None
        if self.extra:
            of_tokens = added.expand(*added.shape[:-1], tokens)
            added = F.pad(of_tokens, (0, self.extra))
        if layout is None:
            return added
        return layout(added)

    def _write(self, time: int, keys: int, like: Tensor, layout: Optional[Layout]) -> Optional[Tensor]:
        """Return the bias per distance, with -inf at padding, later keys, and keys hidden by the mask."""
        added = None
        if self.table_KN is not None:
            added = self._by_distance(self.table_KN, time, keys).to(like.dtype)
        for is_hidden in self._hidden(time, keys, like.device):
            if added is None:
                added = torch.zeros_like(is_hidden, dtype=like.dtype)
            added = added.masked_fill(is_hidden, float("-inf"))
        if added is None or layout is None:
            return added
        return layout(added)

    def _hidden(self, time: int, keys: int, device: torch.device) -> Iterator[Tensor]:
        """Yield masks that broadcast to (B, N, T, K), True at padding, later keys, and keys hidden by the mask."""
        is_padding = self.is_padding(keys)
        if is_padding is not None:
            yield is_padding[:, None, None, :]
        if self.is_causal:
            yield torch.ones(time, keys, dtype=torch.bool, device=device).triu(keys - time + 1)
        if self.mask is not None:
            seen = self.mask.dense(time, keys, device)
            if self.seen_BK is not None:
                seen = seen | self.seen_BK[:, None, None, :]
            yield ~seen

    def _by_distance(self, table_KN: Tensor, time: int, keys: int) -> Tensor:
        """Return the bias (1, N, T, K).

        Row i is a window of K consecutive distances, starting at index T - 1 - i, so the rows are sliding windows in
        reverse order. Each distance is looked up only once, whereas a (T, K) matrix of buckets would require a lookup
        per pair.
        """
        by_distance = table_KN[self.bucket_by_distance].t()
        if torch.compiler.is_compiling():  # unfold would make the window size a constant, so each T would need a graph
            rows = torch.arange(time, device=by_distance.device)
            columns = torch.arange(keys, device=by_distance.device)
            places = time - 1 + columns - rows[:, None]
            return by_distance[:, places].unsqueeze(0)
        return by_distance.unfold(-1, keys, 1).flip(-2).unsqueeze(0)


def _sum(own: Tensor, shared: Optional[Tensor]) -> Tensor:
    if shared is None:
        return own
    return own + shared


class FlatScores(NamedTuple):
    """A :class:`Scores` object flattened into a list of tensors and a list of integers."""

    tensors: Sequence[Optional[Tensor]]
    numbers: Sequence[int]

    def scores(self) -> Scores:
        """Rebuild the Scores object from the lists."""
        far, is_causal, extra, *mask = self.numbers
        parts = dict(zip((*LEARNED, *_FIXED), self.tensors, strict=True))
        return Scores(**parts, far=far, is_causal=bool(is_causal), extra=extra, mask=mask_of(mask))


def relative_shift(by_distance: Tensor) -> Tensor:
    """View scores indexed by query and distance as scores indexed by query and key.

    Args:
        by_distance: The scores by query and distance, contiguous (..., T, K + 1), for the distances K - 1, ..., 0, -1.

    Returns:
        The scores by query and key, (..., T, K). Entry (i, j) is the score of query i at its distance to key j, which
        is K - T + i - j. Entries of future keys are meaningless.
    """
    time = by_distance.size(-2)
    keys = by_distance.size(-1) - 1
    # Entry (i, j) is entry (i, T - 1 - i + j) of the input, which is at index T - 1 + i K + j after flattening its rows
    # of K + 1 entries.
    first = time - 1
    flat = by_distance.flatten(-2)
    return flat[..., first : first + time * keys].unflatten(-1, (time, keys))
