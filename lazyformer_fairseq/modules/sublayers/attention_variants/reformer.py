"""``s[buckets=b]``: attention among positions that hash alike (Reformer, section 2); ``--reversible`` has its layers.

A key is the query of its position, scaled to length one. A round of hashing gives each position a bucket; positions
are sorted by bucket (and by place in the text within it) and cut into chunks. A query looks at keys of its own bucket,
in its own chunk, the one before and, in encoders, which the paper leaves open, the one after. Rounds are joined so that
a query looks at the union of what it sees in each, each key once (equations 5 and 6, and appendix A): by their sums,
with -log N at a key that N rounds show. For encoders alone: where chunks begin depends on all positions, and so would
what a causal query sees on its future, as in the published code.

Letters of shapes: R rounds, K positions, made up to whole chunks; H chunks, S positions of one, W those that it sees.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lazyformer_fairseq.modules.sublayers.attention_variants.interface import (
    Attend,
    Attention,
    AttentionOutput,
    VariantModule,
)
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions

# A query sees itself only where it sees nothing else (section 2, on shared-QK attention).
SELF_SCORE = -1e5
_EPSILON = 1e-6  # of the lengths of keys, as in the published code


class Reformer(VariantModule):
    """Queries are keys, of the keys' projection; there is none of queries.

    Vectors are hashed as they are before turns of rotary positions: alike tokens share a bucket wherever they are.

    Rotations are drawn anew in each forward pass, in training from torch's generator, so that a resumed run draws the
    same; in evaluation from a fixed seed, so that a model computes the same twice.

    A text that a chunk holds is not hashed: everything in it sees everything (as in the published code), whatever else
    the batch holds.
    """

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        self.buckets: int = options.values["buckets"]
        self.rounds: int = options.values["rounds"]
        self.chunk: int = options.values["chunk"]
        self.dropout = options.attention_dropout
        self.is_turned = bool(options.values.get("rope"))

    @override
    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Attend among the positions that hash alike."""
        vectors = attention.k_BNKD
        hashed = attention.k_BNKD
        if self.is_turned:
            vectors, hashed = attention.k_BNKD.chunk(2, -1)
        lengths_B = attention.scores.lengths_B
        places = vectors.size(-2)
        if places <= self.chunk:
            chunk = places
            buckets = torch.zeros_like(vectors[..., None, :, 0], dtype=torch.long)
        else:
            chunk = self.chunk
            generator = None
            if not self.training:
                generator = torch.Generator(vectors.device).manual_seed(0)
            rotations = random_rotations(hashed, self.rounds, self.buckets, generator)
            buckets = buckets_of(hashed, rotations)
            if lengths_B is not None:
                is_whole = lengths_B <= chunk
                buckets = buckets.masked_fill(is_whole[:, None, None, None], 0)
        dropout = 0.0
        if self.training:
            dropout = self.dropout
        output, distribution = attend(
            vectors,
            attention.values,
            buckets,
            buckets=self.buckets,
            chunk=chunk,
            is_padding_BK=attention.scores.is_padding(places),
            dropout=dropout,
        )
        return AttentionOutput(output, distribution)


class HashedDistribution(NamedTuple):
    """The distribution that an ``l`` reuses: the order of positions in each round, and the rounds' weights.

    Attributes:
        orders: of each round.
        by_round: of each round (B, N, H, S, W); over all rounds a query's sum to one.
        places: K, without those that fill the last chunk up.
        reach: chunks on either side that a chunk sees.
    """

    orders: list["Order"]
    by_round: list[Tensor]
    places: int
    reach: int

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Return P V (B, N, T, D); each call draws its own dropout mask."""
        output: Any = 0
        for order, probabilities in zip(self.orders, self.by_round, strict=True):
            size = probabilities.size(-2)
            chunks = order.sort(v_BNKD, size)
            seen = neighbours(chunks, self.reach)
            kept = F.dropout(probabilities, dropout)
            of_chunks = torch.matmul(kept, seen)
            output = output + order.undo(of_chunks.flatten(2, 3))
        return output[:, :, : self.places]

    @property
    def probabilities(self) -> Tensor:
        """P, (B, N, T, K): what it saves to write out, for those that need it."""
        some = self.by_round[0]
        one_hot = torch.eye(self.places, dtype=some.dtype, device=some.device)
        return self.attend(one_hot.expand(*some.shape[:2], -1, -1), 0.0)


class Order(NamedTuple):
    """Both (B, N, K): the place in the text of each of the K positions of a round, and the number of each place."""

    places: Tensor
    ranks: Tensor

    def sort(self, x_BNKD: Tensor, size: int) -> Tensor:
        """Sort (B, N, K or fewer, D) by place into chunks (B, N, H, S, D); places that fill up hold zeros."""
        filled = F.pad(x_BNKD, (0, 0, 0, self.places.size(-1) - x_BNKD.size(-2)))
        return _Permuted.apply(filled, self.places, self.ranks).unflatten(2, (-1, size))

    def undo(self, x_BNKD: Tensor) -> Tensor:
        """Put sorted positions (B, N, K, D) back into their places."""
        return _Permuted.apply(x_BNKD, self.ranks, self.places)


class _Permuted(torch.autograd.Function):
    """Rows in another order; the gradient is the opposite order, where torch's own would add rows up one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        return _rows(x, order)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        order, back = ctx.saved_tensors
        return _Permuted.apply(d, back, order), None, None


