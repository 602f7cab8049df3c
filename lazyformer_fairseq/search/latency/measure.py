"""The time that sublayers and whole models take on this machine."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from lazyformer_fairseq.costs.latency import Timing, measure
from lazyformer_fairseq.costs.model_latency import measure_sublayers, next_segment
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, read_sublayer
from lazyformer_fairseq.search.latency.price import READ, PriceList
from lazyformer_fairseq.search.supernet.fairseq_model import FairseqSearch, random_tokens

ROUNDS = 30


def measure_prices(search: FairseqSearch, rounds: int = ROUNDS) -> PriceList:
    """Median milliseconds of one sublayer of each candidate, and of the model around them, at batch 1."""
    model, network = search.build_model(search.settings.baseline)
    sizes = (search.latency_tokens, search.latency_memory)
    things: dict[str, PlannedSublayer] = {}
    for name in search.settings.priced:
        things[name] = alone = read_sublayer(name)
        if alone.kind.hands_on:
            things[name + READ] = replace(alone, readers=alone.kind.hands_on)
    prices = _medians(measure_sublayers(network, things, *sizes, rounds=rounds))
    network.sublayers = nn.ModuleList()
    rest = measure({"rest": _forward(search, model)}, rounds, device=search.settings.device)
    return PriceList.of_json({**prices, **_medians(rest)})


def measure_models(search: FairseqSearch, patterns: Mapping[str, str], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Seconds per forward pass of whole models at batch 1, by name, measured in turn."""
    things = {name: _forward(search, search.build_model(pattern)[0]) for name, pattern in patterns.items()}
    return measure(things, rounds, device=search.settings.device)


def _forward(search: FairseqSearch, model: nn.Module) -> Callable[[], object]:
    """A forward pass: of an encoder without its head, of a language model with all losses and a full memory."""
    model.eval()
    tokens_BT = random_tokens(len(search.task.dictionary), 1, search.latency_tokens, search.settings.device)
    if search.settings.task == "language-model":
        model.decoder.mem_len = search.latency_memory
        return next_segment(model, tokens_BT, tokens_BT, search.latency_memory)
    masked = torch.zeros_like(tokens_BT, dtype=torch.bool)
    masked[:, :1] = True

    @torch.inference_mode()
    def encode() -> object:
        return model(tokens_BT, masked_tokens=masked, has_padding=False)

    return encode


def _medians(timings: Mapping[str, Timing]) -> dict[str, float]:
    return {name: 1000 * timing.median for name, timing in timings.items()}
