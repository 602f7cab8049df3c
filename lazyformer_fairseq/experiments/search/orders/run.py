"""`lazyformer search orders`: trains random orders, Sandwich's and the interleaved one, and reports; all resumes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path as File
from typing import Any, Optional

from lazyformer_fairseq.experiments.search.from_scratch import Recipe, train_from_scratch
from lazyformer_fairseq.experiments.search.front.latency_check import rank_correlations
from lazyformer_fairseq.experiments.search.orders.drawing import (
    LETTERS,
    random_balances,
    random_orders,
    sandwich,
    share_of_attention_below,
)
from lazyformer_fairseq.experiments.search.orders.report import csv_rows, draw, report
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet.fairseq_model import FairseqSearch
from lazyformer_fairseq.measure.costs.flops import count_sublayer_parameters
from lazyformer_fairseq.patterns.grammar import read_sublayer
from lazyformer_fairseq.report.tables import write_csv
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import keep_settings, run_lock

RANDOM, SANDWICH, INTERLEAVED = "random", "sandwich", "interleaved"
SETTINGS = "settings.json"


@dataclass(frozen=True)
class OrdersSettings:
    """What is drawn.

    Attributes:
        sublayers: of an order, half of them ``s``.
        orders: random ones of as many ``s`` as ``f``.
        balances: random ones of equal parameters, however many of either.
        sandwich: k of each of Sandwich's orders.
        baseline_seeds: of the interleaved order, which shows how far seeds alone go apart.
        seed: of what is drawn, and of all other trainings.
    """

    sublayers: int = 16
    orders: int = 20
    balances: int = 0
    sandwich: tuple[int, ...] = (2, 4, 6)
    baseline_seeds: int = 5
    seed: int = 1


def run_orders(settings: OrdersSettings, recipe: Recipe, path: File) -> str:
    """Trains in the folder `path`, or resumes, writes results.json, table.md, orders.csv and orders.png.

    Returns:
        What table.md holds.

    Raises:
        UserError: the folder holds other things or other settings; or orders cannot be drawn.
    """
    drawn = draw_orders(settings, recipe)
    runs = path / "runs"
    with run_lock(path):
        keep_settings(path / SETTINGS, asdict(settings), "orders", any(runs.glob("*/*.json")))
        orders = [row["order"] for row in drawn if row["what"] != INTERLEAVED]
        trained = train_from_scratch(recipe, list(dict.fromkeys(orders)), runs)
        seeds = tuple(range(settings.seed, settings.seed + settings.baseline_seeds))
        interleaved = sandwich(settings.sublayers, 0)
        of_baseline = train_from_scratch(replace(recipe, seeds=seeds), [interleaved], path / "runs_of_the_baseline")
        rows = [{**row, **_result(trained[row["order"]][settings.seed])} for row in drawn if row["what"] != INTERLEAVED]
        for row in (row for row in drawn if row["what"] == INTERLEAVED):
            rows += [{**row, "seed": seed, **_result(of_baseline[interleaved][seed])} for seed in seeds]
        results = {"settings": asdict(settings), "recipe": asdict(recipe), "rows": rows, **_summary(rows)}
        write_json(path / "results.json", results)
        write_csv(csv_rows(rows), path / "orders.csv")
        draw(rows, path / "orders.png")
        write_text(path / "table.md", report(results) + "\n")
        return report(results)


def draw_orders(settings: OrdersSettings, recipe: Recipe) -> list[dict[str, Any]]:
    """Rows of what is to be trained: `figure` (counts or parameters), `what`, `order`, `coefficient` (Sandwich's k)."""
    sandwiches = {k: sandwich(settings.sublayers, k) for k in settings.sandwich}
    interleaved = sandwich(settings.sublayers, 0)
    beside = [interleaved, *sandwiches.values()]
    found = {"counts": random_orders(settings.sublayers, settings.orders, settings.seed, beside)}
    if settings.balances:
        parameters = _parameters(recipe)
        found["parameters"] = random_balances(settings.sublayers, settings.balances, settings.seed, parameters, beside)
    rows: list[dict[str, Any]] = []
    for figure, orders in found.items():
        common = {"figure": figure, "coefficient": None, "seed": settings.seed}
        rows += [{**common, "what": RANDOM, "order": order} for order in orders]
        rows += [{**common, "what": SANDWICH, "order": order, "coefficient": k} for k, order in sandwiches.items() if k]
        rows.append({**common, "what": INTERLEAVED, "order": interleaved})
    return rows


def _parameters(recipe: Recipe) -> dict[str, int]:
    """Of an ``s`` and an ``f``."""
    settings = SearchSettings(recipe.data, recipe.task, recipe.arch, "sf", fairseq_options=recipe.fairseq_options)
    _, network = FairseqSearch(settings).build_model("sf")
    return {letter: count_sublayer_parameters(read_sublayer(letter), network.sizes) for letter in LETTERS}


def _result(run: Mapping[str, Any]) -> dict[str, Any]:
    return {name: run[name] for name in ("loss", "parameters", "cpu_seconds", "cpu_ms_per_update")}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether orders with their attention below are better, and what all cost."""
    correlations: dict[str, Optional[dict[str, float]]] = {}
    for figure in dict.fromkeys(row["figure"] for row in rows):
        random_rows = [row for row in rows if row["figure"] == figure and row["what"] == RANDOM]
        shares = [share_of_attention_below(row["order"]) for row in random_rows]
        correlations[figure] = rank_correlations(shares, [row["loss"] for row in random_rows])
    trained = {(row["order"], row["seed"]): row["cpu_seconds"] for row in rows}
    return {"attention_below": correlations, "cpu_seconds": sum(trained.values())}
