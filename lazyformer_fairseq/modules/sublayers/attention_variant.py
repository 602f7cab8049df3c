"""What the file of a kind of attention offers: it changes what an ``s`` attends with, and what comes of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Optional, Protocol

from torch import Tensor, nn

from lazyformer_fairseq.modules.attention import ReusableAttention
from lazyformer_fairseq.modules.attention.masks import AttentionMask
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.interface import RelativePositions, Settings, SublayerOptions
from lazyformer_fairseq.patterns.attention_kinds import chosen_kinds


@dataclass(frozen=True, eq=False)
class Attention:
    """What an ``s`` is about to attend with.

    Attributes:
        x_BTC: its input.
        x_BKC: the same behind the memory of a causal model.
        q_BNTD, k_BNKD: queries and keys; without numbers (D = 0) where there are no such projections.
        values: (B, N, K, D); for some kinds of attention a tuple of several, which they alone understand.
        scores: all that shapes the distribution besides.
        positions: Transformer-XL's, for queries of a choice's own; `scores` has those of the plain queries. Causal
            models only.
        makers: what queries, and keys, of a choice's own go through: see :func:`make_vectors`.
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
        """The same with some parts of the scores replaced."""
        return replace(self, scores=self.scores.with_own(**parts))

    def with_mask(self, mask: AttentionMask, **parts: Any) -> "Attention":
        """The same with a choice's mask, as far back as the network's own lets queries see, and other parts."""
        network = self.scores.mask
        return self.with_scores(mask=mask if network is None else mask.within(network.reach), **parts)


class AttentionOutput(NamedTuple):
    """What comes of it.

    Attributes:
        output_BNTD: of each head.
        distribution: for the ``l`` above; its ``attend`` takes what the values were.
    """

    output_BNTD: Tensor
    distribution: ReusableAttention


Attend = Callable[[Attention], AttentionOutput]
PROJECTIONS = frozenset({"queries", "keys"})


