"""``s[entmax=1.5]``, ``s[entmax=learned]``: alpha-entmax in place of softmax (Correia et al., 2019, section 3)."""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..attention import Attend, Attended, Attention, AttentionKind
from ..interface import KINDS, PlannedSublayer

ENTMAX_STEPS = 12  # of Newton's method; rows of up to 16,384 scores take 10 at most


class Entmax(AttentionKind):
    """alpha of all heads, or 1 + sigmoid(a) with an a of each head, between 1.01 and 2."""

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__(config, planned)
        self.exponent = planned.settings["entmax"]
        if self.exponent == "learned":
            self.shape_N = nn.Parameter(torch.zeros(self.num_heads))

    def init_own_weights(self, std: float) -> None:
        if self.exponent == "learned":
            nn.init.normal_(self.shape_N)

    def attend(self, attention: Attention, inner: Attend) -> Attended:
        return inner(attention.with_(exponent_N=self._exponents(attention.q_BNTD), entmax=entmax))

    def _exponents(self, like: Tensor) -> Tensor:
        exact = torch.promote_types(like.dtype, torch.float32)
        if self.exponent == "learned":
            return (1 + torch.sigmoid(self.shape_N.to(exact))).clamp(1.01, 2.0)
        return torch.full((self.num_heads,), self.exponent, dtype=exact, device=like.device)


def entmax(scores: Tensor, exponent_N: Tensor) -> Tensor:
    """p = [1 + e (s - tau)]_+^(1 / e) with e = alpha - 1, tau such that a row sums to one; zeros where nothing is seen.

    Newton's method on the row's (1 / e)-norm finds tau without a gradient (Peters et al., 2019, section 3). One plain
    step from there changes nothing, but has the gradient of tau, in scores and in alpha, by the implicit function
    theorem.

    Args:
        scores: (..., N, T, K), -inf at keys that are not seen.
    """
    step = (exponent_N.to(scores.dtype) - 1)[:, None, None]
    is_hidden = scores == float("-inf")
    scores = scores.masked_fill(is_hidden, torch.finfo(scores.dtype).min / 4)
    below_best = (scores - scores.amax(-1, keepdim=True).detach()) * step

    def powers(above: Tensor) -> tuple[Tensor, Tensor]:
        """x^(1 / e - 1) and x^(1 / e), x = 1 + e (s - tau), where that is positive; `above` is tau from the best."""
        bases = below_best - above
        is_out = is_hidden | (bases <= -1)
        logs = torch.log1p(bases.masked_fill(is_out, 0))  # near softmax x is near 1: its distance from 1 counts
        slopes, masses = torch.exp(logs * (1 / step - 1)), torch.exp(logs / step)
        return slopes.masked_fill(is_out, 0), masses.masked_fill(is_out, 0)

    def sums(above: Tensor) -> tuple[Tensor, Tensor]:
        """Of both, to divide by the first: a row that sees nothing has zeros only."""
        slopes, masses = powers(above)
        tiny = torch.finfo(scores.dtype).tiny
        return slopes.sum(-1, keepdim=True).clamp(min=tiny), masses.sum(-1, keepdim=True)

    with torch.no_grad():
        above = torch.zeros_like(below_best[..., :1])
        for _ in range(ENTMAX_STEPS):
            slope, mass = sums(above)
            mass = mass.clamp(min=1)  # from this side of tau it is, but for rounding
            above = above - mass / slope * torch.expm1(-step * mass.log())
        slope, _ = sums(above)
    _, mass = sums(above)
    masses = powers(above + (mass - 1).masked_fill(mass == 0, 0) * step.detach() / slope)[1]
    return masses / masses.sum(-1, keepdim=True).detach().clamp(min=torch.finfo(scores.dtype).tiny)


KINDS["entmax"] = Entmax
