"""The supernet: a model in which each layer is a weighted sum of candidate sublayers (PAR Transformer, section 2.1)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import ReusableAttention
from lazyformer_fairseq.modules.attention.back_ends import StoredDistribution
from lazyformer_fairseq.modules.linear import Linear, multiply_by_part
from lazyformer_fairseq.modules.networks.encoder import remove_first_norm
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.sublayers.attention_variants.interface import Attention
from lazyformer_fairseq.modules.sublayers.interface import Context, SharedState
from lazyformer_fairseq.patterns.attention_variants import chosen_variants
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, read_sublayer
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, KEYS_AND_VALUES


def supernet_pattern(candidates: tuple[str, ...], layers: int) -> str:
    """Return the pattern of a model that concatenates the candidates of all layers.

    In each layer, candidates that read from another sublayer come first. They therefore read from the layer below, and
    a sublayer keeps its state only if a layer above may read it. The first layer has no such candidates.

    Args:
        candidates: the names of each layer's candidates.
        layers: the number of layers.

    Raises:
        UserError: there are no layers, or a candidate reads something that cannot be mixed.
    """
    if layers < 1:
        raise UserError(f"--sublayers {layers}: a search needs at least one layer")
    _refuse_what_cannot_be_mixed([read_sublayer(name) for name in candidates])
    above = [read_sublayer(name) for name in in_building_order(candidates)]
    first = [sublayer for sublayer in above if not sublayer.kind.reads]
    return "".join(sublayer.text for sublayer in first + above * (layers - 1))


def _refuse_what_cannot_be_mixed(sublayers: Sequence[PlannedSublayer]) -> None:
    """Raise a UserError if the state that a candidate reads cannot be mixed.

    This applies to an ``l`` that would read a distribution over anything but the input tokens, and to a ``k`` that
    would read keys from several sublayers, or keys with additional learned terms in their scores.
    """
    readers = {sublayer.kind.reads: sublayer.text for sublayer in sublayers}
    lazy = readers.get(DISTRIBUTION)
    for sublayer in sublayers:
        is_mixed = all(row.has_probabilities for row in chosen_variants(sublayer.values))
        if lazy and DISTRIBUTION in sublayer.kind.hands_on and not is_mixed:
            raise UserError(
                f"--candidates: {lazy} with {sublayer.text}: a search mixes the distributions that {lazy} reuses, but "
                f"{sublayer.text} does not compute a distribution over the input tokens only; omit one of the two"
            )

    consumer = readers.get(KEYS_AND_VALUES)
    if consumer is None:
        return
    producers = [sublayer for sublayer in sublayers if KEYS_AND_VALUES in sublayer.kind.hands_on]
    if len(producers) > 1:
        raise UserError(
            f"--candidates: {consumer} with {' and '.join(producer.text for producer in producers)}: a search mixes "
            f"the keys and values that {consumer} reads, but cannot mix the keys and values of different sublayers; "
            f"keep only one of these sublayers, or omit {consumer}"
        )
    for producer in producers:
        if any(row.has_own_scores for row in chosen_variants(producer.values)):
            raise UserError(
                f"--candidates: {consumer} with {producer.text}: a search mixes the keys and values that {consumer} "
                f"reads, but not the terms that {producer.text} adds to their scores; omit one of the two"
            )


def in_building_order(candidates: Iterable[str]) -> list[str]:
    """Sort candidates: identity first, then candidates that read from another sublayer, then the others."""

    def place(name: str) -> int:
        kind = read_sublayer(name).kind
        if kind.is_identity:
            return 0
        if kind.reads:
            return 1
        return 2

    return sorted(candidates, key=place)


class Architecture(nn.Module):
    """The parameters that weight each layer's candidates; all weights start out equal (PAR Transformer, section 2.2).

    Args:
        layers: L, the number of layers.
        candidates: the names of the K candidates.

    Attributes:
        logits: the parameter (L, K).
        allowed: a mask (L, K) that is True where a layer has a candidate. In the first layer, it is False for
            candidates that read from another sublayer, because nothing lies below; their weight is exactly 0.
        temperature: the Gumbel-softmax temperature, which the search lowers over time.
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
        """Return the weights m of equation 4, (L, K); each row sums to 1.

        In training, each call samples new weights by Gumbel-softmax; in evaluation, the weights are the probabilities.
        """
        if not self.training:
            return self.probabilities()
        return F.gumbel_softmax(self._masked(), tau=self.temperature, dim=-1)

    def probabilities(self) -> Tensor:
        """Return the probability of sampling each candidate in each layer, (L, K)."""
        return self._masked().softmax(dim=-1)

    def entropy(self) -> float:
        """Return the entropy of the probabilities in bits, averaged over layers.

        It starts near log2 K and reaches 0 when every layer has settled on a candidate.
        """
        probabilities = self.probabilities().detach()
        negative_entropies = torch.xlogy(probabilities, probabilities).sum(dim=-1)  # in nats, one per layer
        return -float(negative_entropies.mean()) / math.log(2)

    def _masked(self) -> Tensor:
        return self.logits.masked_fill(~self.allowed, float("-inf"))