class AttentionVariant(nn.Module):
    """The module of a row of :data:`lazyformer_fairseq.patterns.attention_kinds.ATTENTION_KINDS`.

    A kind changes what it must and inherits the rest, which is a plain ``s``'s. Whoever needs to know something before
    there is a module (formulas, back ends, what a network refuses) asks the class, which gets the settings.

    Args:
        options: of the network and the ``s``.

    Attributes:
        refuses: features of the network's scores that it cannot stand with, each with the reason and the remedy.
        copies: by the name of a linear map of its own, which projection it starts as a copy of: "q", "k" or "v". The
            module of its values may have some, too.
        has_probabilities: whether the distribution on ``eager`` has `probabilities`, (B, N, T, K) of tokens, which a
            search mixes.
        has_positions: whether its scores know of positions by themselves: a causal model then adds none.
        takes_permuted: as of a :class:`~lazyformer_fairseq.modules.sublayers.interface.Sublayer`.
        why_no_segments: why a causal model with it carries no memory from one segment to the next, though it may attend
            to one of the whole text; empty if it may.
    """

    refuses: ClassVar[Mapping[str, str]] = {}
    copies: ClassVar[Mapping[str, str]] = {}
    has_probabilities: ClassVar[bool] = True
    has_positions: ClassVar[bool] = False
    takes_permuted: ClassVar[bool] = False
    why_no_segments: ClassVar[str] = ""

    def __init__(self, options: SublayerOptions):
        super().__init__()
        if options.is_causal:
            mask = self.mask_of(options.values, options.num_heads, is_causal=True)
        else:
            mask = None
        if mask is None:
            self.most_reach = None
        else:
            self.most_reach = mask.reach

    # What it computes.

    def project(self, x_BTC: Tensor, qkv_proj: Linear, scores: Scores) -> Optional[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values, (B, places, C) each, of an encoder's ``s``; None for all positions' projections."""
        return None

    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Changes what comes in, has the rest of the choices attend (`inner`), and changes what comes out."""
        return inner(attention)

    @classmethod
    def projections(cls, values: Settings) -> frozenset[str]:
        """Which of "queries" and "keys" the ``s`` projects; what one choice does without is not there."""
        return PROJECTIONS

    @classmethod
    def build_values(cls, options: SublayerOptions) -> Optional[nn.Module]:
        """What turns plain values into its own, for this ``s`` and for each ``l`` that reads it; None for plain ones.

        Called as (values, x_BKC) -> values, in the table's order.
        """
        return None

    @classmethod
    def build_vectors(cls, options: SublayerOptions, are_keys: bool) -> Optional[nn.Module]:
        """Build what turns plain queries, or keys, into its own, a VectorMaker; None for plain ones.

        An ``s`` has one for its queries and one for its keys, which its global tokens share, each ``k`` one for its
        queries.
        """
        return None

    # What it sees of a causal model's memory.

    @classmethod
    def why_no_memory(cls, values: Settings) -> str:
        """Why a causal model with it can have no memory; empty if it can."""
        return ""

    @property
    def reach(self) -> Optional[int]:
        """Positions before a query's own that it may see now; None for no limit. Memory beyond is left out."""
        return self.most_reach

    # Which back end computes it.

    @classmethod
    def features(cls, values: Settings) -> frozenset[str]:
        """What it puts into the scores, of :attr:`Scores.features`."""
        return frozenset()

    @classmethod
    def _with_features(cls, features: frozenset[str], values: Settings) -> frozenset[str]:
        """Those of scores with this choice, given those without."""
        return (features - {"positions"} if cls.has_positions else features) | cls.features(values)

    @classmethod
    def mask_of(cls, values: Settings, heads: int, is_causal: bool) -> Optional[AttentionMask]:
        """What queries see at most; None for all, and where no back end is chosen for it."""
        return None


class VectorMaker(Protocol):
    """A module that turns queries, or keys, into the form that a kind of attention compares them in."""

    def __call__(self, x_BNTD: Tensor, scores: Scores, keys: int, places_AG: Optional[Tensor] = None) -> Tensor:
        """Return the vectors of tokens in that form; :func:`make_vectors` has the arguments."""

    def without_place(self, x_NMD: Tensor) -> Tensor:
        """Return keys that belong to no token, and so have no place, in the form that the queries meet."""


def build_choices(options: SublayerOptions) -> nn.ModuleDict:
    """By name, in the table's order: the first one is outermost."""
    return nn.ModuleDict({row.name: row.load()(options) for row in chosen_kinds(options.values)})


def build_values(options: SublayerOptions) -> nn.ModuleDict:
    """By name, what an ``s`` and those that read it need for their values."""
    built = {row.name: row.load().build_values(options) for row in chosen_kinds(options.values)}
    return nn.ModuleDict({name: module for name, module in built.items() if module is not None})


def build_vectors(options: SublayerOptions, are_keys: bool) -> nn.ModuleDict:
    """By name, in the table's order, what queries, or keys, go through."""
    built = {row.name: row.load().build_vectors(options, are_keys) for row in chosen_kinds(options.values)}
    return nn.ModuleDict({name: module for name, module in built.items() if module is not None})


def make_vectors(
    makers: nn.ModuleDict,
    x_BNTD: Tensor,
    scores: Scores,
    keys: int,
    places_AG: Optional[Tensor] = None,
) -> Tensor:
    """Queries, or keys, in the form that a kind of attention compares them in.

    Args:
        makers: of :func:`build_vectors`.
        keys: K; rows of `x_BNTD` belong to the last of them.
        places_AG: the keys that rows belong to instead, (B, G) or (1, G); K or more for rows that belong to none.
    """
    for maker in makers.values():
        x_BNTD = maker(x_BNTD, scores, keys, places_AG)
    return x_BNTD


def has_positions(values: Settings) -> bool:
    """Whether scores of an ``s`` of these settings know of positions by themselves."""
    return any(choice.has_positions for choice in variant_classes(values))


def projections(values: Settings) -> frozenset[str]:
    """Which of "queries" and "keys" an ``s`` of these settings projects."""
    return PROJECTIONS.intersection(*(choice.projections(values) for choice in variant_classes(values)))


def variant_classes(values: Settings) -> list[type[AttentionVariant]]:
    return [row.load() for row in chosen_kinds(values)]
