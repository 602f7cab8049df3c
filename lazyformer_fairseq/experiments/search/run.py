"""A search in its folder, from its settings to its result; every file there is complete or absent, and all resumes.

Patterns are drawn and trained; of each budget of latency the best one counts, and what other ways find stands beside.
Tables and pictures show all of it.
"""

import math
import random
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.experiments.compare.report import has_shown_nothing, of_frequencies
from lazyformer_fairseq.experiments.folder import SETTINGS, experiment, kept
from lazyformer_fairseq.experiments.search import latency, space, training
from lazyformer_fairseq.experiments.search.halving import Trainings
from lazyformer_fairseq.experiments.search.material import Material
from lazyformer_fairseq.experiments.search.settings import CONTROL, GRADIENT, SearchSettings
from lazyformer_fairseq.patterns.grammar import read_sublayer
from lazyformer_fairseq.report.figures import picture, styles
from lazyformer_fairseq.report.numbers import spread, with_spread
from lazyformer_fairseq.report.page import Block, markdown, write_page
from lazyformer_fairseq.report.tables import Table

RESULT = "result.json"
CONTROLS_SEED = 1000  # further than the method's: the two draw other patterns
BESIDE = "; beside them random search of the same cost, and two whole trainings a budget"
RATIO = "sff"  # as a hand would write it: an s for two f (arXiv 2510.00379)


def search_in(
    path: Path,
    settings: Any,
    begun: str,
    search: Callable[[], dict[str, Any]],
    write_report: Callable[[dict[str, Any], Path], None],
) -> dict:
    """The result of `search` in the folder `path`; of a finished one there, what result.json holds.

    Args:
        settings: a dataclass of all that decides it.
        begun: the file that shows that work has begun; until then settings may change.
        write_report: writes tables and pictures from the result; of a finished search it does so again.

    Raises:
        UserError: the folder holds a search begun with other settings, or other things, or is not writable.
    """
    is_other = path.exists() and not (path / SETTINGS).exists()
    if is_other and (not path.is_dir() or any(entry.name[0] != "." for entry in path.iterdir())):
        raise UserError(f"{path}: exists already and holds no search; choose another folder")
    with experiment(path, settings, "a search", begun, made_by_them=[latency.LATENCIES]):
        if (path / RESULT).exists():
            print(f"{path}: this search is finished.")
        result = kept(path / RESULT, search)
        write_report(result, path)
        return result


def run_search(settings: SearchSettings, path: Path) -> dict[str, Any]:
    """Searches in the folder `path`, resumes a stopped search there, or returns the result of a finished one.

    Returns:
        What result.json holds.

    Raises:
        UserError: as :func:`search_in`; or settings and data do not fit together.
    """
    material = Material(settings)
    compared = material.compared  # what does not fit must not leave a folder behind
    if settings.method == GRADIENT:
        material.parts()
    if settings.budgets:
        compared.describe_data()

    return search_in(path, settings, "**/*.pt", lambda: Search(material, path).result(), write_report)


