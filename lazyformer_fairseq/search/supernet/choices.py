"""What the search chooses: for every layer a distribution over candidates, and the noise it is explored with."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError

IDENTITY = "identity"
CANDIDATES = ("s", "l", "f", IDENTITY)


def read_candidates(text: str) -> tuple[str, ...]:
    """``"s,f,identity"`` as the candidates, in the order of :data:`CANDIDATES`.

    Raises:
        UserError: for an unknown one, fewer than two, and an ``l`` without an ``s`` whose distribution it could read.
    """
    given = [name.strip() for name in text.split(",") if name.strip()]
    for name in given:
        if name not in CANDIDATES:
            raise UserError(f"--candidates {text}: unknown {name!r}; choose from {', '.join(CANDIDATES)}")
    if "l" in given and "s" not in given:
        raise UserError(f"--candidates {text}: l reuses the distribution of an s below it; add s")
    if len(set(given)) < 2:
        raise UserError(f"--candidates {text}: with fewer than two there is nothing to choose")
    return tuple(name for name in CANDIDATES if name in given)


class Choices(nn.Module):
    """Architecture parameters of all layers, uniform at first (PAR Transformer, section 2.2).

    Args:
        layers: L.
        candidates: names, K of them.

    Attributes:
        candidates: as given.
        logits: the parameter, (L, K).
        allowed: (L, K); False for ``l`` in the first layer, which has no distribution to read: its weight is exactly 0.
        temperature: of the Gumbel-softmax; the search lowers it.
    """

    def __init__(self, layers: int, candidates: tuple[str, ...]):
        super().__init__()
        self.candidates = candidates
        self.logits = nn.Parameter(torch.zeros(layers, len(candidates)))
        allowed = torch.ones(layers, len(candidates), dtype=torch.bool)
        if "l" in candidates:
            allowed[0, candidates.index("l")] = False
        self.register_buffer("allowed", allowed, persistent=False)
        self.temperature = 1.0

    def forward(self) -> Tensor:
        """The weights m (L, K) of equation 4; rows sum to 1.

        In training they are drawn anew by Gumbel-softmax at each call; in evaluation they are the probabilities.
        """
        if not self.training:
            return self.probabilities()
        return F.gumbel_softmax(self._masked(), tau=self.temperature, dim=-1)

    def probabilities(self) -> Tensor:
        """(L, K): how probable each candidate is to be the one sampled."""
        return self._masked().softmax(dim=-1)

    def entropy(self) -> float:
        """Bits, the mean over layers: log2 K at first (less in a first layer without ``l``), 0 when all is decided."""
        probabilities = self.probabilities().detach()
        return -float(torch.xlogy(probabilities, probabilities).sum(dim=-1).mean()) / math.log(2)

    def _masked(self) -> Tensor:
        return self.logits.masked_fill(~self.allowed, float("-inf"))
