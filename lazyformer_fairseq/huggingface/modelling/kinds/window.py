"""``s[window=w]``: a sliding window, gaps in it, and global tokens (Longformer, Beltagy et al., 2020, section 3.1)."""

from typing import Any, ClassVar, NamedTuple, Optional

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..attention import Attend, Attended, Attention, AttentionKind, split_heads
from ..interface import KINDS, PlannedSublayer, Shared
from ..sights import Places, by_heads


class Window(AttentionKind):
    """w keys to either side; the last `dilated_heads` heads see every `dilation`-th key.

    Global tokens see all and are seen by all: the first g of the text, or those that the caller gives. What they see
    has projections of its own: queries, keys and values. The scores of all tokens are computed twice, so that shapes
    do not depend on how many are global.

    Attributes:
        is_given: whether the caller gives them.
        first: g, or 0 where the caller gives them.
    """

    copies: ClassVar[dict[str, str]] = {"q_proj": "q", "k_proj": "k"}

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__(config, planned)
        settings = planned.settings
        self.width, self.dilation = settings["window"], settings["dilation"]
        self.dilated_heads = settings["dilated_heads"] if self.dilation > 1 else 0
        self.is_given = settings["global"] == "given"
        self.first = 0 if self.is_given else settings["global"]
        if self.has_global:
            self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
            self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)

    @property
    def has_global(self) -> bool:
        return self.is_given or self.first > 0

    @classmethod
    def build_values(cls, config: PretrainedConfig, planned: PlannedSublayer) -> Optional[nn.Module]:
        return GlobalValues(config) if planned.settings["global"] else None

    def attend(self, attention: Attention, inner: Attend) -> Attended:
        places = Places(attention)
        seen = places.band(self.width)
        if self.dilated_heads:
            gaps = places.band(self.width, self.dilation)
            seen = by_heads(seen, self.num_heads - self.dilated_heads, gaps, self.dilated_heads)
        if not self.has_global:
            return inner(attention.seeing(seen))
        is_global_BT = self._global_tokens(attention)
        plain_values, their_values = attention.values
        x = attention.x_BTC
        q, k = split_heads(self.q_proj(x), self.num_heads), split_heads(self.k_proj(x), self.num_heads)
        theirs = inner(attention.with_(q_BNTD=q, k_BNKD=k, values=their_values))
        seen = seen | is_global_BT[:, None, None]
        plain = inner(attention.with_(values=plain_values).seeing(seen))
        is_theirs = is_global_BT[:, None, :, None]
        output = torch.where(is_theirs, theirs.output_BNTD, plain.output_BNTD)
        return Attended(output, GlobalDistribution(is_theirs, theirs.distribution, plain.distribution))

    def _global_tokens(self, attention: Attention) -> Tensor:
        """(B or 1, T): True at them."""
        shared, time = attention.shared, attention.x_BTC.size(1)
        if self.is_given:
            return _given_positions(shared, attention.x_BTC)
        if shared.padding_mask_BT is None:
            return (torch.arange(time, device=attention.x_BTC.device) < self.first)[None]
        is_text = ~shared.padding_mask_BT
        return is_text & (is_text.cumsum(-1) <= self.first)


def _given_positions(shared: Shared, x_BTC: Tensor) -> Tensor:
    given = shared.global_positions_BT
    if given is None:
        raise ValueError(
            "this model's window attention sees and shows tokens that the caller marks: pass global_attention_mask, "
            "(batch, length), 1 at tokens that see all and that all see, such as those of a question"
        )
    if given.shape != x_BTC.shape[:2]:
        raise ValueError(f"global_attention_mask is {tuple(given.shape)}, must be {tuple(x_BTC.shape[:2])}")
    return given.bool()


class GlobalValues(nn.Module):
    """The values that global tokens see, beside those that others see."""

    copies: ClassVar[dict[str, str]] = {"v_proj": "v"}

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, v_BNTD: Tensor, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        return v_BNTD, split_heads(self.v_proj(x_BTC), self.num_heads)


class GlobalDistribution(NamedTuple):
    """That of global tokens at their places, (B or 1, 1, T, 1), the other one at the others'. Values are a pair."""

    is_theirs: Tensor
    theirs: Any
    plain: Any

    def attend(self, values: tuple[Tensor, Tensor], dropout: float) -> Tensor:
        """(B, N, T, D)."""
        plain_values, their_values = values
        theirs, plain = self.theirs.attend(their_values, dropout), self.plain.attend(plain_values, dropout)
        return torch.where(self.is_theirs, theirs, plain)

    @property
    def probabilities(self) -> Tensor:
        return torch.where(self.is_theirs, self.theirs.probabilities, self.plain.probabilities)


KINDS["window"] = Window
