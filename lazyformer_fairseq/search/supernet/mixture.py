"""The supernet: the model itself, every sublayer a weighted sum of candidates (PAR Transformer, section 2.1)."""

from typing import Any, Optional

import torch
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.eager import StoredDistribution
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.search.supernet.choices import IDENTITY, Choices


def supernet_pattern(candidates: tuple[str, ...], layers: int) -> str:
    """The pattern of a model that holds the candidates of all layers one after the other.

    A layer is its ``l`` (not in the first), its ``s``, its ``f``. So each ``l`` reads the ``s`` of the layer below, and
    an ``s`` keeps its distribution just where a layer above has an ``l`` that may read it.

    Raises:
        UserError: there are no layers.
    """
    if layers < 1:
        raise UserError(f"--sublayers {layers}: a search needs at least one layer")
    above = "".join(kind for kind in "lsf" if kind in candidates)
    return above.replace("l", "") + above * (layers - 1)


class Mixture(nn.Module):
    """One layer: the sum of its candidates' outputs, each times its weight (equation 4).

    With lazy candidates it also carries a distribution: P_i = m_s P_s + (1 - m_s) P_(i-1), where P_s is what its own
    ``s`` has computed and P_(i-1) came from below. Of the first layer P_s is all there is. Its rows sum to 1.

    Args:
        sublayers: its candidates by kind, without identity, which needs no module.
        candidates: of all layers: the order of :attr:`weights`.

    Attributes:
        weights: (K,), put here for each forward pass by :class:`Supernet`.
    """

    attends = True

    def __init__(self, sublayers: dict[str, nn.Module], candidates: tuple[str, ...]):
        super().__init__()
        self.sublayers = nn.ModuleDict(sublayers)
        self.candidates = candidates
        self.attends = any(sublayer.attends for sublayer in sublayers.values())
        self.weights: Optional[Tensor] = None

    def forward(
        self,
        x_BTC: Tensor,
        distribution: Optional[StoredDistribution],
        shared: Any,
        memory_BMC: Optional[Tensor] = None,
    ) -> tuple[Tensor, Optional[StoredDistribution]]:
        """As a :class:`~lazyformer_fairseq.modules.sublayers.residual.ResidualSublayer`'s."""
        weight = dict(zip(self.candidates, self.weights.to(x_BTC.dtype).unbind(), strict=True))
        mixed = x_BTC * weight[IDENTITY] if IDENTITY in weight else None
        carried = distribution
        for kind, sublayer in self.sublayers.items():
            y_BTC, own = sublayer(x_BTC, distribution, shared, memory_BMC)
            mixed = y_BTC * weight[kind] if mixed is None else torch.addcmul(mixed, y_BTC, weight[kind])
            if kind == "s" and "l" in self.candidates and own is not None:
                carried = own if distribution is None else _between(distribution, own, weight["s"])
        return mixed, carried


def _between(below: StoredDistribution, own: StoredDistribution, weight: Tensor) -> StoredDistribution:
    return StoredDistribution(torch.lerp(below.probabilities, own.probabilities, weight))


class Supernet(nn.Module):
    """A model of :func:`supernet_pattern` whose sublayers have become mixtures.

    Args:
        model: the fairseq model.
        network: the part of it that loops over ``sublayers``; they are replaced.
        choices: of as many layers as the pattern was made for.
    """

    def __init__(self, model: nn.Module, network: nn.Module, choices: Choices):
        super().__init__()
        self.model = model
        self.choices = choices
        self.mixtures = _into_layers(network.sublayers, choices)
        network.sublayers = nn.ModuleList(self.mixtures)
        if isinstance(network, Encoder) and "l" in choices.candidates:
            network.lazy_backend = "eager"  # distributions are mixed, so they have to be there

    def forward(self, *args, **kwargs) -> Any:
        """The model's output, with weights drawn for this pass."""
        for mixture, weights in zip(self.mixtures, self.choices().unbind(), strict=True):
            mixture.weights = weights
        return self.model(*args, **kwargs)

    def learn(self, architecture: bool) -> None:
        """Whether gradients go to the choices or to all else; the other side costs nothing."""
        for parameter in self.model.parameters():
            parameter.requires_grad_(not architecture)
        self.choices.logits.requires_grad_(architecture)


def _into_layers(sublayers: nn.ModuleList, choices: Choices) -> list[Mixture]:
    """The sublayers of a :func:`supernet_pattern`, gathered by layer."""
    parts = iter(sublayers)
    mixtures = []
    for allowed in choices.allowed.tolist():
        kinds = [name for name, may in zip(choices.candidates, allowed, strict=True) if may and name != IDENTITY]
        in_order = [kind for kind in "lsf" if kind in kinds]
        mixtures.append(Mixture({kind: next(parts) for kind in in_order}, choices.candidates))
    assert next(parts, None) is None
    return mixtures