class Search:
    """The run in a folder, part by part."""

    def __init__(self, material: Material, path: Path):
        self.material, self.settings, self.path = material, material.settings, path
        settings = self.settings
        self.prices = settings.prices
        if self.prices is None:
            sublayers = {name: read_sublayer(name) for name in settings.priced}
            self.prices = latency.prices_of(material, settings.baseline, sublayers, path)
        self.counting = training.Counting(material)
        self.space = space.Space(settings.candidates, settings.layers, self.prices)
        self.bands = space.bands_of(settings.budgets, self._latency(settings.baseline)) if settings.budgets else []
        self.trainings = Trainings(material, path)

    def _latency(self, pattern: str) -> float:
        return latency.latency_of(self.prices, pattern)

    def result(self) -> dict[str, Any]:
        """All that the report needs."""
        settings, shares, spent = self.settings, [], training.Cost()
        if settings.method == GRADIENT:
            of_all = (self.material.build_supernet(), settings, self.material.loss_of, self.material.parts())
            supernet = training.SupernetTraining(*of_all, self.prices, self.counting)
            supernet.run_in(self.path)
            shares, spent = [choices.probabilities().tolist() for choices in supernet.choices], supernet.spent
        fronts = self._fronts(shares, spent.counted) if settings.budgets else self._most_probable(*shares, spent)
        points = [point for front in fronts.values() for point in front["points"]]
        described = self._described([settings.baseline, *(point["pattern"] for point in points if point["pattern"])])
        for point in points:
            point |= described.get(point["pattern"], {})
        how_long = {"updates": settings.max_updates} if settings.budgets else {}
        of_trainings = {"recipe": settings.recipe, **how_long, "batch_size": settings.batch_size}
        return {
            "machine": describe_machine(settings.device),
            "versions": describe_versions(),
            "settings": {name: getattr(settings, name) for name in ("data", "task", "candidates", "lengths")},
            "sizes": asdict(self.counting.sizes),
            **fronts,
            "baseline": described[settings.baseline],
            "probabilities": shares,
            "latency_correlation": latency.rank_correlations(
                [each["predicted"] for each in described.values()],
                [each["measured"]["median"] for each in described.values()],
            ),
            "unigram_loss": self.material.compared.describe_data()["frequencies_bits"]["valid"]
            if settings.budgets
            else None,
            "of_trainings": {**of_trainings, **self.material.sizes},
            "rank_correlations": self.trainings.rank_correlations(),
            "trained": [
                {"pattern": space.compact(pattern), "predicted": self._latency(pattern), "losses": losses}
                for pattern, losses in self.trainings.losses.items()
            ],
        }

    def _most_probable(self, shares: list[list[float]], spent: training.Cost) -> dict[str, dict[str, Any]]:
        """The one pattern of PAR Transformer, section 2.1."""
        anything = space.Band(0.0, math.inf)
        subnet = next(space.draws(self.space, anything, random.Random(self.settings.seed), shares))
        point = {"budget": None, "pattern": space.letters(subnet), "by_layer": space.by_layer(subnet)}
        return {"found": {"method": GRADIENT, "points": [point], "cost": asdict(spent)}}

    def _fronts(self, shares: list[list[list[float]]], spent: float) -> dict[str, dict[str, Any]]:
        """The method's, and beside it random search of the same cost, and two rules that search nothing.

        Args:
            shares: that gradient descent found, by budget; empty for uniform draws.
            spent: on that, in updates of the baseline.
        """
        settings, trainings, cost_of = self.settings, self.trainings, self.counting.pattern
        draws, of_each = self._draws(settings.seed, shares), len(self.bands)
        drawn = [[*islice(each, len(range(n, settings.evaluations, of_each)))] for n, each in enumerate(draws)]
        everything = [*chain(*drawn)]
        print(f"{settings.method} {trainings.plan(drawn, cost_of)}{BESIDE * settings.control}.", flush=True)
        trainings.halve(drawn)
        cost = spent + sum(trainings.spent(pattern) * cost_of(pattern) for pattern in everything)
        fronts = {"found": self._front(settings.method, self._best(everything), everything, cost)}
        controls = self._as_many_as(cost) if settings.control and settings.method != CONTROL else []
        rules = self._rules(everything) if settings.control else []
        by_rule = [pattern for _, _, chosen in rules for pattern in chosen if pattern]
        trainings.train([settings.baseline, *controls, *by_rule], "what stands beside it")
        if controls:
            fronts["control"] = self._front(f"{CONTROL}, the control", self._best(controls), controls)
        for name, method, chosen in rules:
            fronts[name] = self._front(method, chosen, [*filter(None, dict.fromkeys(chosen))])
        return fronts

    def _rules(self, drawn: Sequence[str]) -> list[tuple[str, str, list[Optional[str]]]]:
        """The names of rules that search nothing, and what each chooses for every budget."""
        largest = self._first(drawn, lambda pattern: -self.trainings.parameters[pattern])
        lengths = range(2, self.settings.layers + 1) if {*RATIO} <= {*self.settings.priced} else ()
        by_hand = self._first([(RATIO * length)[:length].rstrip("s") for length in lengths], lambda each: -len(each))
        return [("largest", "most parameters", largest), ("ratio", f"{RATIO} repeated", by_hand)]

    def _draws(self, seed: int, shares: Sequence[Any] = ()) -> list[Iterator[str]]:
        """Of each budget, patterns written out."""
        found = []
        for place, (band, some) in enumerate(zip_longest(self.bands, shares)):
            found.append(space.draws(self.space, band, random.Random(f"{seed} {place}"), some))
        return [map(space.letters, subnets) for subnets in found]

    def _as_many_as(self, cost: float) -> list[str]:
        """Random patterns, budgets in turn, whose whole trainings cost as much, to half of one."""
        found: list[str] = []
        for pattern in chain.from_iterable(zip_longest(*self._draws(self.settings.seed + CONTROLS_SEED))):
            price = self.settings.max_updates * self.counting.pattern(pattern) if pattern else 0
            if len(found) >= len(self.bands) and price > 2 * cost:
                break
            cost -= price
            found += [pattern] if pattern else []
        return found

    def _best(self, patterns: Sequence[str]) -> list[Optional[str]]:
        """For each budget, of those trained whole."""
        losses = {pattern: whole for pattern in patterns if (whole := self.trainings.losses[pattern][-1]) is not None}
        return self._first([*losses], losses.__getitem__)

    def _first(self, patterns: Sequence[str], rank: Callable[[str], float]) -> list[Optional[str]]:
        """For each budget, of those within it; None where there is none."""
        fitting = ([each for each in patterns if self._latency(each) <= band.high] for band in self.bands)
        return [min(some, key=rank, default=None) for some in fitting]

    def _front(
        self, method: str, chosen: Sequence[Optional[str]], trained: Sequence[str], cost: Optional[float] = None
    ) -> dict[str, Any]:
        """What a method chose for each budget, and its cost in updates of the baseline: by default whole trainings'."""
        whole = [pattern for pattern in trained if self.trainings.losses[pattern][-1] is not None]
        if cost is None:
            cost = self.settings.max_updates * sum(map(self.counting.pattern, whole))
        points = [{"budget": each, "pattern": p} for each, p in zip(sorted(self.settings.budgets), chosen, strict=True)]
        costs = {"patterns": len(trained), "trained_whole": len(whole), "counted": cost}
        return {"method": method, "points": points, "cost": costs}

    def _described(self, patterns: Sequence[str]) -> dict[str, dict[str, Any]]:
        """By pattern: `predicted` and `measured` ms of a forward pass at batch 1; its loss, where it was trained."""
        found = {}
        for pattern, timing in latency.measure_models(self.material, patterns, latency.ROUNDS_OF_FRONTS).items():
            milliseconds = spread([1000 * sample for sample in timing.samples])
            found[pattern] = {"pattern": space.compact(pattern), "predicted": self._latency(pattern)}
            found[pattern] |= {"measured": milliseconds}
            if losses := self.trainings.losses.get(pattern):
                found[pattern] |= {"loss": losses[-1], "parameters": self.trainings.parameters[pattern]}
        return found


