"""Counts a model's parameters from its pattern and sizes, by formula: searches and tables need not build it."""

from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan
from lazyformer_fairseq.patterns.sizes import Sizes


def count_parameters(pattern: str, sizes: Sizes) -> int:
    """Parameters of the whole model; tied parameters count once.

    Raises:
        UserError: the pattern cannot be read.
    """
    sublayers = plan(pattern, sizes.direction)
    return sizes.count_other_parameters() + sum(count_sublayer_parameters(planned, sizes) for planned in sublayers)


def count_sublayer_parameters(planned: PlannedSublayer, sizes: Sizes) -> int:
    """Parameters of one sublayer, its LayerNorm included."""
    module = planned.kind.module(sizes.direction)
    norm = 2 * sizes.embed_dim if module.is_residual else 0
    return module.count_parameters(sizes, planned.values) + norm
