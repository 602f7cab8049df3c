"""Attention on the meta device, where nothing is computed: it tells torch's FlopCounterMode what it would multiply.

Each query counts with the keys that the mask shows it, whatever tiles a back end computes; without a mask with all
keys, those in its future too, as back ends compute them.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lazyformer_fairseq.modules.attention.masks import count_pairs
from lazyformer_fairseq.modules.attention.scores import Scores

_LIBRARY = torch.library.Library("lazyformer", "FRAGMENT")
_LIBRARY.define("compare(Tensor vectors, SymInt pairs) -> ()")
_LIBRARY.define("compare_positions(Tensor vectors, SymInt pairs) -> ()")
_LIBRARY.define("weigh(Tensor values, SymInt pairs, SymInt time) -> Tensor")
for _name in ("compare", "compare_positions"):
    _LIBRARY.impl(_name, lambda vectors, pairs: None, "Meta")
_LIBRARY.impl("weigh", lambda v, pairs, time: v.new_empty((*v.shape[:-2], time, v.size(-1))), "Meta")

COMPARE, WEIGH = torch.ops.lazyformer.compare, torch.ops.lazyformer.weigh  # scores; sums of values
_COMPARE_POSITIONS = torch.ops.lazyformer.compare_positions


@register_flop_formula([COMPARE, _COMPARE_POSITIONS, WEIGH])
def _count_flops(vectors: tuple[int, ...], pairs: int, *_time: int, **_shapes: object) -> int:
    return 2 * pairs * vectors[-1]


class CountedDistribution(NamedTuple):
    """Of this many pairs of query and key, of T queries."""

    pairs: int
    time: int

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Return P V (B, N, T, D)."""
        return WEIGH(v_BNKD, self.pairs, self.time)


def attend(
    q_BNTD: Tensor,
    k_BNKD: Tensor,
    v_BNKD: Tensor,
    scores: Scores,
    dropout: float,
    consumers: int,
) -> tuple[Tensor, CountedDistribution]:
    """Count as :func:`lazyformer_fairseq.modules.attention.attend` computes."""
    batch, heads, time, _ = q_BNTD.shape
    tokens = k_BNKD.size(-2) - scores.extra
    # A learned span, whose bias ends at its mask, counts as one that sees all: it may grow to that.
    if scores.far:
        mask = None
    else:
        mask = scores.mask
    seen = batch * (heads * time * tokens if mask is None else count_pairs(mask, time, tokens, scores.is_causal))
    pairs = seen + batch * heads * time * scores.extra
    COMPARE(q_BNTD, pairs)
    if scores.position_queries_BNTD is not None:  # every query meets every distance, one of which is the future's
        if mask is None:
            by_distance = batch * heads * time * (tokens + 1)
        else:
            by_distance = seen
        _COMPARE_POSITIONS(scores.position_queries_BNTD, by_distance)
    counted = CountedDistribution(pairs, time)
    return counted.attend(v_BNKD, dropout), counted
