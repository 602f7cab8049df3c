"""Run a search in its folder, from settings to result.

Every file in the folder is either complete or absent, and a search can be stopped and resumed at any time. With
budgets, patterns are sampled and trained, and the best one for each budget is reported next to patterns found by
simpler methods. Without budgets, a supernet finds one pattern by gradient descent.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.executors.options import ExecutorOptions
from lazyformer_fairseq.experiments.folder import SETTINGS, experiment, hashes_as_settings, load_or_create
from lazyformer_fairseq.experiments.search import latency
from lazyformer_fairseq.experiments.search.halving import HalvingRuns
from lazyformer_fairseq.experiments.search.material import SearchContext
from lazyformer_fairseq.experiments.search.report import write_report
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.space import Space, bands_of, by_layer, compact, letters, most_probable
from lazyformer_fairseq.experiments.search.supernet_objective import ARCHITECTURE, WEIGHTS, side_at
from lazyformer_fairseq.experiments.search.training import SupernetOptimization, SupernetTraining
from lazyformer_fairseq.experiments.training_runs import Job, train
from lazyformer_fairseq.patterns.grammar import read_sublayer

RESULT = "result.json"
SUPERNET = "supernet"
CONTROLS_SEED = 1000  # added to the seed so that the control samples different patterns
RATIO = "sff"  # a common hand-picked ratio: one s for every two f (arXiv 2510.00379)


def search_in(
    path: Path,
    settings: Mapping[str, Any],
    begun: str,
    search: Callable[[], dict[str, Any]],
    write: Callable[[dict[str, Any], Path], None],
) -> dict:
    """Run `search` in the folder `path` and return its result, or the stored result if the search is finished.

    Args:
        path: the folder.
        settings: everything that determines the result.
        begun: a glob pattern; work has begun once a file matches it, and until then the settings may change.
        search: a function that returns the result.
        write: a function that writes tables and plots of the result; it is also called for a finished search.

    Raises:
        UserError: the folder contains a search with different settings or something other than a search, or cannot be
            written.
    """
    if path.exists() and not (path / SETTINGS).exists():
        is_empty = path.is_dir() and all(entry.name[0] == "." for entry in path.iterdir())
        if not is_empty:
            raise UserError(f"{path} already exists but contains no search; choose a different folder")
    with experiment(path, settings, "a search", begun, stale_files=[latency.LATENCIES]):
        if (path / RESULT).exists():
            print(f"{path} contains a finished search; rewriting the report from its result.")
        result = load_or_create(path / RESULT, search)
        write(result, path)
        return result


def run_search(
    settings: SearchSettings,
    path: Path,
    place: ExecutorOptions = ExecutorOptions(),  # noqa: B008 (frozen)
) -> dict[str, Any]:
    """Search in the folder `path`, resume a stopped search there, or return the result of a finished one.

    Args:
        settings: the search's settings.
        path: the folder.
        place: the executor options for runs in separate processes.

    Returns:
        The contents of result.json.

    Raises:
        UserError: as in :func:`search_in`, or the settings do not fit the data.
    """
    material = SearchContext(settings)
    compared = material.compared  # reports errors in settings and data before the folder is created
    compared.train_at(place)
    if settings.budgets:
        compared.describe_data()
    else:
        material.supernet_objective().batches()
    kept_settings = asdict(settings) | hashes_as_settings(compared.hash_data())
    return search_in(path, kept_settings, "**/*.pt", lambda: Search(material, path).result(), write_report)


def supernet_job(material: SearchContext, path: Path) -> Job:
    """Return the job that trains the supernet for the search in the folder `path`."""
    optimization = SupernetOptimization.of(material.settings)
    return Job(SUPERNET, material.supernet_objective(), optimization, path / SUPERNET)


class Search:
    """A search in its folder.

    Args:
        material: the search's models and objectives.
        path: the search's folder.
    """

    def __init__(self, material: SearchContext, path: Path):
        self.material = material
        self.settings = material.settings
        self.path = path
        baseline = self.settings.baseline
        sublayers = {name: read_sublayer(name) for name in self.settings.priced}
        self.prices = latency.prices_of(material, baseline, sublayers, path, self.settings.prices)
        self.space = Space(self.settings.candidates, self.settings.layers, self.prices)
        self.bands = []
        if self.settings.budgets:
            self.bands = bands_of(self.settings.budgets, self._latency(baseline))
        self.trainings = HalvingRuns(material, path)

    def _latency(self, pattern: str) -> float:
        return latency.latency_of(self.prices, pattern)

    def result(self) -> dict[str, Any]:
        """Run the search and return its result, which contains everything that the report needs."""
        settings = self.settings
        probabilities: list[list[list[float]]] = []
        yardsticks = None
        if settings.budgets:
            fronts = self._fronts()
            yardsticks = self.material.compared.describe_data()["yardsticks"]
        else:
            job = supernet_job(self.material, self.path)
            train([job], partial(SupernetTraining, settings), SUPERNET)
            rows = job.result()["probabilities"]
            probabilities = [rows]
            subnet = most_probable(rows, settings.candidates)
            point = {"budget": None, "pattern": letters(subnet), "by_layer": by_layer(subnet)}
            sides = (side_at(update, settings.constant_updates) for update in range(settings.max_updates))
            made = Counter(sides)
            cost = {f"{side}_updates": made[side] for side in (WEIGHTS, ARCHITECTURE)}
            fronts = {"found": {"method": "gradient", "points": [point], "cost": cost}}

        points = [point for front in fronts.values() for point in front["points"] if point["pattern"]]
        described = self._describe([settings.baseline, *(point["pattern"] for point in points)])
        for point in points:
            point.update(described[point["pattern"]])
        return {
            "machine": describe_machine(settings.device),
            "versions": describe_versions(),
            "settings": {name: getattr(settings, name) for name in ("data", "task", "candidates", "lengths")},
            **fronts,
            "baseline": described[settings.baseline],
            "probabilities": probabilities,
            "latency_correlation": latency.rank_correlations(
                [each["predicted"] for each in described.values()],
                [each["measured"]["median"] for each in described.values()],
            ),
            "yardsticks": yardsticks,
            "rank_correlations": self.trainings.rank_correlations(),
            "trained": [
                {"pattern": compact(pattern), "predicted": self._latency(pattern), "losses": losses}
                for pattern, losses in self.trainings.losses.items()
            ],
        }

    def _fronts(self) -> dict[str, dict[str, Any]]:
        """Find a front by halving and, for comparison, fronts by random search and by two simple rules.

        The random search costs as much as halving. The rules do not search.
        """
        settings = self.settings
        trainings = self.trainings
        drawn = []
        for number, draws in enumerate(self._draws(settings.seed)):
            count = len(range(number, settings.evaluations, len(self.bands)))
            drawn.append([*islice(draws, count)])
        print(self._plan(drawn), flush=True)
        trainings.halve(drawn)

        patterns = [*chain(*drawn)]
        cost = sum(trainings.updates(each) * self.material.relative_flops(each) for each in patterns)
        fronts = {"found": self._front("halving", self._best(patterns), patterns, cost)}
        if not settings.control:
            trainings.train([settings.baseline], "the baseline")
            return fronts

        controls = self._sample_at_cost(cost)
        largest = self._first(patterns, lambda pattern: -trainings.parameters[pattern])
        by_hand = self._first(self._repeats_of_ratio(), lambda pattern: -len(pattern))
        by_rule = [pattern for pattern in (*largest, *by_hand) if pattern]
        trainings.train([settings.baseline, *controls, *by_rule], "comparisons")
        fronts["control"] = self._front("random, the control", self._best(controls), controls)
        for name, method, chosen in (
            ("largest", "most parameters", largest),
            ("ratio", f"{RATIO} repeated", by_hand),
        ):
            distinct = [each for each in dict.fromkeys(chosen) if each]
            fronts[name] = self._front(method, chosen, distinct)
        return fronts

    def _plan(self, drawn: Sequence[Sequence[str]]) -> str:
        """Return a sentence about halving's runs and their cost in baseline updates."""
        trainings = self.trainings
        counts = trainings.counts(drawn)
        by_rung = zip(*counts, strict=True)
        per_rung = []
        for on_rung, updates in zip(by_rung, trainings.lengths, strict=True):
            per_rung.append(f"{sum(on_rung)} for {updates:,} updates")
        cost = 0.0
        for patterns, on_rungs in zip(drawn, counts, strict=True):
            updates = np.dot(on_rungs, trainings.made)
            cost += updates * np.mean([self.material.relative_flops(each) for each in patterns])
        beside = ""
        if self.settings.control:
            beside = ", plus the same again for a random search and two complete runs per budget for the simple rules"
        return (
            f"Training patterns: {', '.join(per_rung)}. This costs as much as about {cost:,.0f} updates of the "
            f"baseline{beside}."
        )

    def _draws(self, seed: int) -> list[Iterator[str]]:
        """Return one iterator over random patterns per budget."""
        draws = []
        for place, band in enumerate(self.bands):
            chance = random.Random(f"{seed} {place}")
            draws.append(self.space.draws(band, chance))
        return draws

    def _repeats_of_ratio(self) -> list[str]:
        """Return all prefixes of the repeated RATIO with no more sublayers than the search has layers.

        The result is empty if the sublayers in RATIO have no prices.
        """
        if not set(RATIO) <= set(self.settings.priced):
            return []
        prefixes = [(RATIO * length)[:length] for length in range(2, self.settings.layers + 1)]
        return [prefix.rstrip("s") for prefix in prefixes]

    def _sample_at_cost(self, cost: float) -> list[str]:
        """Sample patterns from the budgets in round-robin order until their complete runs cost about `cost` in total.

        Every budget gets at least one pattern. Apart from that, the total differs from `cost` by at most half a run.
        """
        found: list[str] = []
        draws = self._draws(self.settings.seed + CONTROLS_SEED)
        in_turn = chain.from_iterable(zip_longest(*draws))
        for pattern in in_turn:
            if pattern is None:
                continue
            price = self.settings.max_updates * self.material.relative_flops(pattern)
            if len(found) >= len(self.bands) and price > 2 * cost:
                break
            cost -= price
            found.append(pattern)
        return found

    def _best(self, patterns: Sequence[str]) -> list[Optional[str]]:
        """Return the fully trained pattern with the lowest loss within each budget."""
        losses = self.trainings.losses
        whole = [pattern for pattern in patterns if losses[pattern][-1] is not None]
        return self._first(whole, lambda pattern: losses[pattern][-1])

    def _first(self, patterns: Sequence[str], rank: Callable[[str], float]) -> list[Optional[str]]:
        """Return the pattern with the lowest rank within each budget, or None for a budget without a pattern."""
        found = []
        for band in self.bands:
            fitting = [each for each in patterns if self._latency(each) <= band.high]
            found.append(min(fitting, key=rank, default=None))
        return found

    def _front(
        self,
        method: str,
        chosen: Sequence[Optional[str]],
        trained: Sequence[str],
        cost: Optional[float] = None,
    ) -> dict[str, Any]:
        """Return a method's front, with its cost in baseline updates.

        Args:
            method: the method's name.
            chosen: the pattern chosen for each budget, in order of increasing budget.
            trained: all patterns that the method trained.
            cost: the cost of these runs; None to add up the cost of the complete ones.
        """
        whole = [pattern for pattern in trained if self.trainings.losses[pattern][-1] is not None]
        if cost is None:
            cost = self.settings.max_updates * sum(self.material.relative_flops(each) for each in whole)
        budgets = sorted(self.settings.budgets)
        points = [{"budget": budget, "pattern": each} for budget, each in zip(budgets, chosen, strict=True)]
        costs = {"patterns": len(trained), "trained_whole": len(whole), "counted": cost}
        return {"method": method, "points": points, "cost": costs}

    def _describe(self, patterns: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Measure the latency of each pattern and return its description, by pattern.

        A description has the `predicted` and `measured` ms of a forward pass at batch size 1 and, for trained patterns,
        the loss.
        """
        found = {}
        milliseconds = latency.measure_models(self.material, patterns, latency.ROUNDS_OF_FRONTS)
        for pattern, measured in milliseconds.items():
            found[pattern] = {
                "pattern": compact(pattern),
                "predicted": self._latency(pattern),
                "measured": measured,
            }
            losses = self.trainings.losses.get(pattern)
            if losses:
                found[pattern] |= {"loss": losses[-1], "parameters": self.trainings.parameters[pattern]}
        return found