class Mixture(nn.Module):
    """One layer of a supernet: the weighted sum of its candidates' outputs (equation 4).

    If there are lazy candidates, the layer also passes on a distribution: P_i = m_s P_s + (1 - m_s) P_(i-1), where P_s
    is computed by this layer's ``s`` and P_(i-1) comes from the layer below. The first layer has only P_s. If several
    candidates compute a distribution, P_s is their weighted mean and m_s is the sum of their weights. Rows sum to 1,
    unless an attention variant projects positions. A sublayer that reads a mixture computes its values as usual, even
    if attention variants in the mixture impose requirements on sublayers that read from them directly.

    If there are candidates that read keys and values, the layer passes on a mixture of these in the same way: K_i = m_s
    K_s + (1 - m_s) K_(i-1). Because softmax is not linear, the output is not an average over the outputs of individual
    patterns; if all weights are 0 or 1, it is the output of the selected pattern.

    Args:
        sublayers: this layer's candidates, by name.
        candidates: the names of the candidates of all layers, in the same order as :attr:`weights`.

    Attributes:
        weights: the candidates' weights, (K,), which :class:`Supernet` sets for each forward pass.
    """

    attends = True

    def __init__(self, sublayers: dict[str, nn.Module], candidates: tuple[str, ...]):
        super().__init__()
        self.names = tuple(sublayers)
        self.sublayers = nn.ModuleDict({_key(name): sublayer for name, sublayer in sublayers.items()})
        self.candidates = candidates
        self.carries = any(read_sublayer(name).kind.reads == DISTRIBUTION for name in candidates)
        self.carries_keys = any(read_sublayer(name).kind.reads == KEYS_AND_VALUES for name in candidates)
        self.attends = any(sublayer.attends for sublayer in sublayers.values())
        self.weights: Optional[Tensor] = None
        for name, sublayer in sublayers.items():
            if read_sublayer(name).kind.reads == DISTRIBUTION:
                sublayer.inner.value_transforms = nn.ModuleDict()

    def forward(
        self,
        x_BTC: Tensor,
        below: SharedState,
        shared: Context,
        memory_BMC: Optional[Tensor] = None,
    ) -> tuple[Tensor, SharedState]:
        """Return the output and the state that the layer passes on.

        The interface is the same as for :class:`~lazyformer_fairseq.modules.sublayers.feed_forward.ResidualSublayer`.
        """
        weights = self.weights.to(x_BTC.dtype)
        weight = dict(zip(self.candidates, weights.unbind(), strict=True))
        mixed: Optional[Tensor] = None
        own: list[tuple[Tensor, Tensor]] = []
        carried: dict[str, Any] = {}
        for name in self.names:
            y_BTC, handed_on = self.candidate(name)(x_BTC, below, shared, memory_BMC)
            if mixed is None:
                mixed = y_BTC * weight[name]
            else:
                mixed = torch.addcmul(mixed, y_BTC, weight[name])
            if self.carries and DISTRIBUTION in handed_on:
                own.append((handed_on[DISTRIBUTION].probabilities, weight[name]))
            if self.carries_keys and KEYS_AND_VALUES in handed_on:
                keys = handed_on[KEYS_AND_VALUES]
                carried[KEYS_AND_VALUES] = _carried_keys(below.get(KEYS_AND_VALUES), keys, weight[name])
        if own:
            carried[DISTRIBUTION] = _carried(below.get(DISTRIBUTION), own)
        return mixed, carried

    def candidate(self, name: str) -> nn.Module:
        """Return a candidate by name."""
        return self.sublayers[_key(name)]


def _key(name: str) -> str:
    """Return the key of a candidate's module: its name without dots, which module names must not contain."""
    return name.replace(".", "_")