def _rows(x_BNKD: Tensor, order_BNK: Tensor) -> Tensor:
    batch, heads, places, size = x_BNKD.shape
    groups = torch.arange(batch * heads, device=order_BNK.device)
    first_of_group = groups.view(batch, heads, 1) * places
    rows = (order_BNK + first_of_group).flatten()
    return x_BNKD.reshape(-1, size).index_select(0, rows).view_as(x_BNKD)


def random_rotations(
    like_BNKD: Tensor,
    rounds: int,
    buckets: int,
    generator: Optional[torch.Generator],
) -> Tensor:
    """Draw rotations (N, D, R, buckets / 2), each head's and round's, from a standard normal distribution."""
    exact = torch.promote_types(like_BNKD.dtype, torch.float32)
    size = (like_BNKD.size(1), like_BNKD.size(-1), rounds, buckets // 2)
    return torch.randn(size, generator=generator, device=like_BNKD.device, dtype=exact)


@torch.no_grad()
def buckets_of(vectors_BNKD: Tensor, rotations_NDRh: Tensor) -> Tensor:
    """Return buckets (B, N, R, K): h(x) = argmax([x R; -x R]) (section 2, "Locality sensitive hashing")."""
    rotated = torch.einsum("bnkd,ndrh->bnrkh", vectors_BNKD.to(rotations_NDRh.dtype), rotations_NDRh)
    return torch.cat([rotated, -rotated], dim=-1).argmax(-1)


def attend(
    vectors_BNKD: Tensor,
    v_BNKD: Tensor,
    buckets_BNRK: Tensor,
    buckets: int,
    chunk: int,
    is_padding_BK: Optional[Tensor],
    dropout: float,
) -> tuple[Tensor, HashedDistribution]:
    """Attend among the positions of neighbouring chunks.

    Args:
        vectors_BNKD: queries, which are keys too.
        v_BNKD: values.
        buckets_BNRK: of each position in each round.
        buckets: how many there are.
        chunk: S.
        is_padding_BK: True at padding, at which no other position looks.
        dropout: on the distribution.

    Returns:
        Output (B, N, K, D), and the distribution.
    """
    orders, codes = _orders(buckets_BNRK, buckets, chunk, is_padding_BK)
    squares = vectors_BNKD.square().sum(-1, keepdim=True)
    keys = vectors_BNKD * torch.rsqrt(squares + _EPSILON * vectors_BNKD.size(-1))
    reach = int(buckets_BNRK.size(-1) > chunk)
    scores = []
    for number, order in enumerate(orders):
        queries = order.sort(vectors_BNKD, chunk)
        seen = neighbours(order.sort(keys, chunk), reach)
        products = torch.matmul(queries, seen.transpose(-2, -1))
        exact = products.to(torch.promote_types(products.dtype, torch.float32))
        scores.append(_masked(exact, number, orders, codes, reach))
    probabilities = [part.to(v_BNKD.dtype) for part in _softmax(scores, orders)]
    distribution = HashedDistribution(orders, probabilities, vectors_BNKD.size(-2), reach)
    return distribution.attend(v_BNKD, dropout), distribution


@torch.no_grad()
def _orders(
    buckets_BNRK: Tensor,
    buckets: int,
    chunk: int,
    is_padding_BK: Optional[Tensor],
) -> tuple[list[Order], Tensor]:
    """Return the order of each round, and codes (B, N, R, K) by place.

    Codes of two positions differ by as much as their chunks do, and by more than one where their buckets are not the
    same. Padding, and what fills the last chunk up, have buckets of their own behind all others.
    """
    found = buckets_BNRK
    places = buckets_BNRK.size(-1)
    if is_padding_BK is not None:
        found = found.masked_fill(is_padding_BK[:, None, None], buckets)
    # A graph must hold for inputs that need none and for those that need some.
    if torch.compiler.is_compiling():
        more = chunk - places % chunk
    else:
        more = -places % chunk
    found = F.pad(found, (0, more), value=buckets + 1)
    filled = found.size(-1)
    by_place = torch.arange(filled, device=found.device)
    sorted_places = (found * filled + by_place).argsort(-1)
    ranks = torch.empty_like(sorted_places).scatter_(-1, sorted_places, by_place.expand_as(sorted_places))
    num_chunks = filled // chunk
    codes = found * (num_chunks + 2) + ranks // chunk
    rounds = zip(sorted_places.unbind(2), ranks.unbind(2), strict=True)
    orders = [Order(places_of_round, ranks_of_round) for places_of_round, ranks_of_round in rounds]
    return orders, codes.int()


def _softmax(by_round: list[Tensor], orders: list[Order]) -> list[Tensor]:
    """Compute one softmax over the scores (B, N, H, S, W) of all rounds.

    Shifted by the best score and divided by the sum, not by a log-sum-exp: log R added to SELF_SCORE would be lost.
    """
    size = by_round[0].size(-2)

    def of_places(rows: Iterable[Tensor]) -> Tensor:
        """Return (R, B, N, K, 1), from one number per row of each round."""
        by_place = []
        for order, rows_of_round in zip(orders, rows, strict=True):
            by_place.append(order.undo(rows_of_round.flatten(2)[..., None]))
        return torch.stack(by_place)

    with torch.no_grad():
        best = of_places(scores.amax(-1) for scores in by_round).amax(0)
    powers = []
    for order, scores in zip(orders, by_round, strict=True):
        powers.append(torch.exp(scores - order.sort(best, size)))
    mass = of_places(powers_of_round.sum(-1) for powers_of_round in powers).sum(0)
    probabilities = []
    for order, powers_of_round in zip(orders, powers, strict=True):
        probabilities.append(powers_of_round / order.sort(mass, size))
    return probabilities


def _masked(
    scores: Tensor,
    number: int,
    orders: list[Order],
    codes: Tensor,
    reach: int,
) -> Tensor:
    """Return scores (B, N, H, S, W) of a round: other buckets and padding out, keys of N rounds with -log N."""
    with torch.no_grad():
        size = scores.size(-2)
        order = orders[number]

        def pairs(by_place_BNK: Tensor) -> tuple[Tensor, Tensor]:
            """Return (B, N, H, S, 1) of queries, and (B, N, H, 1, W) of the keys that they meet, or -9 for none."""
            chunks = by_place_BNK.gather(-1, order.places).unflatten(-1, (-1, size))[..., None]
            return chunks, neighbours(chunks, reach, fill=-9).transpose(-2, -1)

        def are_met(code_BNK: Tensor) -> Tensor:
            query, key = pairs(code_BNK)
            return (query - key).abs_() <= 1

        by_place = torch.arange(order.places.size(-1), device=scores.device, dtype=codes.dtype)
        query, key = pairs(by_place.expand_as(order.places))
        is_hidden = ~are_met(codes[:, :, number])
        is_self = query == key
        log_rounds = None
        if len(orders) > 1:
            rounds = torch.zeros_like(scores)
            for code in codes.unbind(2):
                rounds += are_met(code)
            log_rounds = rounds.clamp_(min=1).log_()
    if log_rounds is not None:
        scores = scores - log_rounds
    return scores.masked_fill(is_hidden, float("-inf")).masked_fill(is_self, SELF_SCORE)


def neighbours(chunks: Tensor, reach: int, fill: float = 0) -> Tensor:
    """Join each chunk of (B, N, H, S, D) with its neighbours: (B, N, H, W, D), with `fill` beyond the ends."""
    count = chunks.size(2)
    padded = F.pad(chunks, (0, 0, 0, 0, reach, reach), value=fill)
    shifted = [padded[:, :, first : first + count] for first in range(2 * reach + 1)]
    return torch.cat(shifted, dim=3)
