"""``s[synthesizer=...]``: learned scores instead of query-key dot products (Tay et al., 2020, section 3).

| term | score of query i and key j, for each head | parameters |
|---|---|---|
| ``dot`` | q_i k_j / sqrt(D), in causal models with Transformer-XL's positions | Q and K projections |
| ``dense`` | W_j relu(q_i) | Q projection and D L |
| ``factorised_dense`` | A[j mod a] B[j div a], (A, B) = W relu(q_i) | Q projection and D (a + b) |
| ``random`` | R_ij | N L^2 |
| ``fixed`` | R_ij, not trained | none |
| ``factorised_random`` | (R1 R2^T)_ij | 2 N L k |

L is the maximum input length. Several terms are mixed with learned weights that sum to 1. Where the paper does not
specify details, we follow the authors' published code, ``synthetic_attention`` in Mesh TensorFlow:

- The first layer of ``dense`` is the query projection, which is shared with ``dot``. The second layer has no bias and
  is shared by all heads. (Both are also true of Google's Long Range Arena.)
- R is initialized from Glorot's uniform distribution, for all heads at once.
- A mixture has one weight per term and sublayer, and all weights are equal initially. (The paper's equation has one per
  head.)
- Causal models mask future keys.

We chose the remaining details: a is the largest power of two up to sqrt(L), and b is L / a, rounded up.
``factorised_dense`` uses all pairs of an entry of A and an entry of B, so one of the paper's tiling functions must
repeat each entry. The default k = 8 is taken from the paper; the published code uses 16. Position i is the i-th token
of the text, so padding on the left has no position.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from typing_extensions import override

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.linear import Linear, multiply_by_part
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import (
    Attend,
    Attention,
    AttentionOutput,
    VariantModule,
)
from lazyformer_fairseq.modules.sublayers.interface import Settings, SublayerOptions
from lazyformer_fairseq.patterns.attention_variants import chosen_variants

DOT = "dot"
RANDOM = "random"
FIXED = "fixed"
FACTORISED_RANDOM = "factorised_random"
DENSE = "dense"
FACTORISED_DENSE = "factorised_dense"
OF_QUERIES = (DENSE, FACTORISED_DENSE)


def terms_of(values: Settings) -> tuple[str, ...]:
    """Return the names of the synthesizer terms in the settings of an ``s``."""
    return tuple(values["synthesizer"].split("+"))


def factors_of(length: int) -> tuple[int, int]:
    """Return a and b of ``factorised_dense`` for L = `length`: a b >= L, with equality if L is a power of two."""
    a = 2 ** int(math.log2(math.isqrt(length)))
    b = math.ceil(length / a)
    return a, b


class Synthesizer(VariantModule):
    """Attention with learned scores, which replace query-key dot products or are added to them."""

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        values = options.values
        heads = options.num_heads
        self.terms = terms_of(values)
        length = options.max_positions
        if options.is_causal:
            length = values["length"]
        self.length = length
        if RANDOM in self.terms:
            self.random_NLL = nn.Parameter(_glorot(heads, length, length))
        self.fixed_NLL: Tensor
        if FIXED in self.terms:
            self.register_buffer("fixed_NLL", _glorot(heads, length, length))
        if FACTORISED_RANDOM in self.terms:
            self.query_factors_NLE = nn.Parameter(_glorot(heads, length, values["rank"]))
            self.key_factors_NLE = nn.Parameter(_glorot(heads, length, values["rank"]))
        if DENSE in self.terms:
            self.dense = Linear(options.head_size, length, bias=False)
        if FACTORISED_DENSE in self.terms:
            self.factors = factors_of(length)
            self.factorised_dense = Linear(options.head_size, sum(self.factors), bias=False)
        self.mixture: Optional[nn.Parameter] = None
        if len(self.terms) > 1:
            self.mixture = nn.Parameter(torch.zeros(len(self.terms)))
        self.may_share = _may_share(values)
        self.dropout = options.attention_dropout

    @override
    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Compute attention with learned scores; if all sequences share the scores, compute the distribution once."""
        self._check_length(attention.x_BTC.size(1))
        attention = self._with_scores(attention)
        has_dropout = self.training and self.dropout
        has_padding = attention.scores.lengths_B is not None
        if not self.may_share or has_dropout or has_padding or attention.x_BTC.size(0) == 1:
            return inner(attention)
        return _attend_together(attention, inner)

    def _check_length(self, time: int) -> None:
        if time > self.length:
            raise UserError(
                f"an input has {time} tokens, but this model's synthesizer supports only {self.length}; shorten the "
                "input, or train a model with a larger length"
            )

    def _with_scores(self, attention: Attention) -> Attention:
        """Return the inputs with the learned scores added, and with only the queries and keys that the terms need."""
        time = attention.x_BTC.size(1)
        weights = self._weights(attention.values)
        q = attention.q_BNTD
        k = attention.k_BNKD
        scores = attention.scores
        hidden_BNTD = q
        if DENSE in self.terms or FACTORISED_DENSE in self.terms:
            hidden_BNTD = q.relu()
        learned = None
        for term in self.terms:
            if term in (DOT, FACTORISED_RANDOM):
                continue
            scores_of_term = _scaled(self._scores(term, hidden_BNTD, time), weights[term])
            if learned is None:
                learned = scores_of_term
            else:
                learned = learned + scores_of_term
        if learned is not None:
            scores = scores.with_own(learned_BNTK=learned.to(attention.values.dtype))

        if DOT not in self.terms:
            q = q[..., :0]
            k = k[..., :0]
        else:
            q = _scaled(q, weights[DOT])
            if scores.position_queries_BNTD is not None:
                position_queries = _scaled(scores.position_queries_BNTD, weights[DOT])
                scores = scores.with_own(position_queries_BNTD=position_queries)
        if FACTORISED_RANDOM in self.terms:
            q, k = self._with_factors(q, k, weights[FACTORISED_RANDOM], time)
        return replace(attention, q_BNTD=q, k_BNKD=k, scores=scores)

    def _weights(self, like: Tensor) -> dict[str, Optional[Tensor]]:
        """Return the mixture weight of each term; None if there is only one term."""
        if self.mixture is None:
            return dict.fromkeys(self.terms)
        exact = torch.promote_types(self.mixture.dtype, torch.float32)
        weights = self.mixture.softmax(0, exact).to(like.dtype)
        return dict(zip(self.terms, weights.unbind(), strict=True))

    def _scores(self, term: str, hidden_BNTD: Tensor, time: int) -> Tensor:
        """Return the scores of one term (B or 1, N, T, T)."""
        if term == RANDOM:
            return first_rows_and_columns(self.random_NLL, time)
        if term == FIXED:
            return first_rows_and_columns(self.fixed_NLL, time)
        if term == DENSE:
            return multiply_by_part(self.dense, hidden_BNTD, 0, time)
        a, b = self.factorised_dense(hidden_BNTD).split(self.factors, -1)
        products = b.unsqueeze(-1) * a.unsqueeze(-2)
        return products.flatten(-2)[..., :time]

    def _with_factors(
        self,
        q: Tensor,
        k: Tensor,
        weight: Optional[Tensor],
        time: int,
    ) -> tuple[Tensor, Tensor]:
        """Append the factors of R to queries and keys, so that back ends compute both terms with one matmul."""
        query_factors = _scaled(first_rows(self.query_factors_NLE, time), weight)
        key_factors = first_rows(self.key_factors_NLE, time)
        own = q.size(-1)
        size = own + query_factors.size(-1)  # compensates for the division by its square root in back ends
        if own:
            q = q * math.sqrt(size / own)
        query_factors = query_factors.to(q.dtype) * math.sqrt(size)
        key_factors = key_factors.to(k.dtype)
        queries = torch.cat([q, query_factors.expand(*q.shape[:-1], -1)], -1)
        keys = torch.cat([k, key_factors.expand(*k.shape[:-1], -1)], -1)
        return queries, keys


