"""Tiny networks of a synthesizer below an ``l``, random weights in float64, run on vectors."""

import torch

from lazyformer_fairseq.modules.attention.scores import is_padded_right
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.patterns.attention_kinds import ATTENTION_KINDS

WIDTH, HEADS, LENGTH = 12, 3, 10
SIZE = WIDTH // HEADS
[ROW] = [row for row in ATTENTION_KINDS if row.name == "synthesizer"]
TERMS = ROW.settings[0].choices
SUMS = ["random+dot", "dense+dot", "random+dense", "factorised_random+dot", "fixed+factorised_dense+factorised_random"]


def network(terms: str, causal: bool = False, buckets: int = 0, sublayers: str = "sl", **options):
    """Random weights in float64; the first ``s`` has these terms, and the ``l`` reads it."""
    length = f",length={LENGTH}" if causal else ""
    pattern = sublayers.replace("s", f"s[synthesizer={terms}{length},rank=2]", 1)
    pattern = pattern if "factorised_random" in terms else pattern.replace(",rank=2", "")
    sizes = (WIDTH, 8, HEADS)
    torch.manual_seed(1)
    if causal:
        model = CausalDecoder(pattern, 11, *sizes, mem_len=0, **options)
    else:
        model = Encoder(
            pattern, 11, *sizes, max_positions=LENGTH, relative_position_buckets=buckets,
            relative_position_max_distance=6, **options,
        )  # fmt: skip
    for weight in [*model.parameters(), *model.buffers()]:
        torch.nn.init.normal_(weight, std=0.7)
    return model.double()


def by_model(model, x, padding, causal):
    attention, lazy = (sublayer.inner for sublayer in model.sublayers)
    if causal:
        shared = model.context(x)
    else:
        shared = model.context(x, 0, padding, padding is not None and is_padded_right(padding))
    output, handed_on = attention(x, {}, shared)
    return [output, lazy(x, handed_on, shared)[0]]


def gradients(model, outputs, x):
    loss = sum((output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum() for output in outputs)
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.autograd.grad(loss, [x, *learning], allow_unused=True)
