"""``s[synthesizer=...]``: scores that are learned, not compared (Tay et al., 2020, section 3).

| term | score of query i and key j, for each head | parameters |
|---|---|---|
| ``dot`` | q_i k_j / sqrt(D), in causal models with Transformer-XL's positions | those of Q and K |
| ``dense`` | W_j relu(q_i) | those of Q, D L |
| ``factorised_dense`` | A[j mod a] B[j div a], (A, B) = W relu(q_i) | those of Q, D (a + b) |
| ``random`` | R_ij | N L^2 |
| ``fixed`` | R_ij, not trained | |
| ``factorised_random`` | (R1 R2^T)_ij | 2 N L k |

Several terms are mixed by learned weights that sum to 1. L is the longest input. What the paper leaves open is as in
the code that its authors published, ``synthetic_attention`` of Mesh TensorFlow:

- the first layer of ``dense`` is the projection of queries, which it shares with ``dot``; the second one has no bias
  and is the same for all heads (Google's Long Range Arena has both too);
- Glorot's uniform initialisation of R, over all heads at once;
- weights of a mixture start equal, one for each term of a sublayer (the paper's equation has one for each head);
- what a causal model must not see is masked.

The rest is ours: a is the largest power of two up to sqrt(L), b = L / a rounded up; ``factorised_dense`` takes
every pair of A and B, for which one of the tiling functions must repeat entries; k = 8 is the paper's (the code
has 16). Position i is the i-th token of the text: padding on the left has none.
"""

import math
from dataclasses import replace
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import ReusableAttention
from lazyformer_fairseq.modules.linear import Linear, multiply_by_part
from lazyformer_fairseq.modules.sublayers.attention_variant import Attend, Attention, AttentionOutput, AttentionVariant
from lazyformer_fairseq.modules.sublayers.interface import Settings, SublayerOptions
from lazyformer_fairseq.patterns.attention_kinds import chosen_kinds

DOT = "dot"
RANDOM = "random"
FIXED = "fixed"
FACTORISED_RANDOM = "factorised_random"
OF_QUERIES = DENSE, FACTORISED_DENSE = "dense", "factorised_dense"


def terms_of(values: Settings) -> tuple[str, ...]:
    """Return the names of the terms."""
    return tuple(values["synthesizer"].split("+"))


