"""``s[window=w,global=g]``: tokens that see all and that all see, beside a sliding window (Longformer, section 3.1)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Columns
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.linear import Linear
from lazyformer_fairseq.modules.sublayers.attention import split_heads
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import (
    Attend,
    Attention,
    AttentionOutput,
    make_vectors,
)
from lazyformer_fairseq.modules.sublayers.attention_variants.window import Window
from lazyformer_fairseq.modules.sublayers.interface import SublayerOptions
from lazyformer_fairseq.patterns.attention_variants import GIVEN


class WindowWithGlobalTokens(Window):
    """A window, and with ``global`` g tokens that see all and that all see.

    Global tokens have projections of their own for what they see: queries of theirs, keys and values of all (section
    3.1). Those start as copies. What others see of global tokens are the plain keys and values, counted once, as in
    the published code.

    In a causal model global tokens see what is before them, and all see them that come after; u and v are those of all
    tokens.

    Attributes:
        copies: by the name of a linear map, which projection it starts as a copy of: "q", "k" or "v".
        first: g, or 0 where the caller gives the positions.
        q_proj, k_proj: of global tokens; None without them.
    """

    copies: ClassVar[Mapping[str, str]] = {"q_proj": "q", "k_proj": "k"}

    def __init__(self, options: SublayerOptions):
        super().__init__(options)
        self.q_proj: Optional[Linear] = None
        self.k_proj: Optional[Linear] = None
        self.first = 0
        if not options.values["global"]:
            return
        has_bias = not options.is_causal
        self.q_proj = Linear(options.embed_dim, options.embed_dim, has_bias)
        self.k_proj = Linear(options.embed_dim, options.embed_dim, has_bias)
        if options.values["global"] != GIVEN:
            self.first = options.values["global"]
            seen_by_all = Columns(self.first)
            groups = [(heads, (*parts, seen_by_all)) for heads, parts in self.mask.groups]
            self.mask = AttentionMask(tuple(groups))

    @classmethod
    @override
    def build_values(cls, options: SublayerOptions) -> Optional[nn.Module]:
        """Build the values that global tokens see."""
        if options.values["global"]:
            return GlobalValues(options)
        return None

    @override
    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Attend twice: for global tokens by their own projections, and for all others."""
        if self.q_proj is None:
            return super().attend(attention, inner)
        tokens = self._global_tokens(attention)
        plain_values, their_values = attention.values
        theirs = inner(self._of(tokens, attention, their_values))
        # A back end whose keys an upper sublayer reads hands the last ones on.
        masked = attention.with_mask(self.mask)
        if tokens.mask_BK is not None:
            masked = masked.with_scores(seen_BK=tokens.mask_BK)
        plain = inner(replace(masked, values=plain_values))
        output = tokens.put(theirs.output_BNTD, plain.output_BNTD)
        distribution = GlobalDistribution(tokens, theirs.distribution, plain.distribution)
        return AttentionOutput(output, distribution)

    def _global_tokens(self, attention: Attention) -> "GlobalTokens":
        """Return which tokens are global: those given, or the first of the text."""
        scores = attention.scores
        if not self.first:
            if scores.given_BK is None or scores.given_places_BG is None:
                raise UserError(
                    "global=given: nobody gave positions; pass global_positions, or write global=1, whose weights are "
                    "the same, for the first token"
                )
            return GlobalTokens(scores.given_places_BG, scores.given_BK)
        num_tokens = min(self.first, attention.x_BTC.size(1))
        places = torch.arange(num_tokens, device=attention.x_BTC.device)
        return GlobalTokens(places[None], None)

    def _of(self, tokens: "GlobalTokens", attention: Attention, v_BNKD: Tensor) -> Attention:
        """Return what global tokens attend with."""
        assert self.q_proj is not None and self.k_proj is not None, "they have projections of their own"
        x_BGC = tokens.take(attention.x_BTC)
        q_BGC = self.q_proj(x_BGC)
        k_BKC = self.k_proj(attention.x_BKC)
        scores = attention.scores
        keys = attention.x_BKC.size(1)
        makers_of_queries, makers_of_keys = attention.makers
        q = make_vectors(makers_of_queries, split_heads(q_BGC, self.num_heads), scores, keys, tokens.places_AG)
        k = make_vectors(makers_of_keys, split_heads(k_BKC, self.num_heads), scores, keys)
        by_distance = None
        if attention.positions is not None and scores.distances_NKD is not None:
            about_positions = (q + attention.positions.position_bias[:, None]) / math.sqrt(q.size(-1))
            by_distance = torch.matmul(about_positions, scores.distances_NKD.transpose(-2, -1))
            q = q + attention.positions.content_bias[:, None]
        added = _rows(scores, tokens.places_AG, keys, by_distance)
        if scores.is_causal:
            if added is None:
                added = q.new_zeros(1)
            is_future = torch.arange(keys, device=q.device) > tokens.places_AG[:, None, :, None]
            added = added.masked_fill(is_future, float("-inf"))
        return Attention(
            x_BTC=x_BGC,
            x_BKC=attention.x_BKC,
            q_BNTD=q,
            k_BNKD=k,
            values=v_BNKD,
            scores=Scores(lengths_B=scores.lengths_B, learned_BNTK=added),
            back_end="eager",
        )