def _may_share(values: Settings) -> bool:
    """Return True if all sequences have the same scores.

    This requires that no term depends on the input, and that there is no other attention variant.
    """
    is_alone = [row.name for row in chosen_variants(values)] == ["synthesizer"]
    return is_alone and {DOT, *OF_QUERIES}.isdisjoint(terms_of(values))


def _glorot(*shape: int) -> Tensor:
    return nn.init.xavier_uniform_(torch.empty(shape))


def _scaled(x: Tensor, weight: Optional[Tensor]) -> Tensor:
    if weight is None:
        return x
    return x * weight


def first_rows(x_NLE: Tensor, time: int) -> Tensor:
    """Return the rows for the first T positions (1, N, T, E)."""
    if time < x_NLE.size(1):
        x_NLE = x_NLE[:, :time]
    return x_NLE.unsqueeze(0)


def first_rows_and_columns(x_NLL: Tensor, time: int) -> Tensor:
    """Return the rows and columns for the first T positions (1, N, T, T)."""
    if time < x_NLL.size(2):
        x_NLL = x_NLL[..., :time]
    return first_rows(x_NLL, time)


class _TogetherAttention(NamedTuple):
    """A distribution shared by all sequences of a batch, applied to their concatenated values.

    Attributes:
        distribution: the distribution.
        batch: B, the number of sequences.
    """

    distribution: Any
    batch: int

    @property
    def probabilities(self) -> Tensor:
        """The probabilities P (B, N, T, K); available if they are stored."""
        return self.distribution.probabilities.expand(self.batch, -1, -1, -1)

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Return P V (B, N, T, D); `dropout` must be 0, because all sequences would share the mask."""
        output = self.distribution.attend(_together(v_BNKD), dropout)
        return _apart(output, self.batch)


def _attend_together(attention: Attention, inner: Attend) -> AttentionOutput:
    batch = attention.x_BTC.size(0)
    of_one = replace(
        attention,
        q_BNTD=attention.q_BNTD[:1],
        k_BNKD=attention.k_BNKD[:1],
        values=_together(attention.values),
    )
    output, distribution = inner(of_one)
    return AttentionOutput(_apart(output, batch), _TogetherAttention(distribution, batch))


def _together(x_BNKD: Tensor) -> Tensor:
    """Concatenate the sequences of (B, N, K, D) along the last dimension; return (1, N, K, B D)."""
    return x_BNKD.permute(1, 2, 0, 3).flatten(2).unsqueeze(0)


def _apart(x: Tensor, batch: int) -> Tensor:
    """Split concatenated sequences (1, N, T, B D); return (B, N, T, D)."""
    return x.squeeze(0).unflatten(-1, (batch, -1)).permute(2, 0, 1, 3)
