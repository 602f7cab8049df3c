"""How sublayers attend: scores, what is added to them, weights, and a distribution that others may use again.

Letters of shapes: B batch, N heads, T queries, K keys, D head size, C width.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .interface import DISTRIBUTION, KEYS_AND_VALUES, KINDS, PROBABILITIES, PlannedSublayer, Shared, Sublayer


@dataclass(frozen=True, eq=False)
class Attention:
    """What a sublayer is about to attend with.

    Attributes:
        x_BTC: its input.
        q_BNTD, k_BNKD: queries and keys; D is 0 where its kind of attention has no such projections.
        values: (B, N, K, D); for some kinds of attention several, which they alone understand.
        added_BNTK: what is added to the scores, -inf where a query does not see a key; sizes of 1 stand for all alike.
        shared: of this forward pass.
        may_be_blind: whether a query may see no key at all; its output is then 0.
        exponent_N: alpha of entmax for each head, in place of softmax.
        entmax: computes it, from scores and exponents.
    """

    x_BTC: Tensor
    q_BNTD: Tensor
    k_BNKD: Tensor
    values: Any
    added_BNTK: Optional[Tensor]
    shared: Shared
    may_be_blind: bool = False
    exponent_N: Optional[Tensor] = None
    entmax: Optional[Callable[[Tensor, Tensor], Tensor]] = None

    def with_(self, **parts: Any) -> "Attention":
        """The same with some parts replaced."""
        return replace(self, **parts)

    def with_added(self, added: Tensor) -> "Attention":
        """The same with more added to the scores."""
        return self.with_(added_BNTK=added if self.added_BNTK is None else self.added_BNTK + added)

    def seeing(self, seen: Tensor) -> "Attention":
        """The same where queries see, of the keys, those that are True alone: broadcastable to (B, N, T, K)."""
        added = self.q_BNTD.new_zeros(()) if self.added_BNTK is None else self.added_BNTK
        return self.with_(added_BNTK=torch.where(seen, added, float("-inf")), may_be_blind=True)


class WrittenDistribution(NamedTuple):
    """A distribution that is written out, (B or 1, N, T, K)."""

    probabilities: Tensor

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """(B, N, T, D); each call draws its own dropout."""
        return torch.matmul(F.dropout(self.probabilities, dropout), v_BNKD)


class FusedDistribution(NamedTuple):
    """Queries and keys, from which one of transformers' attention functions computes all anew for other values."""

    owner: nn.Module
    attention: Attention

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """(B, N, T, D)."""
        of = self.attention
        function = ALL_ATTENTION_FUNCTIONS[of.shared.attention]
        added, is_blind = of.added_BNTK, None
        if of.may_be_blind:
            added, is_blind = _without_blind_rows(added)
        added = None if added is None else added.to(of.q_BNTD.dtype)
        scaling = 1 / math.sqrt(of.q_BNTD.size(-1))
        output_BTND, _ = function(
            self.owner, of.q_BNTD, of.k_BNKD, v_BNKD, added, dropout=dropout, scaling=scaling, is_causal=False
        )
        output_BNTD = output_BTND.transpose(1, 2)
        return output_BNTD if is_blind is None else output_BNTD.masked_fill(is_blind, 0)


class Attended(NamedTuple):
    """What comes of it: the output of each head, and a distribution whose ``attend`` takes what the values were."""

    output_BNTD: Tensor
    distribution: Any


Attend = Callable[[Attention], Attended]


