"""``s[synthesizer=...]``: scores that are learned, not compared (Tay et al., 2020, section 3).

| term | score of query i and key j, for each head |
|---|---|
| ``dot`` | q_i k_j / sqrt(D) |
| ``dense`` | W_j relu(q_i) |
| ``factorised_dense`` | A[j mod a] B[j div a], (A, B) = W relu(q_i) |
| ``random``, ``fixed`` | R_ij |
| ``factorised_random`` | (R1 R2^T)_ij |

Several are mixed by learned weights that sum to 1. Position i is the i-th token of the text: padding before it has
none.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from ..attention import Attend, Attended, Attention, AttentionKind
from ..interface import KINDS, PlannedSublayer


class Synthesizer(AttentionKind):
    """Scores of its terms in place of, or beside, products of queries and keys. L is the longest input."""

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__(config, planned)
        self.terms = planned.settings["synthesizer"].split("+")
        self.length = length = config.max_position_embeddings
        heads, size, rank = self.num_heads, config.hidden_size // self.num_heads, planned.settings["rank"]
        if "dot" not in self.terms:
            self.projections = {"queries"} if {"dense", "factorised_dense"} & set(self.terms) else set()
        if "random" in self.terms:
            self.random_NLL = nn.Parameter(torch.zeros(heads, length, length))
        if "fixed" in self.terms:
            self.register_buffer("fixed_NLL", torch.zeros(heads, length, length))
        if "factorised_random" in self.terms:
            self.query_factors_NLE = nn.Parameter(torch.zeros(heads, length, rank))
            self.key_factors_NLE = nn.Parameter(torch.zeros(heads, length, rank))
        if "dense" in self.terms:
            self.dense = nn.Linear(size, length, bias=False)
        if "factorised_dense" in self.terms:
            a = 2 ** int(math.log2(math.isqrt(length)))
            self.factors = [a, -(-length // a)]
            self.factorised_dense = nn.Linear(size, sum(self.factors), bias=False)
        self.mixture = nn.Parameter(torch.zeros(len(self.terms))) if len(self.terms) > 1 else None

    def init_own_weights(self, std: float) -> None:
        for name, scores in [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]:
            if name == "mixture":
                nn.init.zeros_(scores)
            else:
                nn.init.xavier_uniform_(scores)

    def attend(self, attention: Attention, inner: Attend) -> Attended:
        time = attention.x_BTC.size(1)
        if time > self.length:
            raise ValueError(f"an input of {time} tokens, but this model's synthesizer has scores for {self.length}")
        weights = dict(zip(self.terms, self._weights(attention.q_BNTD), strict=True))
        places_BT = _places_in_text(attention)
        for term in self.terms:
            if term != "dot":
                learned = weights[term] * self._scores(term, attention.q_BNTD, places_BT)
                attention = attention.with_added(learned)
        q, k = attention.q_BNTD, attention.k_BNKD
        if "dot" in weights:
            return inner(attention.with_(q_BNTD=q * weights["dot"]))
        return inner(attention.with_(q_BNTD=q[..., :0], k_BNKD=k[..., :0]))

    def _weights(self, like: Tensor) -> Tensor:
        """Of the terms; they sum to 1."""
        if self.mixture is None:
            return like.new_ones(1)
        return self.mixture.softmax(0, torch.promote_types(self.mixture.dtype, torch.float32)).to(like.dtype)

    def _scores(self, term: str, q_BNTD: Tensor, places_BT: Tensor) -> Tensor:
        """A term's, (B or 1, N, T, T)."""
        time = places_BT.size(1)
        if term == "random":
            return _at_places(_at_places(self.random_NLL[None], places_BT, 2), places_BT, 3)
        if term == "fixed":
            return _at_places(_at_places(self.fixed_NLL[None], places_BT, 2), places_BT, 3)
        if term == "factorised_random":
            factors = self.query_factors_NLE, self.key_factors_NLE
            of_queries, of_keys = (_at_places(each[None], places_BT, 2) for each in factors)
            return torch.matmul(of_queries, of_keys.transpose(-2, -1))
        hidden = q_BNTD.relu()
        if term == "dense":
            return _at_places(F.linear(hidden, self.dense.weight[:time]), places_BT, 3)
        a, b = self.factorised_dense(hidden).split(self.factors, -1)
        return _at_places((b.unsqueeze(-1) * a.unsqueeze(-2)).flatten(-2), places_BT, 3)


def _places_in_text(attention: Attention) -> Tensor:
    """(B or 1, T): the number of each place in the text, which counts from the first one that is no padding."""
    padding = attention.shared.padding_mask_BT
    places = torch.arange(attention.x_BTC.size(1), device=attention.x_BTC.device)[None]
    if padding is None:
        return places
    return (places - padding.int().argmin(-1, keepdim=True)).clamp(min=0)


def _at_places(x_BNRS: Tensor, places_BT: Tensor, dim: int) -> Tensor:
    """Rows (2) or columns (3) of the last two dimensions, those that the places name; B may be 1 in both."""
    batch = max(x_BNRS.size(0), places_BT.size(0))
    x = x_BNRS.expand(batch, -1, -1, -1)
    index = places_BT[:, None, :, None] if dim == 2 else places_BT[:, None, None]
    size = [batch, *x.shape[1:]]
    size[dim] = places_BT.size(1)
    return x.gather(dim, index.expand(size))


KINDS["synthesizer"] = Synthesizer
