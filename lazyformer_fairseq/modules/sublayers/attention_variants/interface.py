"""The interface of attention variants, which modify the attention of an ``s``."""

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
    """The inputs to the attention of an ``s``.

    Attributes:
        x_BTC: the sublayer's input.
        x_BKC: the input, preceded by the memory in causal models.
        q_BNTD: queries; D is 0 if there are none.
        k_BNKD: keys; D is 0 if there are none.
        values: values (B, N, K, D). Some attention variants use a tuple of such tensors, which only they can interpret.
        scores: all other inputs that determine the distribution.
        positions: Transformer-XL's relative positions, for variants with their own query projections; `scores` already
            includes them for the plain queries. Causal models only.
        makers: the modules that transform queries and the modules that transform keys, for variants with their own
            projections; see :func:`make_vectors`.
        back_end: the name of the back end to use instead of the network's, if a few extra queries need a different one;
            empty otherwise.
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
        """Return a copy with some fields of `scores` replaced."""
        return replace(self, scores=self.scores.with_own(**parts))

    def with_mask(self, mask: AttentionMask, **parts: Any) -> "Attention":
        """Return a copy with an attention variant's mask, and optionally with other fields of `scores` replaced.

        If the network has its own mask, the reach of that mask also limits the new one.
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
        distribution: the distribution for ``l`` sublayers above, a ReusableAttention. Its ``attend`` takes values in
            the same form as the values of the ``s``, which may be a tuple.
    """

    output_BNTD: Tensor
    distribution: Any


Attend = Callable[[Attention], AttentionOutput]


class VariantModule(nn.Module):
    """Base class of attention variants.

    Each variant has a row in :data:`lazyformer_fairseq.patterns.attention_variants.ATTENTION_VARIANTS`. It overrides
    what it changes, and inherits the behavior of a plain ``s`` for everything else:

    | to change | override |
    |---|---|
    | the projections | `project`, or `build_vectors` to transform projected queries and keys |
    | the mask | `mask` |
    | the scores, or how they become weights | `attend`, which replaces fields of :class:`Scores` |
    | the set of keys and values | `build_values` and `attend` |

    Properties that do not depend on weights are in the variant's row of `ATTENTION_VARIANTS`.

    Args:
        options: the network's options, with all settings of the ``s``.

    Attributes:
        project: for encoders, a function that takes the input, the linear layer that projects it, and the scores, and
            returns queries, keys and values, (B, positions, C) each. None if each position is projected independently.
        mask: the keys that each query can attend to; None for all keys.
    """

    project: Optional[Callable[[Tensor, Linear, Scores], tuple[Tensor, Tensor, Tensor]]] = None
    mask: Optional[AttentionMask] = None

    def __init__(self, options: SublayerOptions):
        super().__init__()
        self.num_heads = options.num_heads

    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Modify the inputs, call `inner` (which applies the remaining variants), and modify the output of `inner`."""
        if self.mask is not None:
            attention = attention.with_mask(self.mask)
        return inner(attention)

    @property
    def reach(self) -> Optional[int]:
        """The maximum distance to the left at which a query can currently attend; None for no limit.

        Causal models drop the memory beyond this distance.
        """
        if self.mask is None:
            return None
        return self.mask.reach

    @classmethod
    def build_values(cls, options: SublayerOptions) -> Optional[nn.Module]:  # noqa: ARG003 - for overrides
        """Build a module that transforms plain values; None if the variant does not change them.

        The ``s`` and each ``l`` that reuses its distribution get separate modules. The module takes (values, x_BKC) and
        returns the new values. The modules of several variants are called in table order.
        """
        return None

    @classmethod
    def build_vectors(cls, options: SublayerOptions, are_keys: bool) -> Optional[nn.Module]:  # noqa: ARG003 - as above
        """Build the :class:`VectorMaker` for queries or keys; None if the variant does not change them.

        An ``s`` has one maker for its queries and one for its keys; both are also used for its global tokens. Each
        ``k`` has one maker for its queries.
        """
        return None


class VectorMaker(Protocol):
    """A module that transforms queries or keys before their dot products are computed."""

    def __call__(
        self,
        x_BNTD: Tensor,
        scores: Scores,
        keys: int,
        places_AG: Optional[Tensor] = None,
    ) -> Tensor:
        """Transform the vectors of tokens; for the arguments see :func:`make_vectors`."""

    def without_position(self, x_NMD: Tensor) -> Tensor:
        """Transform keys without a token or position, such as persistent keys."""


def build_choices(options: SublayerOptions) -> nn.ModuleDict:
    """Build the selected variants' modules by name, in table order; the first one is the outermost."""
    rows = chosen_variants(options.values)
    return nn.ModuleDict({row.name: row.load()(options) for row in rows})


def build_values(options: SublayerOptions) -> nn.ModuleDict:
    """Build the selected variants' modules that transform values, by name, in table order."""
    rows = chosen_variants(options.values)
    return _without_none({row.name: row.load().build_values(options) for row in rows})


def build_vectors(options: SublayerOptions, are_keys: bool) -> nn.ModuleDict:
    """Build the selected variants' modules that transform queries or keys, by name, in table order."""
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
    """Apply the attention variants' transformations to projected queries or keys.

    Args:
        makers: the result of :func:`build_vectors`.
        x_BNTD: projected queries or keys.
        scores: the terms added to the attention scores.
        keys: K, the number of keys. Without `places_AG`, the rows of `x_BNTD` correspond to the last T keys.
        places_AG: the key positions of the rows (B, G) or (1, G); K or more for rows of padding.
    """
    for maker in makers.values():
        x_BNTD = maker(x_BNTD, scores, keys, places_AG)
    return x_BNTD
