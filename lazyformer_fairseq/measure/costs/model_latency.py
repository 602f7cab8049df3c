"""Things to measure in a model: a sublayer of each kind, and a causal model's next segment."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lazyformer_fairseq.measure.costs.latency import Timing, measure
from lazyformer_fairseq.modules.attention.torch_back_ends import StoredDistribution
from lazyformer_fairseq.modules.networks.stack import Stack, StreamMemory
from lazyformer_fairseq.modules.sublayers.attention import with_memory
from lazyformer_fairseq.modules.sublayers.attention_variant import Attention
from lazyformer_fairseq.modules.sublayers.interface import Context
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, KEYS_AND_VALUES


def next_segment(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor, mem_len: int) -> Callable[[], object]:
    """A thing to measure: a causal model scores a segment with a full memory, as in the middle of a text.

    Args:
        model: has the interface of :class:`~lazyformer_fairseq.fairseq_plugin.models.causal_lm.CausalLanguageModel`.
        targets_BT: the ids to score; they decide which bands of an adaptive softmax are computed.
        mem_len: tokens that the model remembers.
    """
    memory = StreamMemory()

    @torch.inference_mode()
    def score() -> object:
        return model(tokens_BT, memory=memory, target=targets_BT)

    for _ in range(-(-mem_len // tokens_BT.size(1))):
        score()
    return score


def measure_sublayers(
    network: Stack, sublayers: Mapping[str, PlannedSublayer], time: int, memory: int = 0, **how
) -> dict[str, Timing]:
    """Inference latency of single sublayers at batch 1, in a network's sizes.

    Args:
        network: builds the sublayers and what they share; its own sublayers do not run.
        sublayers: by name; one with consumers also keeps what they would read.
        time: T, tokens of the input.
        memory: M, remembered positions; for a CausalDecoder only.
        how: `rounds`, `warm_up`, `seed` of :func:`measure`.
    """
    weight = next(network.parameters())
    like = {"device": weight.device, "dtype": weight.dtype}
    x, x_memory = (torch.randn(1, length, network.embed_dim, **like) for length in (time, memory))
    keys = memory + time
    uniform = StoredDistribution(torch.full((1, network.num_heads, time, keys), 1 / keys, **like))
    q, k, v = (
        torch.randn(1, network.num_heads, length, network.embed_dim // network.num_heads, **like)
        for length in (time, keys, keys)
    )
    with torch.inference_mode():
        measured = {name: network.build_sublayer(planned).to(**like).eval() for name, planned in sublayers.items()}
        shared = _context_of(network, measured, x, memory)
        below = {DISTRIBUTION: uniform, KEYS_AND_VALUES: Attention(x, with_memory(x_memory, x), q, k, v, shared.scores)}

        def thing(sublayer: nn.Module) -> Callable[[], object]:
            return lambda: sublayer(x, below, shared, x_memory if memory else None)

        return measure({name: thing(each) for name, each in measured.items()}, device=weight.device, **how)


def _context_of(network: Stack, sublayers: Mapping[str, nn.Module], x: Tensor, memory: int) -> Context:
    """What they would share in a network of theirs: one that attends to nothing computes no bias and no positions."""
    own, network.sublayers = network.sublayers, nn.ModuleList(sublayers.values())
    try:
        return network.context(x, memory)
    finally:
        network.sublayers = own
