"""The time that sublayers, whole models and updates take on this machine."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lazyformer_fairseq.experiments.search.price import READ, REST, Prices
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet.data_parts import Part, move_to
from lazyformer_fairseq.experiments.search.supernet.fairseq_model import FairseqSearch
from lazyformer_fairseq.experiments.search.supernet.training import SupernetTraining, update_weights, weights_optimizer
from lazyformer_fairseq.measure.costs.latency import Timing, measure
from lazyformer_fairseq.measure.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.measure.costs.model_latency import measure_sublayers, next_segment
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, read_sublayer
from lazyformer_fairseq.report.numbers import spread, with_spread
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.json_files import write_json

ROUNDS, ROUNDS_OF_UPDATES = 30, 20
PAPERS_CANDIDATES = SearchSettings.candidates


def measure_prices(search: FairseqSearch, rounds: int = ROUNDS) -> Prices:
    """Median milliseconds of one sublayer of each candidate, and of the model around them, at batch 1."""
    model, network = search.build_model(search.settings.baseline)
    sizes = (search.latency_tokens, search.latency_memory)
    things: dict[str, PlannedSublayer] = {}
    for name in search.settings.priced:
        things[name] = alone = read_sublayer(name)
        if alone.kind.kept_for_consumers:
            things[name + READ] = replace(alone, consumers=alone.kind.kept_for_consumers)
    prices = _medians(measure_sublayers(network, things, *sizes, rounds=rounds))
    network.sublayers = nn.ModuleList()
    rest = measure({REST: _forward(search, model)}, rounds, device=search.settings.device)
    return {**prices, **_medians(rest)}


def measure_models(search: FairseqSearch, patterns: Mapping[str, str], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Seconds per forward pass of whole models at batch 1, by name, measured in turn."""
    things = {name: _forward(search, search.build_model(pattern)[0]) for name, pattern in patterns.items()}
    return measure(things, rounds, device=search.settings.device)


def _forward(search: FairseqSearch, model: nn.Module) -> Callable[[], object]:
    """A forward pass: of an encoder without its head, of a language model with all losses and a full memory."""
    model.eval()
    generator = torch.Generator().manual_seed(1)
    symbols, length = max(len(search.task.dictionary), 5), search.latency_tokens
    tokens_BT = torch.randint(4, symbols, (1, length), generator=generator).to(search.settings.device)
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


def time_updates(settings: SearchSettings, path: Path, rounds: int = ROUNDS_OF_UPDATES) -> str:
    """Times updates on the training data: the baseline's, and both kinds of the supernet's.

    Beside the settings' candidates stand the paper's, whose updates are to cost less than twice the baseline's (PAR
    Transformer, section 2.1).
    Writes `path`/update_cost.json with all samples, and returns a table.
    """
    fairseq = FairseqSearch(settings)
    things = {"baseline": baseline_update(fairseq)}
    for candidates in _timed_candidates(settings):
        name = ", ".join(candidates)
        for kind in ("weights", "architecture"):
            things[f"{name}: {kind}"] = _supernet_update(fairseq, candidates, kind == "architecture")
    timings = measure(things, rounds, device=settings.device, description="updates")
    path.mkdir(parents=True, exist_ok=True)
    write_json(
        path / "update_cost.json",
        {
            "settings": asdict(settings),
            "machine": describe_machine(settings.device),
            "versions": describe_versions(),
            "seconds": {name: list(timing.samples) for name, timing in timings.items()},
        },
    )
    return _table(timings, settings)


def _batches(fairseq: FairseqSearch, part: Part) -> Callable[[], dict[str, Any]]:
    """Returns the next batch of a part at each call, endlessly, on the search's device."""
    batches = itertools.chain.from_iterable(part.batches(1, 0) for _ in itertools.count())
    return lambda: move_to(next(batches), fairseq.settings.device)


def baseline_update(fairseq: FairseqSearch) -> Callable[[], object]:
    """Makes an update of the baseline, with fresh weights, on the next batch of the weights' part at each call."""
    model, _ = fairseq.build_model(fairseq.settings.baseline)
    optimizer = weights_optimizer(model.train(), fairseq.settings)
    batch = _batches(fairseq, fairseq.parts()[0])
    return lambda: update_weights(model, optimizer, batch(), fairseq.loss_of, fairseq.settings.clip_norm)


def _supernet_update(fairseq: FairseqSearch, candidates: tuple[str, ...], architecture: bool) -> Callable[[], object]:
    training = SupernetTraining(fairseq.build_supernet(candidates), fairseq.settings, fairseq.loss_of)
    batch = _batches(fairseq, fairseq.parts()[0])
    return lambda: training.update(batch(), architecture)


def _timed_candidates(settings: SearchSettings) -> list[tuple[str, ...]]:
    return list(dict.fromkeys([PAPERS_CANDIDATES, settings.candidates]))


def _table(timings: dict[str, Timing], settings: SearchSettings) -> str:
    baseline = timings["baseline"].median
    rows = []
    for name, timing in timings.items():
        milliseconds = spread([1000 * sample for sample in timing.samples])
        ratio = timing.median / baseline
        rows.append({"update": name, "ms (quartiles)": with_spread(milliseconds), "x baseline": f"{ratio:.2f}"})
    for name in map(", ".join, _timed_candidates(settings)):
        weights, architecture = (timings[f"{name}: {kind}"].median for kind in ("weights", "architecture"))
        share = settings.architecture_share
        mean = (1 - share) * weights + share * architecture
        name = f"{name}: mean of an epoch with both"
        rows.append({"update": name, "ms (quartiles)": f"{1000 * mean:.1f}", "x baseline": f"{mean / baseline:.2f}"})
    return markdown_table(rows)
