"""`lazyformer search orders`: random orders of ``s`` and ``f`` beside Sandwich's and the interleaved one, trained.

Of equal sublayers or equal parameters (Press et al., 2019, sections 3 and 4).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.folder import RESULTS, experiment
from lazyformer_fairseq.experiments.search.fairseq_model import FairseqSearch
from lazyformer_fairseq.experiments.search.from_scratch import train_from_scratch
from lazyformer_fairseq.experiments.search.latency import rank_correlations
from lazyformer_fairseq.experiments.search.settings import OrdersSettings, Recipe, SearchSettings
from lazyformer_fairseq.experiments.search.space import compact
from lazyformer_fairseq.measure.costs.flops import count_sublayer_parameters
from lazyformer_fairseq.patterns.grammar import read_sublayer
from lazyformer_fairseq.patterns.kinds import find_kind
from lazyformer_fairseq.report.figures import picture
from lazyformer_fairseq.report.page import Block, write_page
from lazyformer_fairseq.report.tables import Table, write_csv
from lazyformer_fairseq.storage.json_files import write_json

# The letters of an order.
ATTENTION, FEED_FORWARD = LETTERS = tuple(find_kind(name).letter for name in ("self-attention", "feed-forward"))
DRAWS = 10_000  # for each order that is asked for
TOLERANCE = 0.02  # of the baseline's parameters
RANDOM, SANDWICH, INTERLEAVED = "random", "sandwich", "interleaved"
TITLES = {"counts": "as many s as f", "parameters": "equal parameters"}


def run_orders(settings: OrdersSettings, recipe: Recipe, path: Path) -> str:
    """Trains in the folder `path`, or resumes, writes results.json, table.md, orders.csv and orders.png.

    Returns:
        What table.md holds.

    Raises:
        UserError: the folder holds other things or other settings; or orders cannot be drawn.
    """
    drawn = draw_orders(settings, recipe)
    seeds = tuple(range(settings.seed, settings.seed + settings.baseline_seeds))
    with experiment(path, settings, "orders", "runs/*/*.json"):
        others = dict.fromkeys(row["order"] for row in drawn if row["what"] != INTERLEAVED)
        trained = train_from_scratch(recipe, list(others), path / "runs")
        interleaved = sandwich(settings.sublayers, 0)
        trained |= train_from_scratch(replace(recipe, seeds=seeds), [interleaved], path / "runs_of_the_baseline")
        rows = [row | {"seed": seed} | _result(run) for row in drawn for seed, run in trained[row["order"]].items()]
        results = {"settings": asdict(settings), "recipe": asdict(recipe), "rows": rows, **_summary(rows)}
        write_json(path / RESULTS, results)
        write_csv([{**row, "perplexity": 2 ** row["loss"]} for row in rows], path / "orders.csv")
        _draw(rows, path / "orders.png")
        return write_page(_page(results), path, "table").strip()


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
    correlations = {}
    for figure, members in _by_figure(rows).items():
        drawn = [row for row in members if row["what"] == RANDOM]
        shares = [share_of_attention_below(row["order"]) for row in drawn]
        correlations[figure] = rank_correlations(shares, [row["loss"] for row in drawn])
    trained = {(row["order"], row["seed"]): row["cpu_seconds"] for row in rows}
    return {"attention_below": correlations, "cpu_seconds": sum(trained.values())}


def sandwich(sublayers: int, k: int) -> str:
    """``s^k (sf)^(n - k) f^k`` with n of each kind: k = 0 is the interleaved order.

    Raises:
        UserError: k is not from 0 to n - 1, or the number of sublayers is odd.
    """
    half = _half(sublayers)
    if not 0 <= k < half:
        raise UserError(f"--sandwich {k}: with {sublayers} sublayers, from 0 to {half - 1}")
    return ATTENTION * k + "".join(LETTERS) * (half - k) + FEED_FORWARD * k


def random_orders(sublayers: int, count: int, seed: int, beside: Sequence[str] = ()) -> list[str]:
    """Random orders of as many ``s`` as ``f``, each once, none that is among `beside`.

    Raises:
        UserError: there are not so many.
    """
    letters, chance = LETTERS * _half(sublayers), random.Random(seed)
    return _distinct(lambda: "".join(chance.sample(letters, sublayers)), count, beside)


def random_balances(
    sublayers: int, count: int, seed: int, parameters: Mapping[str, int], beside: Sequence[str] = ()
) -> list[str]:
    """Random orders of about the baseline's parameters, however many of either kind: letters until these are spent.

    Args:
        sublayers: of the baseline.
        parameters: of a sublayer, by letter.

    Raises:
        UserError: there are not so many.
    """
    letters = tuple(parameters)
    budget = _half(sublayers) * sum(parameters.values())
    chance = random.Random(seed)

    def draw() -> str:
        order = ""
        while (spent := sum(parameters[letter] for letter in order)) < (1 - TOLERANCE) * budget:
            order += chance.choice(letters)
        return order if spent <= (1 + TOLERANCE) * budget else ""

    return _distinct(draw, count, ["", *beside])


def _half(sublayers: int) -> int:
    if sublayers < 2 or sublayers % 2:
        raise UserError(f"--sublayers {sublayers}: give an even number of 2 or more, half of them s and half f")
    return sublayers // 2


def _distinct(draw: Callable[[], str], count: int, beside: Sequence[str]) -> list[str]:
    found: dict[str, None] = {}
    for _ in range(DRAWS * max(1, count)):
        if len(found) == count:
            break
        order = draw()
        if order not in beside:
            found[order] = None
    if len(found) < count:
        raise UserError(f"--orders {count}: only {len(found)} were found; give fewer, or more --sublayers")
    return list(found)


def share_of_attention_below(order: str) -> float:
    """Of the ``s``, the share in the lower half of the order: 0.5 for the interleaved one, up to 1."""
    lower = order[: len(order) // 2]
    return lower.count(ATTENTION) / max(1, order.count(ATTENTION))


def _page(results: Mapping[str, Any]) -> list[Block]:
    """A table for each figure, the best last as in the paper, and what random orders say of attention's place."""
    page: list[Block] = []
    for figure, rows in _by_figure(results["rows"]).items():
        page.append(f"Random orders of {TITLES[figure]}:")
        page.append(Table("", [_row(row) for row in rows], left=("order",)))
        found = results["attention_below"][figure]
        if found:
            page.append(
                f"Of the random ones, the share of `s` in the lower half with the loss: Spearman's rank correlation "
                f"{found['spearman']:.2f}, {found['n']} orders."
            )
    updates, seconds = results["recipe"]["updates"], results["cpu_seconds"]
    page.append(f"{updates:,} updates each; {seconds:,.0f} seconds of processor time together.")
    return page


