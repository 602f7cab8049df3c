"""What the search learns: for every layer a distribution over candidates, and the noise that explores it."""

import math
import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, read_sublayer
from lazyformer_fairseq.patterns.kinds import kinds


def candidate_name(sublayer: PlannedSublayer) -> str:
    """As in ``--candidates``: letter and settings; ``identity`` by its name, because a dash is easy to overlook."""
    return sublayer.kind.name if sublayer.kind.is_identity else sublayer.text


def read_candidates(text: str) -> tuple[str, ...]:
    """``"s,f,identity"`` as the candidates, in the order of the table of kinds; commas in brackets do not separate.

    Raises:
        UserError: an unknown one, fewer than two, or one that reads what no other hands on.
    """
    given = [_read(name.strip(), text) for name in re.split(r",(?![^\[]*\])", text) if name.strip()]
    handed_on = {what for candidate in given for what in candidate.kind.hands_on}
    for candidate in given:
        if candidate.kind.reads and candidate.kind.reads not in handed_on:
            givers = " or ".join(kind.letter for kind in kinds() if candidate.kind.reads in kind.hands_on)
            raise UserError(
                f"--candidates {text}: {candidate.text} reuses the {candidate.kind.reads} of an {givers} below it; "
                f"add {givers}"
            )
    in_order = sorted(given, key=lambda candidate: kinds().index(candidate.kind))
    names = tuple(dict.fromkeys(candidate_name(candidate) for candidate in in_order))
    if len(names) < 2:
        raise UserError(f"--candidates {text}: with fewer than two there is nothing to choose")
    return names


def _read(name: str, text: str) -> PlannedSublayer:
    try:
        return read_sublayer(name)
    except UserError as error:
        known = ", ".join(candidate_name(PlannedSublayer(kind)) for kind in kinds())
        raise UserError(f"--candidates {text}: unknown {name!r}; choose from {known}\n{error}") from None


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
