"""``s[buckets=b]``: attention among positions with the same hash (Reformer, section 2).

The reversible layers of the paper are the separate option ``--reversible``.

A key is the query of its position, scaled to length one. In each round of hashing every position is assigned to a
bucket; positions are sorted by bucket, and within a bucket by their place in the text, and cut into chunks. A query
sees the keys of its own bucket that lie in its own chunk or the chunk before. In encoders, a case that the paper leaves
open, it also sees the chunk after. A query sees the union of the keys of all rounds, each key once (equations 5 and 6,
and appendix A): the rounds share one softmax, in which a key that occurs in N rounds gets -log N added to its score.

The variant is for encoders only. Where chunks begin depends on all positions, so what a causal query sees would depend
on its future, as it does in the published code.

Letters of shapes: R rounds, K positions, filled up to whole chunks, H chunks, S positions per chunk, W positions that a
chunk sees.
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

# The score of a query with its own key, so low that it counts only if the query sees no other key (section 2, on
# shared-QK attention).
SELF_SCORE = -1e5
_EPSILON = 1e-6  # added when keys are scaled to length one, as in the published code


class Reformer(VariantModule):
    """Attention among positions with the same hash; queries are the projected keys, without a projection of their own.

    With rotary positions, vectors are hashed before rotation, so that similar tokens share a bucket wherever they are.

    The random rotations of the hash are drawn anew in each forward pass. In training they come from torch's generator,
    so that a resumed run draws the same ones. In evaluation they come from a fixed seed, so that results are
    repeatable.

    Texts that fit one chunk are not hashed: all their tokens see each other, as in the published code, whatever the
    other texts of the batch are.
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
        """Attend among the positions with the same hash; `inner` is not used."""
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
    """The distribution that an ``l`` reuses: the order of the positions and the weights in each round.

    Attributes:
        orders: the order of the positions in each round.
        by_round: the weights of each round (B, N, H, S, W). The weights of a query sum to one over all rounds.
        places: the number of positions, without those that fill up the last chunk.
        reach: the number of chunks on either side that a chunk sees.
    """

    orders: list["Order"]
    by_round: list[Tensor]
    places: int
    reach: int

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Return P V (B, N, T, D), with dropout on P; each call draws a dropout mask of its own."""
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
        """P (B, N, T, K), computed on demand: attention itself never stores a matrix of this size."""
        some = self.by_round[0]
        one_hot = torch.eye(self.places, dtype=some.dtype, device=some.device)
        return self.attend(one_hot.expand(*some.shape[:2], -1, -1), 0.0)


class Order(NamedTuple):
    """The order of the positions in a round, as a permutation and its inverse.

    Attributes:
        places: the place in the text of each sorted position (B, N, K).
        ranks: the rank in the sorted order of each place in the text (B, N, K).
    """

    places: Tensor
    ranks: Tensor

    def sort(self, x_BNKD: Tensor, size: int) -> Tensor:
        """Sort vectors (B, N, K or fewer, D) into chunks (B, N, H, S, D) of `size` positions.

        Positions that fill up the last chunk hold zeros.
        """
        filled = F.pad(x_BNKD, (0, 0, 0, self.places.size(-1) - x_BNKD.size(-2)))
        return _Permuted.apply(filled, self.places, self.ranks).unflatten(2, (-1, size))

    def undo(self, x_BNKD: Tensor) -> Tensor:
        """Put sorted vectors (B, N, K, D) back into the order of the text."""
        return _Permuted.apply(x_BNKD, self.ranks, self.places)


class _Permuted(torch.autograd.Function):
    """A permutation of rows, whose gradient is the inverse permutation.

    The gradient that torch derives for an indexing operation would instead add up rows one by one.
    """

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
    """Draw random rotations (N, D, R, buckets / 2) for all heads and rounds from a standard normal distribution.

    Args:
        like_BNKD: a tensor that gives N, D, the device and the precision (at least single precision).
        rounds: R.
        buckets: the number of buckets.
        generator: the random number generator; None for torch's own.
    """
    exact = torch.promote_types(like_BNKD.dtype, torch.float32)
    size = (like_BNKD.size(1), like_BNKD.size(-1), rounds, buckets // 2)
    return torch.randn(size, generator=generator, device=like_BNKD.device, dtype=exact)


@torch.no_grad()
def buckets_of(vectors_BNKD: Tensor, rotations_NDRh: Tensor) -> Tensor:
    """Return the bucket of each position in each round (B, N, R, K).

    This is h(x) = argmax([x R; -x R]) (section 2, "Locality sensitive hashing").
    """
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
    """Attend among the positions of neighbouring chunks that share a bucket.

    Args:
        vectors_BNKD: queries, which also serve as keys.
        v_BNKD: values.
        buckets_BNRK: the bucket of each position in each round.
        buckets: the number of buckets.
        chunk: S, the number of positions per chunk.
        is_padding_BK: True at padding, which no text position sees; None if there is none.
        dropout: the dropout on the distribution.

    Returns:
        The output (B, N, K, D) and the distribution.
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
    """Return the order of the positions in each round, and a code (B, N, R, K) for each place in the text.

    The codes of two positions of the same bucket differ by as much as the numbers of their chunks; the codes of
    positions of different buckets differ by more than one. Padding and the positions that fill up the last chunk have
    buckets of their own after all others.
    """
    found = buckets_BNRK
    places = buckets_BNRK.size(-1)
    if is_padding_BK is not None:
        found = found.masked_fill(is_padding_BK[:, None, None], buckets)
    # A compiled graph must serve inputs that need filling up and inputs that do not, so it always fills up.
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

    Scores are shifted by the largest score, and exponentials are divided by their sum. Subtracting a log-sum-exp would
    not work, because log R is lost to rounding when it is added to SELF_SCORE.
    """
    size = by_round[0].size(-2)

    def of_places(rows: Iterable[Tensor]) -> Tensor:
        """Return one value per row of each round in the order of the text, (R, B, N, K, 1)."""
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
    """Mask the scores (B, N, H, S, W) of a round, and correct them for keys that several rounds show.

    Keys of other buckets get -inf, and a query's own key gets SELF_SCORE. Keys that N rounds show get -log N added.

    Args:
        scores: the scores of the round.
        number: the index of the round.
        orders: the order of the positions in each round.
        codes: see :func:`_orders`.
        reach: the number of chunks on either side that a chunk sees.
    """
    with torch.no_grad():
        size = scores.size(-2)
        order = orders[number]

        def pairs(by_place_BNK: Tensor) -> tuple[Tensor, Tensor]:
            """Return values of queries (B, N, H, S, 1) and of the keys that they see (B, N, H, 1, W), -9 for no key."""
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
    """Join each chunk of (B, N, H, S, D) with its neighbours; return (B, N, H, W, D), with `fill` beyond the ends."""
    count = chunks.size(2)
    padded = F.pad(chunks, (0, 0, 0, 0, reach, reach), value=fill)
    shifted = [padded[:, :, first : first + count] for first in range(2 * reach + 1)]
    return torch.cat(shifted, dim=3)
