"""``s[buckets=b]``: LSH attention among positions with the same hash (Reformer, section 2).

The paper's reversible layers are available separately through the option ``--reversible``.

The key at each position is the query at that position, scaled to unit length. Each round of hashing assigns every
position to a bucket. Positions are sorted by bucket, and within a bucket by position, and split into chunks. A query
attends to the keys of its bucket that are in its own chunk or the previous one. Encoders, which the paper does not
cover, also include the next chunk. The keys of all rounds form a union, in which each key counts once (equations 5 and
6, and appendix A): all rounds share one softmax, and a key that occurs in N rounds has log N subtracted from its score.

The variant is for encoders only. Chunk boundaries depend on all positions, so the keys that a causal query sees would
depend on future positions, as they do in the published code.

Shape letters: R rounds, K positions (padded to a multiple of the chunk size), H chunks, S positions per chunk, W
positions that a chunk attends to.
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

# The score of a query with its own key. It is so low that it matters only if there is no other key (section 2, on
# shared-QK attention).
SELF_SCORE = -1e5
_EPSILON = 1e-6  # added when keys are scaled to unit length, as in the published code


class Reformer(VariantModule):
    """LSH attention among positions with the same hash; queries and keys share one projection.

    With rotary positions, vectors are hashed before rotation, so similar tokens share a bucket regardless of position.

    The hash's random rotations are resampled in each forward pass. During training they use torch's generator, so a
    resumed run draws the same ones. During evaluation they use a fixed seed, which makes results reproducible.

    Texts that fit in one chunk are not hashed. As in the published code, all their tokens attend to each other,
    regardless of the other texts in the batch.
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
        """Compute attention among positions with the same hash; `inner` is not used."""
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
    """The reusable attention distribution (for ``l`` sublayers): the order of positions and the weights in each round.

    Attributes:
        orders: the order of the positions in each round.
        by_round: the weights of each round (B, N, H, S, W). A query's weights sum to one over all rounds.
        places: the number of positions, without the padding of the last chunk.
        reach: the number of neighboring chunks on each side that a chunk attends to.
    """

    orders: list["Order"]
    by_round: list[Tensor]
    places: int
    reach: int

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Return P V (B, N, T, D), with dropout on P; each call draws a new dropout mask."""
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
        """The dense matrix P (B, N, T, K), computed on demand; attention itself never stores it."""
        some = self.by_round[0]
        one_hot = torch.eye(self.places, dtype=some.dtype, device=some.device)
        batch, heads = some.shape[:2]
        return self.attend(one_hot.expand(batch, heads, -1, -1), dropout=0.0)


class Order(NamedTuple):
    """The sorted order of the positions in one round, as a permutation and its inverse.

    Attributes:
        places: the original position of each sorted position (B, N, K).
        ranks: the rank of each original position in the sorted order (B, N, K).
    """

    places: Tensor
    ranks: Tensor

    def sort(self, x_BNKD: Tensor, size: int) -> Tensor:
        """Sort vectors (B, N, K or fewer, D) into chunks (B, N, H, S, D) of `size` positions.

        The last chunk is padded with zeros.
        """
        missing = self.places.size(-1) - x_BNKD.size(-2)
        filled = F.pad(x_BNKD, (0, 0, 0, missing))
        in_order = _Permuted.apply(filled, self.places, self.ranks)
        return in_order.unflatten(2, (-1, size))

    def undo(self, x_BNKD: Tensor) -> Tensor:
        """Restore the original order of sorted vectors (B, N, K, D)."""
        return _Permuted.apply(x_BNKD, self.ranks, self.places)


class _Permuted(torch.autograd.Function):
    """A permutation of rows; its gradient is the inverse permutation.

    The gradient of torch's indexing operations would instead accumulate rows one by one.
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
    """Sample random rotations (N, D, R, buckets / 2) for all heads and rounds from a standard normal distribution.

    Args:
        like_BNKD: a tensor that determines N, D, the device and the dtype (at least single precision).
        rounds: R.
        buckets: the number of buckets.
        generator: the random number generator; None for torch's global one.
    """
    exact = torch.promote_types(like_BNKD.dtype, torch.float32)
    size = (like_BNKD.size(1), like_BNKD.size(-1), rounds, buckets // 2)
    return torch.randn(size, generator=generator, device=like_BNKD.device, dtype=exact)


@torch.no_grad()
def buckets_of(vectors_BNKD: Tensor, rotations_NDRh: Tensor) -> Tensor:
    """Compute the bucket of each position in each round (B, N, R, K).

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
    """Compute attention within buckets, among positions of the same and neighboring chunks.

    Args:
        vectors_BNKD: queries, which are also used as keys.
        v_BNKD: values.
        buckets_BNRK: the bucket of each position in each round.
        buckets: the number of buckets.
        chunk: S, the number of positions per chunk.
        is_padding_BK: True at padding, which is masked; None if there is no padding.
        dropout: the dropout rate on the distribution.

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
    """Return the order of the positions in each round, and a code (B, N, R, K) for each position.

    The codes of two positions in the same bucket differ by as much as their chunk indices. The codes of positions in
    different buckets differ by more than one. Padding tokens share one extra bucket, and the padding of the last chunk
    another; both come after all other buckets.
    """
    found = buckets_BNRK
    places = buckets_BNRK.size(-1)
    if is_padding_BK is not None:
        found = found.masked_fill(is_padding_BK[:, None, None], buckets)
    # A compiled graph must support inputs with and without padding, so it always pads.
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
    """Compute a single softmax over the scores (B, N, H, S, W) of all rounds.

    Scores are shifted by the maximum, and the exponentials are divided by their sum. Subtracting a log-sum-exp would
    not work, because log R would be lost to rounding when added to SELF_SCORE.
    """
    size = by_round[0].size(-2)

    def of_places(rows: Iterable[Tensor]) -> Tensor:
        """Restore the original order of per-row values in each round; return (R, B, N, K, 1)."""
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
    """Mask the scores (B, N, H, S, W) of a round, and correct them for keys that occur in several rounds.

    Keys in other buckets get -inf, and a query's own key gets SELF_SCORE. For keys that occur in N rounds, log N is
    subtracted.

    Args:
        scores: the scores of the round.
        number: the index of the round.
        orders: the order of the positions in each round.
        codes: see :func:`_orders`.
        reach: the number of neighboring chunks on each side that a chunk attends to.
    """
    with torch.no_grad():
        size = scores.size(-2)
        order = orders[number]

        def pairs(by_place_BNK: Tensor) -> tuple[Tensor, Tensor]:
            """Return the values for queries (B, N, H, S, 1) and for their keys (B, N, H, 1, W); -9 for missing keys."""
            in_order_BNK = by_place_BNK.gather(-1, order.places)
            chunks = in_order_BNK.unflatten(-1, (-1, size))[..., None]
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
    """Join each chunk of (B, N, H, S, D) with its neighbors; return (B, N, H, W, D), with `fill` beyond the ends."""
    count = chunks.size(2)
    padded = F.pad(chunks, (0, 0, 0, 0, reach, reach), value=fill)
    shifted = [padded[:, :, first : first + count] for first in range(2 * reach + 1)]
    return torch.cat(shifted, dim=3)