def _by_figure(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each figure, the highest loss first."""
    figures = dict.fromkeys(row["figure"] for row in rows)
    return {
        figure: sorted((row for row in rows if row["figure"] == figure), key=lambda row: -row["loss"])
        for figure in figures
    }


def _name(row: Mapping[str, Any]) -> str:
    if row["what"] == SANDWICH:
        return f"Sandwich, k = {row['coefficient']}"
    return f"interleaved, seed {row['seed']}" if row["what"] == INTERLEAVED else "random"


def _row(row: Mapping[str, Any]) -> dict[str, str]:
    is_random = row["what"] == RANDOM
    loss = f"{row['loss']:.3f}"
    return {
        "": _name(row),
        "order": f"`{compact(row['order'])}`",
        "parameters": f"{row['parameters']:,}",
        "CPU ms per update": f"{row['cpu_ms_per_update']:.0f}",
        "validation loss, bits": loss if is_random else f"**{loss}**",
        "perplexity": f"{2 ** row['loss']:.2f}",
    }


def _draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Of each figure a strip a model, the highest loss on top, losses at its end; what is not random in bold."""
    figures = _by_figure(rows)
    longest, most = max(len(row["order"]) for row in rows), max(map(len, figures.values()))
    with picture(path, columns=len(figures), panel=(0.2 * longest + 2.6, 0.2 * most + 1.0)) as (axes,):
        for axis, (name, members) in zip(axes, figures.items(), strict=True):
            axis.imshow(_colours(members, longest), aspect="auto")
            for height, row in enumerate(members):
                weight = "normal" if row["what"] == RANDOM else "bold"
                axis.text(longest - 0.3, height, f"{row['loss']:.3f}", va="center", fontsize=7, fontweight=weight)
                axis.text(-0.7, height, "" if weight == "normal" else _name(row), va="center", ha="right", fontsize=6)
                for place, letter in enumerate(row["order"]):
                    axis.text(place, height, letter, ha="center", va="center", fontsize=6, color="white")
            axis.set_title(f"{TITLES[name]}: validation loss, bits", fontsize=9)
            axis.set_axis_off()


def _colours(rows: Sequence[Mapping[str, Any]], longest: int) -> np.ndarray:
    """(rows, longest, 3): each sublayer in its kind's colour, white behind the last."""
    image = np.ones((len(rows), longest, 3))
    for height, row in enumerate(rows):
        for place, letter in enumerate(row["order"]):
            image[height, place] = to_rgb(read_sublayer(letter).kind.colour)
    return image
