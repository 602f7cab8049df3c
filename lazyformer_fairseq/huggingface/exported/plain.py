"""What an exported file has in place of what the package chooses by machine, or looks up in its tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.modules.attention.back_ends import Eager
from lazyformer_fairseq.modules.attention.scores import Scores

Linear = nn.Linear
SUBLAYERS: dict[str, type[nn.Module]] = {}  # by letter; an export fills both at the end of its file
VARIANTS: dict[str, type[nn.Module]] = {}  # by name, the outermost first


@dataclass(frozen=True)
class PlannedSublayer:
    """A sublayer of the plan.

    Attributes:
        values: its settings by name, those with a default too.
        consumers: for each sublayer above that reads from this one, what it reads.
        producer: the sublayer that this one reads from.
        settings: what a back end is chosen by; here it is the caller's.
    """

    letter: str
    values: Mapping[str, Any]
    consumers: tuple[str, ...] = ()
    producer: Optional["PlannedSublayer"] = None
    settings: tuple = ()

    @property
    def shaper(self) -> "PlannedSublayer":
        """The sublayer whose `settings` choose."""
        return self


class Kind(NamedTuple):
    """A row of the table of sublayers."""

    letter: str

    def module(self, direction: str) -> Any:
        return SUBLAYERS[self.letter]


class AttentionKind(NamedTuple):
    """A row of the table of kinds of attention, which a setting of its name switches on."""

    name: str

    def load(self) -> Any:
        return VARIANTS[self.name]


def find_kind(letter: str) -> Optional[Kind]:
    """The row of a letter; None if this file has no sublayer for it."""
    return Kind(letter) if letter in SUBLAYERS else None


def chosen_kinds(values: Mapping[str, Any]) -> list[AttentionKind]:
    """The rows that settings switch on, of those that this file has."""
    return [AttentionKind(name) for name in VARIANTS if values.get(name)]


def layer_norm(embed_dim: int, eps: float, kind: str, has_bias: bool) -> nn.Module:
    """torch's."""
    return nn.LayerNorm(embed_dim, eps=eps, bias=has_bias) if kind == "layer" else nn.RMSNorm(embed_dim, eps=eps)


def multiply_by_part(linear: nn.Linear, input: Tensor, start: int, stop: int, has_bias: bool = True) -> Tensor:
    """Return the outputs of a linear map from `start` to `stop` alone: (..., C) -> (..., stop - start).

    A map that something has wrapped, such as an adapter of peft, computes all of them, for its weight is not all of it.
    """
    bias = None if linear.bias is None else linear.bias[start:stop]
    if not isinstance(linear, nn.Linear):
        output = linear(input)[..., start:stop]
        return output if has_bias or bias is None else output - bias
    return F.linear(input, linear.weight[start:stop], bias if has_bias else None)


class FusedDistribution(NamedTuple):
    """Queries and keys, from which torch's fused attention computes all anew for other values.

    Attributes:
        added_BNTK: to the scores.
        is_blind: rows that see no key, whose output is 0.
    """

    q_BNTD: Tensor
    k_BNKD: Tensor
    added_BNTK: Optional[Tensor]
    is_blind: Optional[Tensor]

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """P V (B, N, T, D), after dropout on P."""
        q, k, added = self.q_BNTD, self.k_BNKD, self.added_BNTK
        y_BNTD = F.scaled_dot_product_attention(q, k, v_BNKD, added, dropout)
        if torch.compiler.is_compiling():  # a graph must not count on the layout that one kernel returns
            y_BNTD = y_BNTD.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        return y_BNTD if self.is_blind is None else y_BNTD.masked_fill(self.is_blind, 0)


def attend(
    q_BNTD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, scores: Scores, dropout: float, consumers: int, back_end: str
) -> tuple[Tensor, Any]:
    """softmax(QK^T / sqrt(D) + additions to scores) V, and the distribution: written out, or by torch's fused one."""
    if back_end == "eager" or scores.exponent_N is not None or not q_BNTD.size(-1):
        return Eager().attend(q_BNTD, k_BNKD, v_BNKD, scores, dropout, consumers)
    added, is_blind = scores.dense(q_BNTD.size(-2), k_BNKD.size(-2), q_BNTD), None
    if scores.mask is not None:
        is_blind = (added == float("-inf")).all(-1, keepdim=True)
        added = added.masked_fill(is_blind, 0)
    fused = FusedDistribution(q_BNTD, k_BNKD, None if added is None else added.to(q_BNTD.dtype), is_blind)
    return fused.attend(v_BNKD, dropout), fused


# Names of the package that those of this file stand for.
INSTEAD = (
    "lazyformer_fairseq.modules.attention.attend",
    "lazyformer_fairseq.modules.linear.Linear",
    "lazyformer_fairseq.modules.linear.multiply_by_part",
    "lazyformer_fairseq.modules.layer_norm.layer_norm",
    "lazyformer_fairseq.patterns.attention_kinds.chosen_kinds",
    "lazyformer_fairseq.patterns.grammar.PlannedSublayer",
    "lazyformer_fairseq.patterns.kinds.find_kind",
)
