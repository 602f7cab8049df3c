"""What to measure of a model: a sublayer of each kind, and a causal model's next segment."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lazyformer_fairseq.costs.latency import Timing, measure
from lazyformer_fairseq.modules.attention.eager import StoredDistribution
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.patterns.grammar import PlannedSublayer


def next_segment(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor, mem_len: int) -> Callable[[], object]:
    """A thing to measure: a causal model scores a segment, with a memory that is full, as in the middle of a text.

    Args:
        model: of :class:`~lazyformer_fairseq.models.causal_lm.CausalLanguageModel`'s interface.
        tokens_BT: ids of the segment.
        targets_BT: the ids to score; they decide which bands of an adaptive softmax are computed.
        mem_len: what the model remembers.
    """
    memory = StreamMemory()

    @torch.inference_mode()
    def score() -> object:
        return model(tokens_BT, memory=memory, target=targets_BT)

    for _ in range(-(-mem_len // tokens_BT.size(1))):
        score()
    return score


def measure_sublayers(
    network: Encoder | CausalDecoder, kinds: Sequence[str], time: int, memory: int = 0, **how
) -> dict[str, Timing]:
    """Inference latency of one sublayer of each kind at batch 1, in the sizes of a network.

    Where `l` is among the kinds, an `s` keeps its distribution, as one that is read does.

    Args:
        network: builds the sublayers, and what they share; its own are not run.
        kinds: of `s`, `l` and `f`.
        time: T, tokens of the input.
        memory: M, remembered positions; of a CausalDecoder alone.
        how: `rounds`, `warm_up`, `seed` of :func:`measure`.
    """
    weight = next(network.parameters())
    like = {"device": weight.device, "dtype": weight.dtype}
    x, x_memory = (torch.randn(1, length, network.embed_dim, **like) for length in (time, memory))
    keys = memory + time
    uniform = StoredDistribution(torch.full((1, network.num_heads, time, keys), 1 / keys, **like))
    with torch.inference_mode():
        if isinstance(network, CausalDecoder):
            shared: Any = network.relative_positions(time, memory)
        else:
            shared = network.attention_context(x)

        def thing(kind: str) -> Callable[[], object]:
            planned = PlannedSublayer(kind, 0 if kind == "l" else None, readers=int(kind == "s" and "l" in kinds))
            sublayer = network.build_sublayer(planned).to(**like).eval()
            return lambda: sublayer(x, uniform, shared, x_memory if memory else None)

        return measure({kind: thing(kind) for kind in kinds}, device=weight.device, **how)
