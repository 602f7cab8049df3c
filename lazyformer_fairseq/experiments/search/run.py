"""A search in its folder, from its settings to its result; every file there is complete or absent, and all resumes."""

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.folder import SETTINGS, experiment, kept
from lazyformer_fairseq.experiments.search.fairseq_model import FairseqSearch, move_to
from lazyformer_fairseq.experiments.search.latency import LATENCIES, Prices, latency_of, measure_models, prices_of
from lazyformer_fairseq.experiments.search.report import describe_models, update_cost_table, write_search
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.space import by_layer, compact, letters
from lazyformer_fairseq.experiments.search.training import (
    SAVE_INTERVAL,
    STATE,
    MixtureTraining,
    PatternSearch,
    update_weights,
    weights_optimizer,
)
from lazyformer_fairseq.measure.costs.latency import measure
from lazyformer_fairseq.measure.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.patterns.grammar import read_sublayer
from lazyformer_fairseq.storage.json_files import write_json

RESULT = "result.json"
ROUNDS_OF_UPDATES = 20
PAPERS_CANDIDATES = SearchSettings.candidates


def search_in(path: Path, settings: Any, begun: str, search: Callable[[], dict[str, Any]]) -> dict:
    """The result of `search` in the folder `path`; of a finished one there, what result.json holds.

    Args:
        settings: a dataclass of all that decides it.
        begun: the file that shows that work has begun; until then settings may change.

    Raises:
        UserError: the folder holds a search begun with other settings, or other things, or is not writable.
    """
    is_other = path.exists() and not (path / SETTINGS).exists()
    if is_other and (not path.is_dir() or any(entry.name[0] != "." for entry in path.iterdir())):
        raise UserError(f"{path}: exists already and holds no search; choose another folder")
    with experiment(path, settings, "a search", begun, made_by_them=[LATENCIES]):
        if (path / RESULT).exists():
            print(f"{path}: this search is finished.")
        return kept(path / RESULT, search)  # written last: it marks the folder as complete


def run_search(settings: SearchSettings, path: Path, save_interval: int = SAVE_INTERVAL) -> dict[str, Any]:
    """Searches one pattern in the folder `path`, resumes a stopped search there, or returns a finished one's result.

    Returns:
        What result.json holds.

    Raises:
        UserError: as :func:`search_in`; or settings and data do not fit together.
    """
    fairseq = FairseqSearch(settings)
    parts = fairseq.parts()  # data that does not fit must not leave a folder behind

    def search() -> dict[str, Any]:
        prices = search_prices(fairseq, path)
        supernet = fairseq.build_supernet(settings.candidates).supernet
        training = PatternSearch(supernet, settings, fairseq.loss_of, parts, prices)
        training.run_in(path, save_interval)
        return _result(fairseq, path, training, prices)

    return search_in(path, settings, STATE, search)


def search_prices(fairseq: FairseqSearch, folder: Path) -> Prices:
    """As given; else measured, once in each folder."""
    settings = fairseq.settings
    if settings.prices is not None:
        return settings.prices
    sublayers = {name: read_sublayer(name) for name in settings.priced}
    return prices_of(fairseq, settings.baseline, sublayers, folder)


def _result(fairseq: FairseqSearch, path: Path, training: PatternSearch, prices: Prices) -> dict[str, Any]:
    chosen, choices, baseline = training.most_probable(), training.choices[0], fairseq.settings.baseline
    patterns = {"baseline": baseline, "found": letters(chosen)}
    patterns = {name: pattern for name, pattern in patterns.items() if pattern}
    result = {
        "pattern": compact(letters(chosen)),
        "by_layer": by_layer(chosen),
        "converged": training.converged,
        "updates": training.updates,
        "entropy": choices.entropy(),
        "table": describe_models(fairseq, patterns, measure_models(fairseq, list(patterns.values()))),
    }
    found = {"candidates": list(choices.candidates), "layers": choices.probabilities().tolist()}
    write_json(path / "probabilities.json", found | {"by_layer": result["by_layer"]})
    write_search(result, found, training.history, latency_of(prices, baseline), path)
    return result


def baseline_update(fairseq: FairseqSearch) -> Callable[[], object]:
    """Makes an update of the baseline, with fresh weights, on the next batch of the weights' part at each call."""
    model, _ = fairseq.build_model(fairseq.settings.baseline)
    optimizer, part = weights_optimizer(model.train(), fairseq.settings), fairseq.parts()[0]
    batches = itertools.chain.from_iterable(part.batches(1, 0) for _ in itertools.count())

    def update() -> object:
        batch = move_to(next(batches), fairseq.settings.device)
        return update_weights(model, optimizer, batch, fairseq.loss_of, fairseq.settings.clip_norm)

    return update


def time_updates(settings: SearchSettings, path: Path, rounds: int = ROUNDS_OF_UPDATES) -> str:
    """Times updates on the training data: the baseline's, and both kinds of the supernet's.

    Beside the settings' candidates stand the paper's, whose updates are to cost less than twice the baseline's (PAR
    Transformer, section 2.1). Writes `path`/update_cost.json with all samples, and returns a table.
    """
    fairseq = FairseqSearch(settings)
    things = {"baseline": baseline_update(fairseq)}
    named = {", ".join(candidates): candidates for candidates in (PAPERS_CANDIDATES, settings.candidates)}
    for name, candidates in named.items():
        for kind in ("weights", "architecture"):
            things[f"{name}: {kind}"] = _supernet_update(fairseq, candidates, kind == "architecture")
    timings = measure(things, rounds, device=settings.device, description="updates")
    path.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": asdict(settings),
        "machine": describe_machine(settings.device),
        "versions": describe_versions(),
        "seconds": {name: list(timing.samples) for name, timing in timings.items()},
    }
    write_json(path / "update_cost.json", content)
    return update_cost_table(timings, list(named), settings.architecture_share)


def _supernet_update(fairseq: FairseqSearch, candidates: tuple[str, ...], architecture: bool) -> Callable[[], object]:
    supernet, (weights, _) = fairseq.build_supernet(candidates).supernet, fairseq.parts()
    parts = (weights, weights)  # an update of either kind on batches of one size
    training = MixtureTraining(supernet, fairseq.settings, fairseq.loss_of, parts, math.inf, budgets=[None])

    def update() -> object:
        training.prepare(0, architecture)
        return training.learn_architecture(0) if architecture else training.learn_weights(supernet)

    return update
