"""Everything that shapes a distribution besides queries and keys, in one object, and its interface.

Bias, padding, causality, relative positions, mask, keys that are no tokens, and what turns scores into weights.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention.masks import AttentionMask, mask_of

# The tensors that have gradients, in the order of a back end's gradients, and those that have none.
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
# Parts of which :meth:`Scores.dense` writes what sublayers share.
_SHARED = {"table_KN", "bucket_by_distance", "lengths_B", "is_causal", "seen_BK"}


@dataclass(eq=False)
class Scores:
    """One attention's, over T queries and K keys: the queries are the last T of the K positions.

    Back ends read its parts, none of which grows with T x K; :meth:`dense` writes it out for those that cannot.

    Attributes:
        table_KN: learned bias by bucket and head; None where there is none.
        bucket_by_distance: (K + T - 1,) integers: entry K - 1 + (key - query) is the bucket; None without a table.
        far: from this distance on, on either side, all share a bucket.
        lengths_B: keys from there on are padding; None where nothing is padded. Networks move text to the left.
        is_causal: a query sees no key after itself.
        position_queries_BNTD: (Q + v) / sqrt(D) of Transformer-XL's positions; None without such positions.
        distances_NKD: (N, K + 1, D): the projected distances K - 1, ..., 0 and -1. The last belongs to a key in the
            future, which no query may look at: with it, :func:`relative_shift` is a view.
        mask: which keys a query may look at besides; None for all. A query that then sees none has an output of zeros.
        seen_BK: True at keys that every query sees, whatever the mask; None for none.
        extra: the last so many keys are no tokens: every query sees them, without bias, positions or padding.
        exponent_N: alpha of entmax for each head, in place of softmax; None for softmax.
        given_BK, given_places_BG: True at the positions that the caller gives, and where they are, T in place of those
            that a sequence lacks. No back end reads them: an attention variant makes `seen_BK` of them.
        learned_BNTK: learned scores to add, or (1, N, T, K) for all sequences alike; None for none.
        places_BT: where each token stands in its text, if not at its index. No back end reads them.
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
        self._written: dict[Hashable, Any] = {}  # sublayers of a forward pass share it
        self.outlasts_checkpoints = False  # whether what is written is no part of torch's checkpoint around it

    def with_padding(self, padding_mask_BK: Tensor) -> "Scores":
        """Return the same over sequences with padding, True in the mask, behind the text of each.

        A row of padding alone sees its first key: a distribution over no keys, and every gradient, would be NaN.
        """
        num_padding_B = padding_mask_BK.sum(-1)
        lengths_B = (padding_mask_BK.size(1) - num_padding_B).clamp(min=1)
        return replace(self, lengths_B=lengths_B)

    def with_given(self, given_BK: Tensor) -> "Scores":
        """Return the same with positions that the caller gives, True in the mask; waits for a GPU."""
        time = given_BK.size(1)
        # A graph must hold for any number of them.
        if torch.compiler.is_compiling():
            most = time
        else:
            most = max(1, int(given_BK.sum(-1).max()))
        all_places = torch.arange(time, device=given_BK.device)
        given_first = torch.where(given_BK, all_places, time).sort(-1).values
        return replace(self, given_BK=given_BK, given_places_BG=given_first[:, :most])

    def with_own(self, **parts: Any) -> "Scores":
        """Return the same with parts of one sublayer; what all sublayers of a forward pass share is written once."""
        own = replace(self, **parts)
        if not parts.keys() & _SHARED:
            own._written = self._written
            own.outlasts_checkpoints = self.outlasts_checkpoints
        return own

    def first_sequences(self, count: int) -> "Scores":
        """Return those of the first sequences of a batch; nothing is written yet, and no gradient leads further."""
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

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, one object for all sublayers of a forward pass that share padding and mask."""
        if key in self._written:
            return self._written[key]
        if self.outlasts_checkpoints:
            # Let autograd keep what it would keep outside of a checkpoint.
            context: AbstractContextManager = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda kept: kept)
        else:
            context = nullcontext()
        with context:
            made = make()
        self._written[key] = made
        return made

    @property
    def learned(self) -> tuple[Optional[Tensor], ...]:
        """Return the parts that have gradients, in the order in which back ends return those."""
        return tuple(getattr(self, name) for name in LEARNED)

    @property
    def is_learning(self) -> bool:
        """Return whether any part will get a gradient in this pass."""
        if not torch.is_grad_enabled():
            return False
        return any(part is not None and part.requires_grad for part in self.learned)

    def flat(self) -> "FlatScores":
        """Return two lists for autograd and torch's operators, whose arguments are tensors and numbers."""
        tensors = [getattr(self, name) for name in (*LEARNED, *_FIXED)]
        numbers = [self.far, int(self.is_causal), self.extra]
        if self.mask is not None:
            numbers += self.mask.flat()
        return FlatScores(tensors, numbers)

    def is_padding(self, keys: int) -> Optional[Tensor]:
        """Return (B, K), True at keys that are padding; None where none is. `keys` are those of tokens."""
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
        """Return the additions to scores, broadcastable to (B, N, T, K); None if there are none.

        It writes what sublayers share once per forward pass.

        Args:
            time: T.
            keys: K, `extra` included.
            like: a tensor of the scores' device and precision.
            layout: lays out what is written, the same numbers, as a back end reads them, and leaves what fits as it is;
                None for any layout. torch.compile makes no graph of a pass that keeps something by a function.
        """
        tokens = keys - self.extra
        # A sublayer may leave out memory beyond its reach, which follows from its mask. torch.compile would make a
        # graph for each size that is a key.
        key: tuple[Hashable, ...] = (self.mask, layout)
        if not torch.compiler.is_compiling():
            key = (*key, time, tokens)
        added = self.once(key, lambda: self._write(time, tokens, like, layout))
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
        """Return the bias by distance, with -inf at padding, at the future and at what the mask hides."""
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
        """Yield masks broadcastable to (B, N, T, K), True at padding, at the future, and at what the mask hides."""
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
        """Return the bias (1, N, T, K): rows are queries, columns keys.

        Row i is the window of K distances that starts T - 1 - i behind the first: sliding windows, the last one first.
        This looks each distance up once, where indexing by a (T, K) matrix of buckets would look each pair up.
        """
        by_distance = table_KN[self.bucket_by_distance].t()
        if torch.compiler.is_compiling():  # it takes the windows' size for a constant: a graph for each T
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
    """A :class:`Scores` as two lists."""

    tensors: Sequence[Optional[Tensor]]
    numbers: Sequence[int]

    def scores(self) -> Scores:
        """Return the object it came from."""
        far, is_causal, extra, *mask = self.numbers
        parts = dict(zip((*LEARNED, *_FIXED), self.tensors, strict=True))
        return Scores(**parts, far=far, is_causal=bool(is_causal), extra=extra, mask=mask_of(mask))


def relative_shift(by_distance: Tensor) -> Tensor:
    """Return scores by query and distance as scores by query and key, a view.

    Args:
        by_distance: contiguous (..., T, K + 1), the distances K - 1, ..., 0, -1.

    Returns:
        (..., T, K): row i, column j holds what row i of `by_distance` has for the distance between the i-th query and
        the j-th key, K - T + i - j; where j is in the future, a meaningless number.
    """
    time = by_distance.size(-2)
    keys = by_distance.size(-1) - 1
    # Entry (i, j) is entry (i, T - 1 - i + j) of the input, and so number T - 1 + i K + j of its flat rows of K + 1.
    first = time - 1
    flat = by_distance.flatten(-2)
    return flat[..., first : first + time * keys].unflatten(-1, (time, keys))
