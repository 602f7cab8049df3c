"""Attention on the meta device: nothing is computed, but all matmuls are reported to torch's FlopCounterMode.

With a mask, only the keys that a query sees are counted, regardless of the tiles that a back end computes. Without a
mask all keys are counted, including future keys, because back ends compute these too.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lazyformer_fairseq.modules.attention.interface import AttentionInputs
from lazyformer_fairseq.modules.attention.masks import count_pairs

_LIBRARY = torch.library.Library("lazyformer", "FRAGMENT")
_LIBRARY.define("compare(Tensor vectors, SymInt pairs) -> ()")
_LIBRARY.define("compare_positions(Tensor vectors, SymInt pairs) -> ()")
_LIBRARY.define("weigh(Tensor values, SymInt pairs, SymInt time) -> Tensor")
for _name in ("compare", "compare_positions"):
    _LIBRARY.impl(_name, lambda _vectors, _pairs: None, "Meta")


def _weigh_on_meta(values: Tensor, _pairs: int, time: int) -> Tensor:
    *batch_and_heads, _, size = values.shape
    return values.new_empty((*batch_and_heads, time, size))


_LIBRARY.impl("weigh", _weigh_on_meta, "Meta")

COMPARE = torch.ops.lazyformer.compare  # the matmul of queries and keys
WEIGH = torch.ops.lazyformer.weigh  # the weighted sum of values
_COMPARE_POSITIONS = torch.ops.lazyformer.compare_positions


@register_flop_formula([COMPARE, _COMPARE_POSITIONS, WEIGH])
def _count_flops(vectors: tuple[int, ...], pairs: int, *_time: int, **_shapes: object) -> int:
    return 2 * pairs * vectors[-1]


class CountedDistribution(NamedTuple):
    """A distribution of which only the size is known.

    Attributes:
        pairs: The number of query-key pairs.
        time: T, the number of queries.
    """

    pairs: int
    time: int

    def attend(self, v_BNKD: Tensor, _dropout: float) -> Tensor:
        """Compute P V (B, N, T, D) as a meta tensor."""
        return WEIGH(v_BNKD, self.pairs, self.time)


def attend(given: AttentionInputs) -> tuple[Tensor, CountedDistribution]:
    """Count the matmuls that :func:`lazyformer_fairseq.modules.attention.attend` computes for these inputs."""
    scores = given.scores
    batch, heads, time, _ = given.q_BNTD.shape
    tokens = given.k_BNKD.size(-2) - scores.extra
    queries = batch * heads * time
    # With a learned span, where bias and mask end at the same distance, all keys are counted, because the span may grow
    # until every query sees all of them.
    if scores.mask is not None and not scores.far:
        seen = batch * count_pairs(scores.mask, time, tokens, scores.is_causal)
        distances = seen
    else:
        seen = queries * tokens
        distances = seen + queries  # every query is also multiplied by the encoded distance of a future key
    pairs = seen + queries * scores.extra
    COMPARE(given.q_BNTD, pairs)
    if scores.position_queries_BNTD is not None:
        _COMPARE_POSITIONS(scores.position_queries_BNTD, distances)
    counted = CountedDistribution(pairs, time)
    return counted.attend(given.v_BNKD, given.dropout), counted