class AttentionKind(nn.Module):
    """The base of what KINDS has, built as ``(config, planned)``: it changes what an ``s`` attends with.

    Attributes:
        projections: which of "queries" and "keys" the ``s`` projects.
    """

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.projections = {"queries", "keys"}

    def project(self, x_BTC: Tensor, qkv_proj: nn.Linear, shared: Shared) -> Optional[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values, (B, places, C) each; None for all positions' projections."""
        return None

    def attend(self, attention: Attention, inner: Attend) -> Attended:
        """Changes what comes in, has the other kinds attend (`inner`), and changes what comes out."""
        return inner(attention)

    @classmethod
    def build_values(cls, config: PretrainedConfig, planned: PlannedSublayer) -> Optional[nn.Module]:
        """What makes its values of plain ones, called as (values, x_BTC); in the ``s`` and in each ``l`` above it."""
        return None


class AttentionSublayer(Sublayer):
    """The base of ``s``, ``l`` and ``k``.

    A kind of attention may have `copies`: by the name of a linear map of its own, the projection that it starts as.

    Args:
        shaper: the ``s`` whose kinds of attention make its values.
    """

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer, shaper: Optional[PlannedSublayer]):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout = config.attention_probs_dropout_prob
        self.readers = planned.readers
        self.choices = nn.ModuleDict()
        self.value_makers = nn.ModuleDict()
        for name in () if shaper is None else shaper.kinds:
            if (maker := KINDS[name].build_values(config, shaper)) is not None:
                self.value_makers[name] = maker
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def start_copies(self, std: float) -> None:
        """Of new models: what a kind of attention has beside a projection starts as its copy.

        transformers initialises modules with weights of their own alone: the projection, the sublayer's last one, has
        this as its `init_own_weights`.
        """
        for module in self.modules():
            for name, projection in getattr(module, "copies", {}).items():
                own = getattr(module, name, None)
                for weight, source in zip(own.parameters() if own else (), self.projection(projection), strict=False):
                    if not getattr(weight, "_is_hf_initialized", False):
                        weight.copy_(source)

    def projection(self, name: str) -> tuple[Tensor, Tensor]:
        """Weight and bias of its projection to "q", "k" or "v"."""
        raise NotImplementedError

    def make_values(self, x_BTC: Tensor, v_BKC: Tensor) -> Any:
        """Values as its kinds of attention take them, from projected ones."""
        values = split_heads(v_BKC, self.num_heads)
        for maker in self.value_makers.values():
            values = maker(values, x_BTC)
        return values

    def attend(self, attention: Attention) -> tuple[Tensor, dict[str, Any]]:
        """Attention, projected, and what the sublayer hands on."""
        handed_on: dict[str, Any] = {}

        def innermost(attention: Attention) -> Attended:
            if KEYS_AND_VALUES in self.readers:
                handed_on[KEYS_AND_VALUES] = attention
            distribution = self._distribution(attention)
            return Attended(distribution.attend(attention.values, self.dropout_now), distribution)

        attend_below: Attend = innermost
        for choice in reversed(self.choices.values()):
            attend_below = partial(choice.attend, inner=attend_below)
        output_BNTD, handed_on[DISTRIBUTION] = attend_below(attention)
        if attention.shared.output_attentions:
            handed_on[PROBABILITIES] = probabilities_of(handed_on[DISTRIBUTION], len(attention.x_BTC))
        return self.out_proj(merge_heads(output_BNTD)), handed_on

    @property
    def dropout_now(self) -> float:
        return self.dropout if self.training else 0.0

    def _distribution(self, attention: Attention) -> Any:
        shared = attention.shared
        is_plain = attention.q_BNTD.size(-1) > 0 and attention.exponent_N is None
        if is_plain and shared.attention != "eager" and not shared.output_attentions:
            return FusedDistribution(self, attention)
        return WrittenDistribution(_weights(attention).to(attention.values.dtype))


def _weights(attention: Attention) -> Tensor:
    """P (B or 1, N, T, K), in single precision or better."""
    scores, size = attention.added_BNTK, attention.q_BNTD.size(-1)
    if size:
        products = torch.matmul(attention.q_BNTD / math.sqrt(size), attention.k_BNKD.transpose(-2, -1))
        scores = products if scores is None else products + scores
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if attention.exponent_N is not None:
        return attention.entmax(scores, attention.exponent_N)
    if not attention.may_be_blind:
        return scores.softmax(-1)
    scores, is_blind = _without_blind_rows(scores)
    return scores.softmax(-1).masked_fill(is_blind, 0)


def _without_blind_rows(scores: Tensor) -> tuple[Tensor, Tensor]:
    """With 0 in rows that are -inf throughout, of which softmax would make NaN; and which rows those are."""
    is_blind = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.masked_fill(is_blind, 0), is_blind


def probabilities_of(distribution: Any, batch: int) -> Tensor:
    """(B, N, T, K) of a distribution; with shared scores they are there once."""
    return distribution.probabilities.expand(batch, -1, -1, -1)


def split_heads(x_BTC: Tensor, num_heads: int) -> Tensor:
    """(B, T, C) -> (B, N, T, D)."""
    return x_BTC.unflatten(-1, (num_heads, x_BTC.size(-1) // num_heads)).transpose(1, 2)


def merge_heads(x_BNTD: Tensor) -> Tensor:
    """(B, N, T, D) -> (B, T, C)."""
    x_BTND = x_BNTD.transpose(1, 2)
    if torch.compiler.is_compiling():  # a graph must not count on the layout that one attention function returns
        x_BTND = x_BTND.clone(memory_format=torch.contiguous_format)
    return x_BTND.flatten(2)