class GlobalValues(nn.Module):
    """The values that global tokens see, beside those that others see."""

    copies: ClassVar[Mapping[str, str]] = {"v_proj": "v"}

    def __init__(self, options: SublayerOptions):
        super().__init__()
        self.num_heads = options.num_heads
        has_bias = not options.is_causal
        self.v_proj = Linear(options.embed_dim, options.embed_dim, has_bias)

    def forward(self, v_BNKD: Tensor, x_BKC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values that others see, and those that global tokens see."""
        return v_BNKD, split_heads(self.v_proj(x_BKC), self.num_heads)


class GlobalTokens(NamedTuple):
    """The places of the global tokens of each sequence.

    Attributes:
        places_AG: (B, G), or (1, G) where all sequences have the same; T in place of tokens that a sequence lacks.
        mask_BK: True at them; None where the mask has them.
    """

    places_AG: Tensor
    mask_BK: Optional[Tensor]

    def take(self, x_BTC: Tensor) -> Tensor:
        """Return their vectors (B, G, C); some vector for those that are lacking."""
        batch, time, embed_dim = x_BTC.shape
        places = self.places_AG.clamp(max=time - 1)
        return x_BTC.gather(1, places[..., None].expand(batch, -1, embed_dim))

    def put(self, theirs_BNGD: Tensor, all_BNTD: Tensor) -> Tensor:
        """Return `all_BNTD` with theirs in their places."""
        with_none = F.pad(all_BNTD, (0, 0, 0, 1))  # those that are lacking go there
        places = self.places_AG[:, None, :, None].expand_as(theirs_BNGD)
        put = with_none.scatter_(2, places, theirs_BNGD.to(with_none.dtype))
        return put[:, :, :-1]


class GlobalDistribution(NamedTuple):
    """The distribution that an ``l`` reads; its values are a pair, for plain and for global tokens."""

    tokens: GlobalTokens
    theirs: Any
    plain: Any

    def attend(self, values: tuple[Tensor, Tensor], dropout: float) -> Tensor:
        """Return the weighted sums (B, N, T, D)."""
        plain_values, their_values = values
        theirs = self.theirs.attend(their_values, dropout)
        plain = self.plain.attend(plain_values, dropout)
        return self.tokens.put(theirs, plain)

    @property
    def probabilities(self) -> Tensor:
        """P (B, N, T, K), where both parts are written out."""
        return self.tokens.put(self.theirs.probabilities, self.plain.probabilities)


def _rows(
    scores: Scores,
    places_AG: Tensor,
    keys: int,
    by_distance_BNGK: Optional[Tensor],
) -> Optional[Tensor]:
    """Return what is added to scores of queries in these places, (A or B, N or 1, G, K); None for nothing.

    Args:
        scores: of the network.
        places_AG: of the queries.
        keys: K.
        by_distance_BNGK: scores of Transformer-XL's positions by distance, K + 1 of them: see
            :attr:`Scores.distances_NKD`.
    """
    added = None
    ahead_AGK = torch.arange(keys, device=places_AG.device) - places_AG[..., None]
    entry_AGK = keys - 1 + ahead_AGK  # of a table by distance
    if by_distance_BNGK is not None:
        columns = entry_AGK.clamp(0, keys)[:, None]
        added = by_distance_BNGK.gather(-1, columns.expand(*by_distance_BNGK.shape[:-1], keys))
    if scores.table_KN is not None and scores.bucket_by_distance is not None:
        buckets_AGK = scores.bucket_by_distance[entry_AGK.clamp(min=0)]
        bias_ANGK = scores.table_KN[buckets_AGK].permute(0, 3, 1, 2)
        if added is None:
            added = bias_ANGK
        else:
            added = added + bias_ANGK
    return added
