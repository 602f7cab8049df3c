"""``s[persistent=m]``: learned keys and values beside the tokens' (Sukhbaatar et al., 2019b, section 4)."""

import math
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from ..attention import Attend, Attended, Attention, AttentionKind
from ..interface import KINDS, PlannedSublayer


class Persistent(AttentionKind):
    """m keys of each head, kept as weights of N(0, 1 / D), that every query sees: nothing is added to their scores.

    Probabilities are of all keys, (B, N, T, T + m).
    """

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__(config, planned)
        size = config.hidden_size // self.num_heads
        self.keys = nn.Parameter(torch.zeros(self.num_heads, planned.settings["persistent"], size))

    def init_own_weights(self, std: float) -> None:
        nn.init.normal_(self.keys, std=self.keys.size(-1) ** -0.5)

    @classmethod
    def build_values(cls, config: PretrainedConfig, planned: PlannedSublayer) -> Optional[nn.Module]:
        return PersistentValues(config, planned.settings["persistent"])

    def attend(self, attention: Attention, inner: Attend) -> Attended:
        vectors, size = self.keys.shape[1:]
        added = attention.added_BNTK
        if added is not None:
            tokens = attention.k_BNKD.size(-2)
            added = F.pad(added.expand(*added.shape[:-1], tokens), (0, vectors))
        k_BNKD = append_vectors(attention.k_BNKD, self.keys * math.sqrt(size))
        return inner(attention.with_(k_BNKD=k_BNKD, added_BNTK=added, may_be_blind=False))


class PersistentValues(nn.Module):
    """The m values of one sublayer, kept as weights of N(0, 1 / m)."""

    def __init__(self, config: PretrainedConfig, vectors: int):
        super().__init__()
        heads = config.num_attention_heads
        self.values = nn.Parameter(torch.zeros(heads, vectors, config.hidden_size // heads))

    def init_own_weights(self, std: float) -> None:
        nn.init.normal_(self.values, std=self.values.size(1) ** -0.5)

    def forward(self, v_BNTD: Tensor, x_BTC: Tensor) -> Tensor:
        """(B, N, T + m, D)."""
        return append_vectors(v_BNTD, self.values * math.sqrt(self.values.size(1)))


def append_vectors(tokens_BNTD: Tensor, vectors_NMD: Tensor) -> Tensor:
    """(B, N, T + m, D)."""
    vectors = vectors_NMD.to(tokens_BNTD.dtype).expand(tokens_BNTD.size(0), -1, -1, -1)
    return torch.cat([tokens_BNTD, vectors], dim=2)


KINDS["persistent"] = Persistent
