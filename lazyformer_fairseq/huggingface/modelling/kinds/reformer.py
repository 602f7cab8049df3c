"""``s[buckets=b]``: attention among positions that hash alike (Reformer, Kitaev et al., 2020, section 2)."""

from typing import Optional

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..attention import Attend, Attended, Attention, AttentionKind, WrittenDistribution
from ..interface import KINDS, PlannedSublayer

SELF_SCORE = -1e5  # a query sees itself only where it sees nothing else


class Reformer(AttentionKind):
    """Queries are keys. A key is the query of its position, scaled to length one.

    Positions are sorted by bucket and cut into chunks; a query sees the keys of its bucket in its own chunk and in the
    next ones to either side, and of several rounds what any of them shows. An input that a chunk holds is not hashed.
    Rotations are drawn anew in each pass: in training from torch's generator, in evaluation from a fixed seed, as in
    the model that was exported. All pairs are written out here: memory T x T, and hashing saves no time.
    """

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__(config, planned)
        self.projections = {"keys"}
        self.buckets, self.rounds, self.chunk = (planned.settings[name] for name in ("buckets", "rounds", "chunk"))
        self.dropout = config.attention_probs_dropout_prob

    def attend(self, attention: Attention, inner: Attend) -> Attended:
        vectors_BNTD = attention.k_BNKD
        scale = torch.rsqrt(vectors_BNTD.square().sum(-1, keepdim=True) + 1e-6 * vectors_BNTD.size(-1))
        scores = torch.matmul(vectors_BNTD, (vectors_BNTD * scale).transpose(-2, -1))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        seen = self._are_met(vectors_BNTD.detach(), attention.shared.padding_mask_BT)
        scores = torch.where(seen, scores, float("-inf"))
        is_self = torch.eye(vectors_BNTD.size(-2), dtype=torch.bool, device=scores.device)
        probabilities = scores.masked_fill(is_self, SELF_SCORE).softmax(-1)
        distribution = WrittenDistribution(probabilities.to(attention.values.dtype))
        return Attended(distribution.attend(attention.values, self.dropout if self.training else 0.0), distribution)

    def _are_met(self, vectors_BNTD: Tensor, padding_mask_BT: Optional[Tensor]) -> Tensor:
        """(B, N, T, T): whether any round shows a query a key; padding meets padding alone."""
        time = vectors_BNTD.size(-2)
        if time <= self.chunk:
            is_text = torch.ones_like(vectors_BNTD[:, :1, :, 0], dtype=torch.bool)
            if padding_mask_BT is not None:
                is_text = ~padding_mask_BT[:, None]
            return is_text[..., None] == is_text[..., None, :]
        codes_BNRT = self._codes(vectors_BNTD, padding_mask_BT)
        return ((codes_BNRT[..., None] - codes_BNRT[..., None, :]).abs() <= 1).any(2)

    def _codes(self, vectors_BNTD: Tensor, padding_mask_BT: Optional[Tensor]) -> Tensor:
        """(B, N, R, T): as far apart as chunks are where buckets are the same, and farther where they are not."""
        time = vectors_BNTD.size(-2)
        rotated = torch.einsum("bntd,ndrh->bnrth", *self._rotations(vectors_BNTD))
        buckets = torch.cat([rotated, -rotated], dim=-1).argmax(-1)
        if padding_mask_BT is not None:
            buckets = buckets.masked_fill(padding_mask_BT[:, None, None], self.buckets)
        order = (buckets * time + torch.arange(time, device=buckets.device)).argsort(-1)
        return buckets * (time // self.chunk + 3) + order.argsort(-1) // self.chunk

    def _rotations(self, vectors_BNTD: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors, and rotations (N, D, R, b / 2) from a standard normal distribution."""
        exact = torch.promote_types(vectors_BNTD.dtype, torch.float32)
        generator = None if self.training else torch.Generator(vectors_BNTD.device).manual_seed(0)
        size = (self.num_heads, vectors_BNTD.size(-1), self.rounds, self.buckets // 2)
        rotations = torch.randn(size, generator=generator, device=vectors_BNTD.device, dtype=exact)
        return vectors_BNTD.to(exact), rotations


KINDS["buckets"] = Reformer
