"""How fast this machine trains a model: a few updates on random tokens."""

from collections.abc import Callable

import torch
from fairseq.data import Dictionary
from torch.nn import functional as F

from lazyformer_fairseq.fairseq_plugin.models.causal_lm import CausalLanguageModel
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.measure.costs.latency import measure
from lazyformer_fairseq.measure.costs.machine import PRECISIONS
from lazyformer_fairseq.measure.planning.job import Job
from lazyformer_fairseq.measure.planning.report import Speed
from lazyformer_fairseq.modules.networks.stack import StreamMemory

UPDATES = 5


def measure_speed(job: Job, batch: int, precision: str, device: str) -> Speed:
    """FLOP/s of updates of one batch here: forward, backward, a step of fused AdamW; the median of a few."""
    step = _update(job, batch, precision, device)
    timing = measure({"update": step}, rounds=UPDATES, warm_up=2, device=device, description=f"{job.name}: updates")
    flops = job.flops / job.max_update / job.per_update * batch / timing["update"].median
    where = "GPU" if device == "cuda" else f"{torch.get_num_threads()} threads of this processor"
    return Speed(flops, f"measured here: {UPDATES} updates of {batch} on {where}, {precision}")


def _update(job: Job, batch: int, precision: str, device: str) -> Callable[[], None]:
    dictionary = Dictionary()
    for number in range(len(dictionary), job.vocab_size):
        dictionary.add_symbol(f"piece{number}")
    kind = CausalLanguageModel if job.is_causal else LazyFormerModel
    model = kind(job.config, dictionary).to(device, PRECISIONS[precision]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)
    tokens = torch.randint(len(dictionary), (batch, job.time), device=device)
    places = torch.randperm(tokens.numel(), device=device)[: max(1, round(job.masked * tokens.numel()))]
    memory = StreamMemory()

    def loss() -> torch.Tensor:
        if job.is_causal:
            return model(tokens, memory=memory if job.memory_length else None, target=tokens)[0].sum()
        logits, _ = model(tokens, masked_tokens=places, has_padding=False)
        return F.cross_entropy(logits.float(), tokens.flatten()[places], reduction="sum")

    def update() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return update
