"""The interface of an attention variant: it changes what an ``s`` attends with, and what comes of it."""

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
    """Everything that an ``s`` is about to attend with.

    Attributes:
        x_BTC: its input.
        x_BKC: the same behind the memory of a causal model.
        q_BNTD, k_BNKD: queries and keys; without numbers (D = 0) where there are no such projections.
        values: (B, N, K, D); for some attention variants a tuple of several, which they alone understand.
        scores: all that shapes the distribution besides.
        positions: Transformer-XL's, for queries of a variant's own; `scores` has those of the plain queries. Causal
            models only.
        makers: what queries, and keys, of a variant's own go through: see :func:`make_vectors`.
        back_end: that computes it whatever the network's is, as for a few queries beside the others; empty for that.
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
        """Return the same with some parts of the scores replaced."""
        return replace(self, scores=self.scores.with_own(**parts))

    def with_mask(self, mask: AttentionMask, **parts: Any) -> "Attention":
        """Return the same with a variant's mask, as far back as the network's own lets queries see, and other parts."""
        network = self.scores.mask
        if network is not None:
            assert network.reach is not None, "a network's own mask has a limit"
            mask = mask.within(network.reach)
        return self.with_scores(mask=mask, **parts)


class AttentionOutput(NamedTuple):
    """The output of an attention.

    Attributes:
        output_BNTD: of each head.
        distribution: for the ``l`` above, a ReusableAttention whose ``attend`` takes what the values were, a tuple of
            them too.
    """

    output_BNTD: Tensor
    distribution: Any


Attend = Callable[[Attention], AttentionOutput]


class VariantModule(nn.Module):
    """The module of a row of :data:`lazyformer_fairseq.patterns.attention_variants.ATTENTION_VARIANTS`.

    An attention variant overrides what it changes and inherits the rest from here, which is a plain ``s``:

    | changes | overrides |
    |---|---|
    | projections | `project`, or `build_vectors` for what follows them |
    | mask | `mask` |
    | scores, and weights made of them | `attend`, which replaces parts of :class:`Scores` |
    | memory: which keys and values there are | `build_values`, and `attend` |

    What is known without weights stands in the row.

    Args:
        options: of the network and the ``s``.

    Attributes:
        project: (input, projection of queries, keys and values, scores) -> queries, keys and values, (B, places, C)
            each, of an encoder's ``s``; None where each position is projected alone.
        mask: which keys queries see; None for all.
    """

    project: Optional[Callable[[Tensor, Linear, Scores], tuple[Tensor, Tensor, Tensor]]] = None
    mask: Optional[AttentionMask] = None

    def __init__(self, options: SublayerOptions):
        super().__init__()
        self.num_heads = options.num_heads

    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Change what comes in, let the other variants attend (`inner`), and change what comes out."""
        if self.mask is not None:
            attention = attention.with_mask(self.mask)
        return inner(attention)

    @property
    def reach(self) -> Optional[int]:
        """Positions before a query's own that it may see now; None for no limit. Memory beyond is left out."""
        if self.mask is None:
            return None
        return self.mask.reach

    @classmethod
    def build_values(cls, options: SublayerOptions) -> Optional[nn.Module]:  # noqa: ARG003 - for those that override it
        """Build what turns plain values into its own, for this ``s`` and for each ``l`` that reads it; None for none.

        It is called as (values, x_BKC) -> values, in the table's order.
        """
        return None

    @classmethod
    def build_vectors(cls, options: SublayerOptions, are_keys: bool) -> Optional[nn.Module]:  # noqa: ARG003 - likewise
        """Build what turns plain queries, or keys, into its own, a VectorMaker; None for plain ones.

        An ``s`` has one for its queries and one for its keys, which its global tokens share, each ``k`` one for its
        queries.
        """
        return None


class VectorMaker(Protocol):
    """A module that turns queries, or keys, into the form that an attention variant compares them in."""

    def __call__(
        self,
        x_BNTD: Tensor,
        scores: Scores,
        keys: int,
        places_AG: Optional[Tensor] = None,
    ) -> Tensor:
        """Return the vectors of tokens in that form; :func:`make_vectors` has the arguments."""

    def without_place(self, x_NMD: Tensor) -> Tensor:
        """Return keys that belong to no token, and so have no place, in the form that the queries meet."""


def build_choices(options: SublayerOptions) -> nn.ModuleDict:
    """Build the chosen variants by name, in the table's order: the first one is outermost."""
    rows = chosen_variants(options.values)
    return nn.ModuleDict({row.name: row.load()(options) for row in rows})


def build_values(options: SublayerOptions) -> nn.ModuleDict:
    """Build what the chosen variants need for values, in an ``s`` and in those that read it, by name."""
    rows = chosen_variants(options.values)
    return _without_none({row.name: row.load().build_values(options) for row in rows})


def build_vectors(options: SublayerOptions, are_keys: bool) -> nn.ModuleDict:
    """Build what queries, or keys, go through, by name, in the table's order."""
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
    """Return queries, or keys, in the form that an attention variant compares them in.

    Args:
        makers: of :func:`build_vectors`.
        x_BNTD: as projected.
        scores: of the attention.
        keys: K; rows of `x_BNTD` belong to the last of them.
        places_AG: the keys that rows belong to instead, (B, G) or (1, G); K or more for rows that belong to none.
    """
    for maker in makers.values():
        x_BNTD = maker(x_BNTD, scores, keys, places_AG)
    return x_BNTD
