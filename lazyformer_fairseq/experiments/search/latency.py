"""The latency of patterns: prices per sublayer, their sums over patterns, and measurements of whole models."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Protocol, Union

import torch
from scipy.stats import kendalltau, spearmanr
from torch import nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.latency import measure, measure_sublayers, next_segment
from lazyformer_fairseq.experiments.folder import load_or_create
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.patterns.attention_variants import GIVEN
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, plan, read_sublayer
from lazyformer_fairseq.patterns.kinds import kinds
from lazyformer_fairseq.report.numbers import in_milliseconds
from lazyformer_fairseq.storage.checked import Amount
from lazyformer_fairseq.storage.json_files import read_as
from lazyformer_fairseq.training.warm_start.losses import global_positions

# Prices in milliseconds, by name. The price of a single sublayer has the sublayer's text as its name, such as ``s``.
# ``s_read`` applies instead if another sublayer reads from this one; its default is the price of ``s``. ``rest`` is the
# price of the embeddings and the head. Sublayers without a price, such as identity, cost nothing.
Prices = Mapping[str, float]
READ = "_read"
REST = "rest"
LATENCIES = "latencies.json"
ROUNDS = 30
ROUNDS_OF_FRONTS = 20


def latency_of(prices: Prices, pattern: Union[str, Sequence[PlannedSublayer]]) -> float:
    """Predict a model's latency in ms from its pattern, or from its sublayers in order from the lowest."""
    sublayers = pattern
    if pattern and isinstance(pattern, str):
        sublayers = plan(pattern)
    total = prices.get(REST, 0.0)
    read: set[Optional[str]] = set()
    for sublayer in reversed(sublayers):
        price = prices.get(sublayer.text, 0.0)
        if not read.isdisjoint(sublayer.kind.kept_for_consumers):
            price = prices.get(sublayer.text + READ, price)
        total += price
        read = read.difference(sublayer.kind.hands_on) | {sublayer.kind.reads}
    return total


def read_price_list(path: Path, sublayers: Collection[str]) -> Prices:
    """Read a price list from a JSON file with milliseconds by sublayer, such as ``{"s": 1.2, "f": 0.7}``.

    By default, ``s_read`` has the price of ``s``, and ``rest`` costs nothing.

    Args:
        path: the JSON file.
        sublayers: the sublayers that require a price.

    Raises:
        UserError: the file has an unsupported format, lacks a sublayer, or has an unknown name or a negative price.
    """
    content = read_as(dict[str, Amount], path, 'write an object with milliseconds like {"s": 1.2, "f": 0.7}')
    plain = [kind.letter for kind in kinds() if not kind.is_identity]
    names = dict.fromkeys([*plain, *sublayers])
    with_consumers = [name + READ for name in names if read_sublayer(name).kind.kept_for_consumers]
    known = [*names, *with_consumers, REST]
    if not set(content) <= set(known):
        raise UserError(
            f'{path} must contain an object with milliseconds like {{"s": 1.2, "f": 0.7}}; the known names are {known}'
        )
    for name in sublayers:
        if name not in content:
            raise UserError(f"{path} has no price for {name}, which is a candidate or part of the baseline; add one")
    return content


class Models(Protocol):
    """A builder of models for latency measurements.

    Attributes:
        dictionary: the models' dictionary.
        latency_tokens: T, the sequence length at which latencies are measured.
        latency_memory: M, the number of tokens in the memory; 0 for encoders.
    """

    dictionary: Any
    latency_tokens: int
    latency_memory: int

    def build_model(self, pattern: str) -> tuple[nn.Module, Stack]:
        """Build a model with arbitrary weights from a pattern, and return the model and its stack."""


def prices_of(
    models: Models,
    pattern: str,
    sublayers: Mapping[str, PlannedSublayer],
    folder: Path,
    given: Optional[Prices] = None,
) -> Prices:
    """Return the user's prices, or measure each sublayer's median milliseconds at batch size 1.

    The first measurement is stored in `folder`, because a search must resume with the same prices.

    Args:
        models: the model builder, which also determines the sequence length.
        pattern: the pattern of the model used to measure embeddings and head.
        sublayers: the sublayers to measure, by text.
        folder: the search's folder.
        given: the user's prices, if any.
    """
    if given is not None:
        return given

    def measured() -> dict[str, float]:
        model, network = models.build_model(pattern)
        timed_sublayers = {}
        for text, sublayer in sublayers.items():
            # A sublayer with tokens marked by the caller, such as global ones, is timed with one marked token.
            settings = dict(sublayer.settings)
            for name, value in sublayer.settings:
                if value == GIVEN:
                    settings[name] = 1
            timed = replace(sublayer, settings=tuple(settings.items()))
            timed_sublayers[text] = timed
            kept = sublayer.kind.kept_for_consumers
            if kept:
                timed_sublayers[text + READ] = replace(timed, consumers=kept)
        timings = measure_sublayers(
            network,
            timed_sublayers,
            models.latency_tokens,
            models.latency_memory,
            rounds=ROUNDS,
        )
        network.sublayers = nn.ModuleList()
        timings |= measure({REST: _forward(models, model)}, ROUNDS, device=_device(model))
        return {name: 1000 * timing.median for name, timing in timings.items()}

    return load_or_create(folder / LATENCIES, measured)


def measure_models(
    models: Models,
    patterns: Sequence[str],
    rounds: Optional[int] = None,
) -> dict[str, dict[str, float]]:
    """Measure a forward pass of whole models at batch size 1.

    The models' measurements are interleaved. The result has each pattern's milliseconds and their spread.
    """
    built = {pattern: models.build_model(pattern)[0] for pattern in dict.fromkeys(patterns)}
    forward_passes = {pattern: _forward(models, model) for pattern, model in built.items()}
    device = _device(next(iter(built.values())))
    timings = measure(forward_passes, rounds or ROUNDS, device=device, description="whole models")
    return {pattern: in_milliseconds(timing.samples) for pattern, timing in timings.items()}


def _forward(models: Models, model: nn.Module) -> Callable[[], object]:
    """Return a function that runs a forward pass for timing.

    An encoder computes the outputs of all tokens, and its head predicts one of them. A language model has a full
    memory.
    """
    model.eval()
    symbols = max(len(models.dictionary), 5)
    device = _device(model)
    generator = torch.Generator().manual_seed(1)
    shape = (1, models.latency_tokens)
    tokens_BT = torch.randint(4, symbols, shape, generator=generator).to(device)
    if hasattr(model, "decoder"):
        model.decoder.mem_len = models.latency_memory
        return next_segment(model, tokens_BT, tokens_BT, models.latency_memory)
    given = global_positions(model.encoder.sentence_encoder, tokens_BT)
    first = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def encode() -> object:
        features, _ = model(tokens_BT, features_only=True, has_padding=False, global_positions=given)
        return model.encoder.lm_head(features, first)

    return encode


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def rank_correlations(one: Sequence[float], other: Sequence[float]) -> Optional[dict[str, float]]:
    """Return Spearman's rho and Kendall's tau for two lists of values, or None if there are too few distinct values."""
    if len(one) < 3 or len(set(one)) == 1 or len(set(other)) == 1:
        return None
    return {
        "n": len(one),
        "spearman": float(spearmanr(one, other).statistic),
        "kendall": float(kendalltau(one, other).statistic),
    }
