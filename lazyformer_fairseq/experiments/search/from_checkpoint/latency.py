"""Latencies for a search from a checkpoint: of single sublayers, in ticks for the budget, and of whole models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from omegaconf import OmegaConf
from torch import nn

from lazyformer_fairseq.experiments.search.from_checkpoint.choices import Choices
from lazyformer_fairseq.experiments.search.price import READ, REST, Prices, latency_of
from lazyformer_fairseq.fairseq_plugin.models.lazyformer import LazyFormerModel
from lazyformer_fairseq.measure.costs.latency import Timing, measure
from lazyformer_fairseq.measure.costs.model_latency import measure_sublayers
from lazyformer_fairseq.patterns.attention_kinds import GIVEN
from lazyformer_fairseq.patterns.grammar import PlannedSublayer
from lazyformer_fairseq.warm_start.losses import global_positions
from lazyformer_fairseq.warm_start.start import Trained

ROUNDS = 30
TICKS = 4000  # of the trained model: prices are exact to an eighth of a thousandth of its latency


def priced(choices: Choices) -> dict[str, PlannedSublayer]:
    """By text all sublayers that may stand somewhere."""
    return {each.text: each for options in choices.options for each in options if not each.kind.is_identity}


def measure_prices(trained: Trained, choices: Choices, tokens: int) -> Prices:
    """Median milliseconds of one sublayer of each kind, and of the model around them, at batch 1."""
    model = trained.build()
    network = model.encoder.sentence_encoder
    things = {text: _first_given(each) for text, each in priced(choices).items()}
    things |= {
        text + READ: replace(each, consumers=each.kind.kept_for_consumers)
        for text, each in things.items()
        if each.kind.kept_for_consumers
    }
    prices = _medians(measure_sublayers(network, things, tokens, rounds=ROUNDS))
    network.sublayers = nn.ModuleList()
    return prices | _medians(measure({REST: forward(model, tokens)}, ROUNDS, device=model.dictionary_sha256.device))


def measure_models(trained: Trained, patterns: Sequence[str], tokens: int) -> dict[str, Timing]:
    """Seconds of a forward pass of whole models at batch 1, by pattern, in turn."""
    things = {}
    for pattern in dict.fromkeys(patterns):
        model = LazyFormerModel(OmegaConf.merge(trained.cfg, {"sublayer_pattern": pattern}), trained.dictionary)
        things[pattern] = forward(model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokens)
    return measure(things, ROUNDS, device="cuda" if torch.cuda.is_available() else "cpu", description="whole models")


def forward(model: nn.Module, tokens: int) -> Callable[[], object]:
    """A thing to measure: the encoder over one sequence, and the head for one masked token."""
    network, device = model.encoder.sentence_encoder, model.dictionary_sha256.device
    words = max(network.embed_tokens.num_embeddings, 5)
    tokens_BT = torch.randint(4, words, (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)
    given = global_positions(network, tokens_BT)
    masked = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def encode() -> object:
        return model(tokens_BT, masked_tokens=masked, has_padding=False, global_positions=given)

    return encode


def _first_given(planned: PlannedSublayer) -> PlannedSublayer:
    """With the first token where it asks for tokens that a caller marks: here nobody marks any."""
    first = ((name, 1 if value == GIVEN else value) for name, value in planned.settings)
    return replace(planned, settings=tuple(first))


def _medians(timings: Mapping[str, Timing]) -> dict[str, float]:
    return {name: 1000 * timing.median for name, timing in timings.items()}


def in_ticks(prices: Prices, choices: Choices, ticks: int = TICKS) -> dict[str, int]:
    """Prices in whole ticks, of which the trained model has so many (but for rounding); each with READ and REST."""
    tick = latency_of(prices, choices.pattern(choices.own)) / ticks
    found = {REST: round(prices.get(REST, 0.0) / tick)}
    for text in priced(choices):
        found[text] = round(prices[text] / tick)
        found[text + READ] = round(prices.get(text + READ, prices[text]) / tick)
    return found