FRONTS = ("found", "control", "largest", "ratio")


def write_report(result: Mapping[str, Any], folder: Path) -> None:
    """table.md; of a front, front.png; of gradient descent, probabilities.png."""
    write_page(_page(result), folder, "table")
    if result["trained"]:
        _draw_front(result, folder / "front.png")
    if result["probabilities"]:
        _draw_probabilities(result, folder / "probabilities.png")


def _draw_probabilities(result: Mapping[str, Any], path: Path) -> None:
    """Layers along x, candidates as rows, brighter where more probable (PAR Transformer, Figure 2)."""
    sublayers = map(read_sublayer, result["settings"]["candidates"])
    labels = [each.kind.name + each.text[1:] for each in sublayers]  # ``self-attention``, and settings if it has any
    tables = [np.asarray(table).T for table in result["probabilities"]]
    layers = tables[0].shape[1]
    panel = (max(5.0, 0.32 * layers + 2.5), 0.5 * len(labels) + 1.4)
    with picture(path, len(tables), panel=panel) as axes:
        for axis, table, point in zip(axes.flat, tables, result["found"]["points"], strict=True):
            axis.grid(False)
            image = axis.imshow(table, cmap="viridis", aspect="auto")  # as many colours as there are numbers
            axis.scatter(range(layers), table.argmax(axis=0), s=14, color="white", edgecolors="black", linewidths=0.6)
            axis.set_yticks(range(len(labels)), labels)
            axis.set_xticks(range(layers), range(1, layers + 1), fontsize=7)
            axis.set_xlabel(f"layer, the lowest first{_of_budget(point, '; ')}")
            axis.figure.colorbar(image, label="probability", pad=0.02)


def _of_budget(point: Mapping[str, Any], before: str = "") -> str:
    return "" if point.get("budget") is None else f"{before}{point['budget']:.0%}"


def report_of(result: Mapping[str, Any]) -> str:
    """What was found, and what stands beside it, what each cost, and what rank correlations say; in Markdown."""
    return markdown(_page(result)).rstrip()


def _page(result: Mapping[str, Any]) -> list[Block]:
    fronts = [result[name] for name in FRONTS if name in result]
    page: list[Block] = [_front_table(result["baseline"], fronts), _costs_table(fronts)]
    correlations = {"Predicted with measured latency": result["latency_correlation"]}
    for updates, found in result.get("rank_correlations", {}).items():
        correlations[f"Losses after {int(updates):,} updates with those of whole trainings"] = found
    for what, found in correlations.items():
        if found:
            said = f"rank correlation {found['spearman']:.3f}, Kendall's tau {found['kendall']:.3f}"
            page.append(f"{what}, {found['n']} patterns: Spearman's {said}.")
    if result.get("unigram_loss"):
        page.append(of_frequencies(result["unigram_loss"], "bits"))
        rows = [result["baseline"], *(point for front in fronts for point in front["points"] if point["pattern"])]
        if sentence := has_shown_nothing({row["pattern"]: row["loss"] for row in rows}, result["unigram_loss"]):
            page.append(sentence)
    what = "To train the patterns side by side, by three seeds; give other widths to see whether they stay the best:"
    return [*page, what, _comparison(result, fronts)]


