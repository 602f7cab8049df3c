"""A whole search, from its settings to its results."""

from pathlib import Path
from typing import Any

from lazyformer_fairseq.files.json_files import read_json, write_json
from lazyformer_fairseq.files.whole import write_text
from lazyformer_fairseq.search.folder import LATENCIES, RESULT, SearchFolder
from lazyformer_fairseq.search.latency.measure import measure_prices
from lazyformer_fairseq.search.latency.price import LatencyPrice, PriceList
from lazyformer_fairseq.search.loop import SAVE_INTERVAL, Search
from lazyformer_fairseq.search.report.comparison import compare_with_baseline, table
from lazyformer_fairseq.search.report.found_pattern import by_layer, compact, letters
from lazyformer_fairseq.search.report.pictures import draw_history, draw_probabilities
from lazyformer_fairseq.search.settings import SearchSettings
from lazyformer_fairseq.search.supernet.fairseq_model import FairseqSearch
from lazyformer_fairseq.search.supernet.training import SupernetTraining


def run_search(settings: SearchSettings, path: Path, save_interval: int = SAVE_INTERVAL) -> dict[str, Any]:
    """Searches in the folder `path`, resumes a stopped search there, or returns the result of a finished one.

    Returns:
        What result.json holds.

    Raises:
        UserError: the folder holds another search, or settings and data do not fit together.
    """
    fairseq = FairseqSearch(settings)
    fairseq.parts()  # data that does not fit must not leave a folder behind
    with SearchFolder.claimed(path, settings) as folder:
        if (found := folder.result()) is not None:
            print(f"{path}: this search is finished.")
            return found
        search = open_search(fairseq, folder)
        search.run(folder.save_state, save_interval)
        return _write_results(fairseq, folder, search)


def open_search(fairseq: FairseqSearch, folder: SearchFolder) -> Search:
    """A search at its start, or at its folder's saved state."""
    settings, prices = fairseq.settings, _prices(fairseq, folder)
    price = LatencyPrice(prices, settings.latency_price, settings.latency_budget, prices.of(settings.baseline))
    supernet = fairseq.build_supernet(settings.candidates)
    training = SupernetTraining(supernet, settings, fairseq.loss_of, price)
    search = Search(training, fairseq.parts(), settings.schedule, prices, settings.log_interval)
    if (state := folder.load_state()) is not None:
        search.load_state_dict(state)
        print(f"{folder.path}: resumes at update {search.update}.")
    return search


def _prices(fairseq: FairseqSearch, folder: SearchFolder) -> PriceList:
    """As given; else as measured when the search began, because a resumed search must pay the same."""
    given = fairseq.settings.prices
    if given is not None:
        return PriceList.of_json(given)
    measured = folder.path / LATENCIES
    if measured.exists():
        return PriceList.of_json(read_json(measured))
    prices = measure_prices(fairseq)
    write_json(measured, prices.as_json())
    return prices


def _write_results(fairseq: FairseqSearch, folder: SearchFolder, search: Search) -> dict[str, Any]:
    choices, chosen, path = search.choices, search.most_probable(), folder.path
    probabilities = choices.probabilities().tolist()
    write_json(
        path / "probabilities.json",
        {"candidates": list(choices.candidates), "layers": probabilities, "by_layer": by_layer(chosen)},
    )
    draw_probabilities(probabilities, choices.candidates, path / "probabilities.png")
    draw_history(search.history, search.prices.of(fairseq.settings.baseline), path / "history.png")
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
