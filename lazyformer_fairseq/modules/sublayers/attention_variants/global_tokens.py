"""``s[window=w,global=g]``: a sliding window with global tokens (Longformer, section 3.1).

Global tokens attend to all tokens, and all tokens attend to them.
"""

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
    """Sliding-window attention with optional global tokens (the setting ``global``).

    Global tokens use separate projections for their own queries, and for the keys and values of all tokens (section
    3.1). These projections are initialized as copies of the regular ones. Other tokens attend to the regular keys and
    values of global tokens. A global token within the window counts once, as in the published code.

    In a causal model, a global token attends only to the tokens before it, and only the tokens after it attend to it.
    Global and other tokens share Transformer-XL's u and v.

    Attributes:
        copies: the projection ("q", "k" or "v") from which each linear layer is initialized, by the layer's name.
        first: g, the number of global tokens at the start of the text; 0 if the caller passes their positions.
        q_proj: the query projection for global tokens; None without global tokens.
        k_proj: the key projection for the attention of global tokens; None without global tokens.
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
        """Build the value projection for the attention of global tokens; None without global tokens."""
        if options.values["global"]:
            return GlobalValues(options)
        return None

    @override
    def attend(self, attention: Attention, inner: Attend) -> AttentionOutput:
        """Compute attention twice: for global tokens, with their own projections, and for all other tokens."""
        if self.q_proj is None:
            return super().attend(attention, inner)
        tokens = self._global_tokens(attention)
        plain_values, global_values = attention.values
        of_global_tokens = inner(self._of(tokens, attention, global_values))
        # Plain attention comes last, because the keys and values of the last call of `inner` are passed on.
        masked = attention.with_mask(self.mask)
        if tokens.mask_BK is not None:
            masked = masked.with_scores(seen_BK=tokens.mask_BK)
        plain = inner(replace(masked, values=plain_values))
        output = tokens.put(of_global_tokens.output_BNTD, plain.output_BNTD)
        distribution = GlobalDistribution(tokens, of_global_tokens.distribution, plain.distribution)
        return AttentionOutput(output, distribution)

    def _global_tokens(self, attention: Attention) -> "GlobalTokens":
        """Return the positions of the global tokens: those that the caller passed, or the first ones of each text."""
        scores = attention.scores
        if not self.first:
            if scores.given_BK is None or scores.given_places_BG is None:
                raise UserError(
                    "global=given: positions of global tokens are missing; pass global_positions, or set global=1, "
                    "which makes the first token global and uses the same weights"
                )
            return GlobalTokens(scores.given_places_BG, scores.given_BK)
        num_tokens = min(self.first, attention.x_BTC.size(1))
        places = torch.arange(num_tokens, device=attention.x_BTC.device)
        return GlobalTokens(places[None], None)

    def _of(self, tokens: "GlobalTokens", attention: Attention, v_BNKD: Tensor) -> Attention:
        """Return the inputs for the attention of global tokens, with `v_BNKD` as values."""
        assert self.q_proj is not None and self.k_proj is not None, "global tokens have their own projections"
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
            places = torch.arange(keys, device=q.device)
            is_future = places > tokens.places_AG[:, None, :, None]
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
    """The value projection for the attention of global tokens."""

    copies: ClassVar[Mapping[str, str]] = {"v_proj": "v"}

    def __init__(self, options: SublayerOptions):
        super().__init__()
        self.num_heads = options.num_heads
        has_bias = not options.is_causal
        self.v_proj = Linear(options.embed_dim, options.embed_dim, has_bias)

    def forward(self, v_BNKD: Tensor, x_BKC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values for plain tokens (unchanged) and the values for global tokens."""
        return v_BNKD, split_heads(self.v_proj(x_BKC), self.num_heads)


class GlobalTokens(NamedTuple):
    """The positions of the global tokens of each sequence.

    Attributes:
        places_AG: the positions (B, G), or (1, G) if they are the same in all sequences. Sequences with fewer than G
            global tokens are padded with T.
        mask_BK: True at global tokens; None if the attention mask already makes them visible to all tokens.
    """

    places_AG: Tensor
    mask_BK: Optional[Tensor]

    def take(self, x_BTC: Tensor) -> Tensor:
        """Gather the vectors of the global tokens (B, G, C); the entries for padding are arbitrary."""
        batch, time, embed_dim = x_BTC.shape
        places = self.places_AG.clamp(max=time - 1)
        return x_BTC.gather(1, places[..., None].expand(batch, -1, embed_dim))

    def put(self, global_BNGD: Tensor, all_BNTD: Tensor) -> Tensor:
        """Return `all_BNTD` with the vectors of global tokens replaced by `global_BNGD`."""
        with_none = F.pad(all_BNTD, (0, 0, 0, 1))  # position T receives the entries for padding
        places = self.places_AG[:, None, :, None].expand_as(global_BNGD)
        put = with_none.scatter_(2, places, global_BNGD.to(with_none.dtype))
        return put[:, :, :-1]


class GlobalDistribution(NamedTuple):
    """The reusable attention distribution (for ``l`` sublayers), in two parts.

    Attributes:
        tokens: the global tokens.
        of_global_tokens: the distribution for the global tokens.
        plain: the distribution for all other tokens.
    """

    tokens: GlobalTokens
    of_global_tokens: Any
    plain: Any

    def attend(self, values: tuple[Tensor, Tensor], dropout: float) -> Tensor:
        """Return P V (B, N, T, D).

        Args:
            values: the values for plain tokens and the values for global tokens.
            dropout: the dropout rate on P.
        """
        plain_values, global_values = values
        of_global_tokens = self.of_global_tokens.attend(global_values, dropout)
        plain = self.plain.attend(plain_values, dropout)
        return self.tokens.put(of_global_tokens, plain)

    @property
    def probabilities(self) -> Tensor:
        """The probabilities P (B, N, T, K); available if both parts store theirs."""
        return self.tokens.put(self.of_global_tokens.probabilities, self.plain.probabilities)


def _rows(
    scores: Scores,
    places_AG: Tensor,
    keys: int,
    by_distance_BNGK: Optional[Tensor],
) -> Optional[Tensor]:
    """Return the position-dependent terms to add to the scores (A or B, N or 1, G, K); None if there are none.

    Args:
        scores: the network's scores.
        places_AG: the positions of the queries.
        keys: K.
        by_distance_BNGK: the scores for Transformer-XL's K + 1 distances, in the order of :attr:`Scores.distances_NKD`.
    """
    added = None
    ahead_AGK = torch.arange(keys, device=places_AG.device) - places_AG[..., None]
    entry_AGK = keys - 1 + ahead_AGK  # the index into a table of distances
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
