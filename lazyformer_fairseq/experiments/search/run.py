"""A whole search in its folder, from its settings to its results. Every file there is either complete or absent."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lazyformer_fairseq.experiments.search.loop import SAVE_INTERVAL, Search
from lazyformer_fairseq.experiments.search.measure import measure_prices
from lazyformer_fairseq.experiments.search.price import Prices, latency_of
from lazyformer_fairseq.experiments.search.report.comparison import compare_with_baseline, table
from lazyformer_fairseq.experiments.search.report.found_pattern import by_layer, compact, letters
from lazyformer_fairseq.experiments.search.report.pictures import draw_history, draw_probabilities
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.state import (
    HISTORY,
    LATENCIES,
    RESULT,
    SETTINGS,
    STATE,
    load_state,
    refuse_other_things,
)
from lazyformer_fairseq.experiments.search.supernet.fairseq_model import FairseqSearch
from lazyformer_fairseq.experiments.search.supernet.training import SupernetTraining
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_files import save
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import keep_settings, run_lock


def run_search(settings: SearchSettings, path: Path, save_interval: int = SAVE_INTERVAL) -> dict[str, Any]:
    """Searches in the folder `path`, resumes a stopped search there, or returns the result of a finished one.

    Returns:
        What result.json holds.

    Raises:
        UserError: the folder holds a search begun with other settings, or other things, or is not writable; or
            settings and data do not fit together.
    """
    fairseq = FairseqSearch(settings)
    fairseq.parts()  # data that does not fit must not leave a folder behind
    refuse_other_things(path)
    with run_lock(path):
        keep_settings_of(settings, path)
        if (path / RESULT).exists():
            print(f"{path}: this search is finished.")
            return read_json(path / RESULT)
        search = open_search(fairseq, path)
        search.run(partial(save_state, path), save_interval)
        return _write_results(fairseq, path, search)


def keep_settings_of(settings: SearchSettings, path: Path, **more: Any) -> None:
    """Raises a UserError where the folder's search has begun with other settings, or with other `more`."""
    begun = (path / STATE).exists()
    keep_settings(path / SETTINGS, asdict(settings) | more, "a search", begun, made_by_them=[path / LATENCIES])


def open_search(fairseq: FairseqSearch, path: Path) -> Search:
    """A search at its start, or at its folder's saved state."""
    settings, prices = fairseq.settings, prices_of(fairseq, path)
    training = SupernetTraining(fairseq.build_supernet(settings.candidates), settings, fairseq.loss_of, prices)
    search = Search(training, fairseq.parts(), settings.schedule, prices, settings.log_interval)
    if (path / STATE).exists():
        state = load_state(path / STATE)
        search.load_state_dict(state)
        if "max_weight_norm" not in state["training"]["weights"]["param_groups"][0]:
            print(
                f"{path}: began with pytorch_optimizer's LAMB; it goes on with the package's own, which does not "
                "divide the rate by 1 - 0.9^update and rounds differently."
            )
        print(f"{path}: resumes at update {search.update}.")
    return search


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Writes the state, then the history in it as JSON lines."""
    save(state, path / STATE)
    write_text(path / HISTORY, "".join(json.dumps(row) + "\n" for row in state["history"]))


def prices_of(fairseq: FairseqSearch, path: Path) -> Prices:
    """As given; else as measured when the search began, because a resumed search must pay the same."""
    if fairseq.settings.prices is not None:
        return fairseq.settings.prices
    if not (path / LATENCIES).exists():
        write_json(path / LATENCIES, measure_prices(fairseq))
    return read_json(path / LATENCIES)


def _write_results(fairseq: FairseqSearch, path: Path, search: Search) -> dict[str, Any]:
    choices, chosen = search.choices, search.most_probable()
    probabilities = choices.probabilities().tolist()
    write_json(
        path / "probabilities.json",
        {"candidates": list(choices.candidates), "layers": probabilities, "by_layer": by_layer(chosen)},
    )
    draw_probabilities(probabilities, choices.candidates, path / "probabilities.png")
    draw_history(search.history, latency_of(search.prices, fairseq.settings.baseline), path / "history.png")
    rows = compare_with_baseline(fairseq, chosen)
    result = {
        "pattern": compact(letters(chosen)),
        "by_layer": by_layer(chosen),
        "converged": search.converged,
        "updates": search.update,
        "entropy": choices.entropy(),
        "table": rows,
    }
    write_text(path / "table.md", table(rows) + "\n")
    write_json(path / RESULT, result)  # last: it marks the folder as complete
    return result