def factors_of(length: int) -> tuple[int, int]:
    """Return a and b of ``factorised_dense``: a b >= L, and equal where L is a power of two."""
    a = 2 ** int(math.log2(math.isqrt(length)))
    return a, -(-length // a)


class Synthesizer(AttentionVariant):
    """Scores of its terms in place of, or beside, products of queries and keys."""

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        values = options.values
        heads = options.num_heads
        self.terms = terms_of(values)
        self.length = length = values["length"] if options.is_causal else options.max_positions
        if RANDOM in self.terms:
            self.random_NLL = nn.Parameter(_glorot(heads, length, length))
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
        if len(self.terms) > 1:
            self.mixture = nn.Parameter(torch.zeros(len(self.terms)))
        else:
            self.mixture = None
        self.may_share = _may_share(values)
        self.dropout = options.attention_dropout

    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Attend by learned scores; where all sequences have the same ones, once for all."""
        self._check_length(attention.x_BTC.size(1))
        attention = self._with_scores(attention)
        scores = attention.scores
        batch = attention.x_BTC.size(0)
        if batch == 1 or scores.lengths_B is not None or not self.may_share or (self.training and self.dropout):
            return inner(attention)
        return _attend_together(attention, inner)

    def _check_length(self, time: int) -> None:
        if time > self.length:
            raise UserError(
                f"an input of {time} tokens, but this model's synthesizer has scores for {self.length}: give shorter "
                "inputs, or train one with a longer length"
            )

    def _with_scores(self, attention: Attention) -> Attention:
        """Return the same with its own queries and keys, or none, and with learned scores."""
        if self.mixture is None:
            weights = dict.fromkeys(self.terms)
        else:
            weights = self._weights(attention.values)
        time = attention.x_BTC.size(1)
        if not set(OF_QUERIES).isdisjoint(self.terms):
            hidden_BNTD = attention.q_BNTD.relu()
        else:
            hidden_BNTD = None
        added = [term for term in self.terms if term not in (DOT, FACTORISED_RANDOM)]
        dense = [_scaled(self._scores(term, hidden_BNTD, time), weights[term]) for term in added]
        q = attention.q_BNTD
        k = attention.k_BNKD
        scores = attention.scores
        if DOT not in self.terms:
            q, k = q[..., :0], q[..., :0]
        elif weights[DOT] is not None:
            q = q * weights[DOT]
            if scores.position_queries_BNTD is not None:
                scores = scores.with_own(position_queries_BNTD=scores.position_queries_BNTD * weights[DOT])
        if FACTORISED_RANDOM in self.terms:
            q, k = self._with_factors(q, k, weights[FACTORISED_RANDOM], time)
        if dense:
            scores = scores.with_own(learned_BNTK=sum(dense[1:], dense[0]).to(attention.values.dtype))
        return replace(attention, q_BNTD=q, k_BNKD=k, scores=scores)

    def _weights(self, like: Tensor) -> dict[str, Tensor]:
        """Return the weight of each term; they sum to 1."""
        weights = self.mixture.softmax(0, torch.promote_types(self.mixture.dtype, torch.float32))
        return dict(zip(self.terms, weights.to(like.dtype).unbind(), strict=True))

    def _scores(self, term: str, hidden_BNTD: Optional[Tensor], time: int) -> Tensor:
        """Return a term's scores, (B or 1, N, T, T)."""
        if term == RANDOM:
            return first_rows_and_columns(self.random_NLL, time)
        if term == FIXED:
            return first_rows_and_columns(self.fixed_NLL, time)
        if term == DENSE:
            return multiply_by_part(self.dense, hidden_BNTD, 0, time)
        a, b = self.factorised_dense(hidden_BNTD).split(self.factors, -1)
        return (b.unsqueeze(-1) * a.unsqueeze(-2)).flatten(-2)[..., :time]

    def _with_factors(self, q: Tensor, k: Tensor, weight: Optional[Tensor], time: int) -> tuple[Tensor, Tensor]:
        """Put the factors of R behind queries and keys: back ends multiply both in one product."""
        of_queries, of_keys = (first_rows(each, time) for each in (self.query_factors_NLE, self.key_factors_NLE))
        of_queries = _scaled(of_queries, weight)
        own = q.size(-1)
        size = q.size(-1) + of_queries.size(-1)
        # Back ends divide by sqrt(size).
        parts = (q * math.sqrt(size / own) if own else q, of_queries.to(q.dtype) * math.sqrt(size))
        q = torch.cat([each.expand(*q.shape[:-1], -1) for each in parts], -1)
        return q, torch.cat([each.expand(*k.shape[:-1], -1) for each in (k, of_keys.to(k.dtype))], -1)


def _may_share(values: Settings) -> bool:
    """Return whether all sequences have the same scores: they depend on no input, and no other kind adds some."""
    is_alone = [row.name for row in chosen_kinds(values)] == ["synthesizer"]
    return is_alone and {DOT, *OF_QUERIES}.isdisjoint(terms_of(values))


def _glorot(*shape: int) -> Tensor:
    return nn.init.xavier_uniform_(torch.empty(shape))


def _scaled(x: Tensor, weight: Optional[Tensor]) -> Tensor:
    if weight is None:
        return x
    return x * weight


def first_rows(x_NLE: Tensor, time: int) -> Tensor:
    """Return what belongs to each of T positions, (1, N, T, E)."""
    return (x_NLE if time == x_NLE.size(1) else x_NLE[:, :time]).unsqueeze(0)


def first_rows_and_columns(x_NLL: Tensor, time: int) -> Tensor:
    """Return what belongs to each pair of T positions, (1, N, T, T)."""
    return first_rows(x_NLL if time == x_NLL.size(1) else x_NLL[..., :time], time)


class _TogetherAttention(NamedTuple):
    """One distribution for all sequences: the values of all of them stand side by side."""

    distribution: ReusableAttention
    batch: int

    @property
    def probabilities(self) -> Tensor:
        """P (B, N, T, K), where it is stored."""
        return self.distribution.probabilities.expand(self.batch, -1, -1, -1)

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Return P V (B, N, T, D); `dropout` is 0."""
        return _apart(self.distribution.attend(_together(v_BNKD), dropout), self.batch)


def _attend_together(attention: Attention, inner: Attend) -> AttentionOutput:
    batch = attention.x_BTC.size(0)
    one = {"q_BNTD": attention.q_BNTD[:1], "k_BNKD": attention.k_BNKD[:1], "values": _together(attention.values)}
    output, distribution = inner(replace(attention, **one))
    return AttentionOutput(_apart(output, batch), _TogetherAttention(distribution, batch))


def _together(x_BNKD: Tensor) -> Tensor:
    """Put the sequences of (B, N, K, D) side by side: (1, N, K, B D)."""
    return x_BNKD.permute(1, 2, 0, 3).flatten(2).unsqueeze(0)


def _apart(x: Tensor, batch: int) -> Tensor:
    """Undo that: (1, N, T, B D) to (B, N, T, D)."""
    return x.squeeze(0).unflatten(-1, (batch, -1)).permute(2, 0, 1, 3)
