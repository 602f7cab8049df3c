"""The interface of attention variants, which change the inputs and outputs of the attention of an ``s``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional, Protocol

from torch import Tensor, nn

from lazyformer_fairseq.modules.attention.masks import AttentionMask
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.interface import RelativePositions, SublayerOptions
from lazyformer_fairseq.patterns.attention_variants import chosen_variants


@dataclass(frozen=True, eq=False)
class Attention:
    """The inputs of the attention of an ``s``.

    Attributes:
        x_BTC: the input of the sublayer.
        x_BKC: the input with the memory of a causal model before it.
        q_BNTD: queries; D is 0 if there are none.
        k_BNKD: keys; D is 0 if there are none.
        values: values (B, N, K, D). Some attention variants use a tuple of several such tensors, which only they can
            read.
        scores: everything else that shapes the distribution.
        positions: Transformer-XL's relative positions, for variants that project queries of their own; those of the
            plain queries are in `scores` already. Causal models only.
        makers: the modules that transform queries and those that transform keys, for variants that project queries and
            keys of their own; see :func:`make_vectors`.
        back_end: the name of the back end to use in place of the network's, for example for a few extra queries; empty
            for the network's.
    """

    x_BTC: Tensor
    x_BKC: Tensor
    q_BNTD: Tensor
    k_BNKD: Tensor
    values: Any
    scores: Scores
    positions: Optional[RelativePositions] = None
    makers: tuple[nn.ModuleDict, ...] = ()
    back_end: str = ""

    def with_scores(self, **parts: Any) -> "Attention":
        """Return a copy with some parts of the scores replaced."""
        return replace(self, scores=self.scores.with_own(**parts))

    def with_mask(self, mask: AttentionMask, **parts: Any) -> "Attention":
        """Return a copy with the mask of an attention variant, and optionally with other parts of the scores replaced.

        If the network has a mask of its own, queries see no further back than it allows.
        """
        network = self.scores.mask
        if network is not None:
            assert network.reach is not None, "the network's own mask has a finite reach"
            mask = mask.within(network.reach)
        return self.with_scores(mask=mask, **parts)


class AttentionOutput(NamedTuple):
    """The output of the attention of an ``s``.

    Attributes:
        output_BNTD: the output of each head.
        distribution: the distribution for an ``l`` above, a ReusableAttention. Its ``attend`` takes values of the same
            form as those of the ``s``, which may be a tuple.
    """

    output_BNTD: Tensor
    distribution: Any


Attend = Callable[[Attention], AttentionOutput]


class VariantModule(nn.Module):
    """The module of a row of :data:`lazyformer_fairseq.patterns.attention_variants.ATTENTION_VARIANTS`.

    An attention variant overrides what it changes and inherits the behaviour of a plain ``s`` for everything else:

    | to change | override |
    |---|---|
    | the projections | `project`, or `build_vectors` to transform projected queries and keys |
    | the mask | `mask` |
    | the scores, or how they become weights | `attend`, which replaces parts of :class:`Scores` |
    | the memory, that is, which keys and values there are | `build_values` and `attend` |

    Properties that do not depend on weights are in the row of the table.

    Args:
        options: the options of the network, with all settings of the ``s``.

    Attributes:
        project: a function for the ``s`` of an encoder: (input, linear map of queries, keys and values, scores) ->
            queries, keys and values, (B, places, C) each. None if each position is projected on its own.
        mask: the keys that queries see; None for all.
    """

    project: Optional[Callable[[Tensor, Linear, Scores], tuple[Tensor, Tensor, Tensor]]] = None
    mask: Optional[AttentionMask] = None

    def __init__(self, options: SublayerOptions):
        super().__init__()
        self.num_heads = options.num_heads

    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Change the inputs, call `inner` for the attention of the remaining variants, and change the output."""
        if self.mask is not None:
            attention = attention.with_mask(self.mask)
        return inner(attention)

    @property
    def reach(self) -> Optional[int]:
        """The number of positions before its own that a query may currently see; None for no limit.

        The memory of a causal model beyond this reach is dropped.
        """
        if self.mask is None:
            return None
        return self.mask.reach

    @classmethod
    def build_values(cls, options: SublayerOptions) -> Optional[nn.Module]:  # noqa: ARG003 - for those that override it
        """Build the module that transforms plain values, or return None if the variant leaves them as they are.

        The ``s`` and each ``l`` that reads it get a module of their own. It is called as (values, x_BKC) -> values. The
        modules of several variants are called in the order of the table.
        """
        return None

    @classmethod
    def build_vectors(cls, options: SublayerOptions, are_keys: bool) -> Optional[nn.Module]:  # noqa: ARG003 - likewise
        """Build the :class:`VectorMaker` of queries or keys, or return None if the variant leaves them as they are.

        An ``s`` has one for its queries and one for its keys, which its global tokens share. Each ``k`` has one for its
        queries.
        """
        return None


class VectorMaker(Protocol):
    """A module that transforms queries or keys into the form in which an attention variant compares them."""

    def __call__(
        self,
        x_BNTD: Tensor,
        scores: Scores,
        keys: int,
        places_AG: Optional[Tensor] = None,
    ) -> Tensor:
        """Transform the vectors of tokens; :func:`make_vectors` describes the arguments."""

    def without_place(self, x_NMD: Tensor) -> Tensor:
        """Transform keys that belong to no token, and so have no place, such as persistent keys."""


def build_choices(options: SublayerOptions) -> nn.ModuleDict:
    """Build the modules of the chosen variants by name, in the order of the table; the first one is the outermost."""
    rows = chosen_variants(options.values)
    return nn.ModuleDict({row.name: row.load()(options) for row in rows})


def build_values(options: SublayerOptions) -> nn.ModuleDict:
    """Build the modules by which the chosen variants transform values, by name, in the order of the table."""
    rows = chosen_variants(options.values)
    return _without_none({row.name: row.load().build_values(options) for row in rows})


def build_vectors(options: SublayerOptions, are_keys: bool) -> nn.ModuleDict:
    """Build the modules by which the chosen variants transform queries or keys, by name, in the order of the table."""
    rows = chosen_variants(options.values)
    return _without_none({row.name: row.load().build_vectors(options, are_keys) for row in rows})


def _without_none(built: Mapping[str, Optional[nn.Module]]) -> nn.ModuleDict:
    return nn.ModuleDict({name: module for name, module in built.items() if module is not None})


def make_vectors(
    makers: nn.ModuleDict,
    x_BNTD: Tensor,
    scores: Scores,
    keys: int,
    places_AG: Optional[Tensor] = None,
) -> Tensor:
    """Transform projected queries or keys into the form in which the attention variants compare them.

    Args:
        makers: the result of :func:`build_vectors`.
        x_BNTD: projected queries or keys.
        scores: the scores of the attention.
        keys: K, the number of keys. The rows of `x_BNTD` belong to the last of them, unless `places_AG` is given.
        places_AG: the keys to which the rows belong, (B, G) or (1, G); K or more for rows that belong to none.
    """
    for maker in makers.values():
        x_BNTD = maker(x_BNTD, scores, keys, places_AG)
    return x_BNTD