class MixedDistribution(StoredDistribution):
    """A distribution whose rows need not sum to 1, such as Linformer's distribution over tokens.

    The values' bias is added after multiplying by the distribution, as in Linformer. If the rows sum to 1, this makes
    no difference.
    """

    def project(self, x_BTC: Tensor, v_proj: Linear, num_heads: int) -> tuple[Tensor, ReusableAttention]:
        """Return an ``l``'s values without their bias, and a distribution that weights them and adds the bias."""
        if v_proj.bias is None:
            return v_proj(x_BTC), self
        v_BTC = multiply_by_part(v_proj, x_BTC, 0, v_proj.out_features, has_bias=False)
        return v_BTC, _BiasedDistribution(self, v_proj.bias.view(num_heads, 1, -1))


class _BiasedDistribution(NamedTuple):
    distribution: MixedDistribution
    bias: Tensor  # (N, 1, D)

    def attend(self, v_BNKD: Tensor, dropout: float) -> Tensor:
        """Return P V + b, (B, N, T, D)."""
        return self.distribution.attend(v_BNKD, dropout) + self.bias


def _carried(below: Optional[MixedDistribution], own: list[tuple[Tensor, Tensor]]) -> MixedDistribution:
    probabilities, weight = own[0]
    if len(own) > 1:
        shares = torch.stack([share for _, share in own])
        weight = shares.sum()
        # All of these weights may be 0 if another candidate has nearly all of the weight.
        shares = shares + torch.finfo(shares.dtype).eps ** 2
        shares = shares / shares.sum()
        probabilities = sum(each * share for (each, _), share in zip(own, shares, strict=True))
    if below is None:
        return MixedDistribution(probabilities)
    return MixedDistribution(torch.lerp(below.probabilities, probabilities, weight))


def _carried_keys(below: Optional[Attention], own: Attention, weight: Tensor) -> Attention:
    if below is None:
        return own
    return replace(
        own,
        k_BNKD=torch.lerp(below.k_BNKD, own.k_BNKD, weight),
        values=torch.lerp(below.values, own.values, weight),
    )


class Supernet(nn.Module):
    """A model built from :func:`supernet_pattern`, with each layer's sublayers replaced by their mixture.

    Args:
        model: the model.
        network: the model's stack of sublayers, which is modified in place.
        architecture: the parameters that weight the candidates.

    Raises:
        UserError: the stack recomputes activations, which a mixture does not support.
    """

    def __init__(self, model: nn.Module, network: Stack, architecture: Architecture):
        super().__init__()
        if network.reversible or network.checkpoints:
            raise UserError(
                "--reversible, --checkpoint-activations: a supernet cannot recompute activations, because its layers "
                "mix the state that sublayers pass on; omit these options"
            )
        self.model = model
        self.architecture = architecture
        self.mixtures = _into_layers(network.sublayers, architecture)
        network.sublayers = nn.ModuleList(self.mixtures)
        # An embedding norm replaces the input norm of every candidate in the first layer.
        if getattr(network, "embedding_norm", False):
            for candidate in self.mixtures[0].sublayers.values():
                remove_first_norm([candidate], network.normalize_before)
        if any(mixture.carries for mixture in self.mixtures):
            network.attention_backend = "eager"  # mixing needs the distributions in memory

    def forward(self, *args, **kwargs) -> Any:
        """Run the model with candidate weights sampled for this forward pass."""
        for mixture, weights in zip(self.mixtures, self.architecture().unbind(), strict=True):
            mixture.weights = weights
        return self.model(*args, **kwargs)

    def learn(self, architecture: bool) -> None:
        """Enable gradients only for the architecture or only for the model, so that the other side adds no cost."""
        for parameter in self.model.parameters():
            parameter.requires_grad_(not architecture)
        self.architecture.logits.requires_grad_(architecture)


def _into_layers(sublayers: nn.ModuleList, architecture: Architecture) -> list[Mixture]:
    """Group the sublayers of a :func:`supernet_pattern` into one mixture per layer."""
    parts = iter(sublayers)
    mixtures = []
    for allowed in architecture.allowed.tolist():
        names = [name for name, may in zip(architecture.candidates, allowed, strict=True) if may]
        layer = {name: next(parts) for name in in_building_order(names)}
        mixtures.append(Mixture(layer, architecture.candidates))
    assert next(parts, None) is None
    return mixtures
