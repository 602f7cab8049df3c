"""What the search learns: for every layer a distribution over candidates, and the noise that explores it."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.patterns.grammar import read_sublayer


class Choices(nn.Module):
    """Architecture parameters of all layers, uniform at first (PAR Transformer, section 2.2).

    Args:
        layers: L.
        candidates: names, K of them.

    Attributes:
        candidates: as given.
        logits: the parameter, (L, K).
        allowed: (L, K); False in the first layer for kinds that read, as nothing is below: their weight is exactly 0.
        temperature: of the Gumbel-softmax; the search lowers it.
    """

    def __init__(self, layers: int, candidates: tuple[str, ...]):
        super().__init__()
        self.candidates = candidates
        self.logits = nn.Parameter(torch.zeros(layers, len(candidates)))
        allowed = torch.ones(layers, len(candidates), dtype=torch.bool)
        allowed[0] = torch.tensor([read_sublayer(name).kind.reads is None for name in candidates])
        self.register_buffer("allowed", allowed, persistent=False)
        self.temperature = 1.0

    def forward(self) -> Tensor:
        """The weights m (L, K) of equation 4; rows sum to 1.

        In training each call draws them anew by Gumbel-softmax; in evaluation they are the probabilities.
        """
        if not self.training:
            return self.probabilities()
        return F.gumbel_softmax(self._masked(), tau=self.temperature, dim=-1)

    def probabilities(self) -> Tensor:
        """(L, K): the probability that each candidate is sampled."""
        return self._masked().softmax(dim=-1)

    def entropy(self) -> float:
        """Bits, the mean over layers: log2 K at first (less in a first layer without ``l``), 0 when all is decided."""
        probabilities = self.probabilities().detach()
        return -float(torch.xlogy(probabilities, probabilities).sum(dim=-1).mean()) / math.log(2)

    def _masked(self) -> Tensor:
        return self.logits.masked_fill(~self.allowed, float("-inf"))