def _comparison(result: Mapping[str, Any], fronts: Sequence[Mapping[str, Any]]) -> str:
    """A command that trains the baseline and all that was found, in the sizes of the search."""
    settings, sizes = result["settings"], result["sizes"]
    names = {result["baseline"]["pattern"]: "baseline"}
    for front in fronts:
        method = re.sub(r"\W+", "_", front["method"].split(",")[0]).strip("_")
        for point in front["points"]:
            names.setdefault(point["pattern"], method + _of_budget(point, "-").rstrip("%"))
    lines = [f"lazyformer compare {settings['data']} FOLDER --task {settings['task']}"]
    lines += [f"  --model '{name}={pattern}'" for pattern, name in names.items() if pattern]
    widths = (sizes["embed_dim"], sizes["ffn_embed_dim"], sizes["num_heads"])
    lines.append("  --embed-dim {} --ffn-embed-dim {} --heads {}".format(*widths))
    more = {name.replace("_", "-"): shlex.quote(str(value)) for name, value in result.get("of_trainings", {}).items()}
    lines += ["  " + " ".join(f"--{name} {value}" for name, value in more.items())] if more else []
    return "```bash\n" + " \\\n".join(lines) + "\n```"


def _front_table(baseline: Mapping[str, Any], fronts: Sequence[Mapping[str, Any]]) -> Table:
    """The baseline, then of each budget a row of every front; without columns that nothing fills."""
    rows = [_row("baseline", baseline, baseline)]
    for points in zip(*(front["points"] for front in fronts), strict=True):
        rows += [_row(front["method"], point, baseline) for front, point in zip(fronts, points, strict=True)]
    headers = [header for header in rows[0] if any(row[header] for row in rows)]
    return Table("", [{header: row[header] for header in headers} for row in rows], left=("pattern",))


def _row(name: str, point: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, str]:
    row = {"": name, "budget": _of_budget(point), "pattern": "none found"}
    columns = "parameters; predicted, ms; measured, ms (quartiles); of the baseline; loss, bits"
    row |= dict.fromkeys(columns.split("; "), "")
    if point["pattern"] is not None:
        row |= {
            "pattern": f"`{point['pattern']}`",
            "predicted, ms": f"{point['predicted']:.2f}",
            "measured, ms (quartiles)": with_spread(point["measured"], 2),
            "of the baseline": f"{point['measured']['median'] / baseline['measured']['median']:.0%}",
        }
    if "parameters" in point:
        row |= {"parameters": f"{point['parameters']:,}", "loss, bits": f"{point['loss']:.3f}"}
    return row


def _costs_table(fronts: Sequence[Mapping[str, Any]]) -> Table:
    """Updates of the baseline are by FLOPs."""
    names = {"counted": "in updates of the baseline"}
    costs = ({names.get(of, of.replace("_", " ")): f"{n:,.0f}" for of, n in each["cost"].items()} for each in fronts)
    return Table("", [{"": each["method"], **cost} for each, cost in zip(fronts, costs, strict=True)])


def _draw_front(result: Mapping[str, Any], path: Path) -> None:
    """Loss against predicted latency: a line for each pattern from rung to rung, large marks for what was found."""
    *rungs, whole = result["settings"]["lengths"]
    with picture(path, panel=(7.5, 5)) as ((axis,),):
        small, shades = {"linestyle": "", "markersize": 4}, np.linspace(0.75, 0.4, len(rungs) + 1)
        for each in result["trained"]:
            losses = [loss for loss in each["losses"] if loss is not None]
            axis.plot([each["predicted"]] * len(losses), losses, color="0.85", linewidth=0.8, zorder=1)
        for rung, (updates, shade) in enumerate(zip((*rungs, whole), shades, strict=True)):
            made = [(each["predicted"], each["losses"][rung]) for each in result["trained"]]
            points = np.reshape([each for each in made if each[1] is not None], (-1, 2)).T
            axis.plot(*points, marker="o", color=str(shade), label=f"after {updates:,} updates", zorder=2, **small)
        for name, style in styles(FRONTS).items():
            if name in result:
                found = [(each["predicted"], each["loss"]) for each in result[name]["points"] if each["pattern"]]
                axis.plot(*np.reshape(found, (-1, 2)).T, label=result[name]["method"], linewidth=1, zorder=3, **style)
        baseline = result["baseline"]
        star = {"markersize": 13, "linestyle": "", "label": "baseline", "zorder": 4}
        axis.plot([baseline["predicted"]], [baseline["loss"]], "k*", **star)
        axis.set(xlabel="predicted latency, ms", ylabel="validation loss, bits")
        axis.legend(fontsize=8)
