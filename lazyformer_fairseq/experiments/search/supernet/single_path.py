"""A supernet of which one pattern at a time runs, with weights that all patterns share (Guo et al., 2020, SPOS)."""

from collections.abc import Sequence
from typing import Any, Optional

from torch import nn

from lazyformer_fairseq.experiments.search.supernet.mixture import Mixture, Supernet
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.patterns.grammar import connect, read_sublayer
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, KEYS_AND_VALUES


class SinglePath(nn.Module):
    """What runs of a supernet is the pattern last taken: as fast as that pattern's own model, with the same result.

    Args:
        attention_backend: of the paths; a mixture needs stored distributions, a path does not.
    """

    def __init__(self, supernet: Supernet, network: Stack, attention_backend: str):
        super().__init__()
        self.supernet = supernet
        self._network = [network]  # in a list: it is in the supernet already
        self._backends = {"paths": attention_backend, "mixtures": network.attention_backend}
        self._consumers = [_consumers(mixture) for mixture in supernet.mixtures]

    def take(self, path: Optional[Sequence[str]]) -> None:
        """Of each layer the candidate that runs from now on; None for mixtures again.

        A sublayer is told who reads it in this path, as if the path were a model of its own.
        """
        network, mixtures = self._network[0], self.supernet.mixtures
        network.attention_backend = self._backends["mixtures" if path is None else "paths"]
        if path is None:
            for mixture, consumers in zip(mixtures, self._consumers, strict=True):
                mixture.only = None
                _set_consumers(mixture, consumers)
            return
        planned = connect([read_sublayer(name) for name in path])
        for mixture, name, sublayer in zip(mixtures, path, planned, strict=True):
            mixture.only = name
            of_path = (sublayer.consumers.count(DISTRIBUTION), KEYS_AND_VALUES in sublayer.consumers)
            _set_consumers(mixture, {name: of_path})

    def forward(self, *args, **kwargs) -> Any:
        return self.supernet.model(*args, **kwargs)


def _inner(mixture: Mixture, name: str) -> Any:
    """What a candidate has within its residual connection, if it makes a distribution; else None."""
    inner = getattr(mixture.candidate(name), "inner", None)
    return inner if hasattr(inner, "consumers") else None


def _consumers(mixture: Mixture) -> dict[str, tuple[int, bool]]:
    """By name, of candidates that can be read: by how many lazy ones, and whether by one that shares keys."""
    found = {name: _inner(mixture, name) for name in mixture.names}
    return {name: (inner.consumers, inner.is_key_producer) for name, inner in found.items() if inner is not None}


def _set_consumers(mixture: Mixture, consumers: dict[str, tuple[int, bool]]) -> None:
    for name, (count, gives_keys) in consumers.items():
        inner = _inner(mixture, name)
        if inner is not None:
            inner.consumers, inner.is_key_producer = count, gives_keys
