"""A front: of each budget of latency a pattern, found by any method on one supernet, beside a control; all resumes."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.fairseq_model import FairseqSearch, move_to
from lazyformer_fairseq.experiments.search.latency import (
    ROUNDS_OF_FRONTS,
    latency_of,
    measure_models,
    rank_correlations,
)
from lazyformer_fairseq.experiments.search.methods import JUDGING, Judge, Task
from lazyformer_fairseq.experiments.search.report import write_front
from lazyformer_fairseq.experiments.search.run import baseline_update, search_in, search_prices
from lazyformer_fairseq.experiments.search.settings import CONTROL, METHODS, FrontSearch, FrontSettings, SearchSettings
from lazyformer_fairseq.experiments.search.space import Space, Subnet, bands_of, by_layer, compact, letters, subnet_of
from lazyformer_fairseq.experiments.search.supernet import SinglePath
from lazyformer_fairseq.experiments.search.training import (
    FORWARD,
    SAVE_INTERVAL,
    STATE,
    Cost,
    Counting,
    MixtureTraining,
    SubnetTraining,
    SupernetTraining,
    clock_of,
)
from lazyformer_fairseq.storage.json_files import read_json, write_json

JUDGED = "judged.json"
CONTROL_FOLDER = "control"
CONTROLS_SEED = 1000  # further than the method's: the two draw other patterns
BASELINE_UPDATES = 6  # timed, the first not counted
DRAWN = 40  # random patterns for each one whose latency is checked


def run_front(
    settings: SearchSettings, front: FrontSettings, path: Path, save_interval: int = SAVE_INTERVAL
) -> dict[str, Any]:
    """Searches in the folder `path`, resumes a stopped search there, or returns the result of a finished one.

    Returns:
        What result.json holds.

    Raises:
        UserError: as `run_search`; or the evaluations alone cost all updates.
    """
    fairseq = FairseqSearch(settings)
    fairseq.parts()  # data that does not fit must not leave a folder behind
    _supernets_cost(settings, front)

    def search() -> dict[str, Any]:
        result = Front(fairseq, front, path, save_interval).result()
        write_front(result, path)
        return result

    return search_in(path, FrontSearch(**vars(settings), front=front), STATE, search)


def _supernets_cost(settings: SearchSettings, front: FrontSettings) -> float:
    """What is left for the supernet in updates of the baseline, when a pattern as large as it costs an evaluation.

    Raises:
        UserError: nothing is left.
    """
    most = settings.schedule.max_updates
    of_evaluations = front.evaluations * front.judged_batches * FORWARD
    if of_evaluations >= most:
        raise UserError(
            f"--max-updates {most}: {front.evaluations} evaluations on {front.judged_batches} batches cost as much as "
            f"{of_evaluations:.0f} updates; give more updates, or fewer --evaluations or --judged-batches"
        )
    return most - of_evaluations


@dataclass
class Inheritance:
    """Losses with inherited weights on the first batches of the held-apart data, always the same; kept in `file`.

    Attributes:
        single: a trained supernet.
        batches: how many.
        losses: in bits a prediction, of the patterns judged so far.
        seconds: what each took.
    """

    fairseq: FairseqSearch
    single: SinglePath
    counting: Counting
    batches: int
    file: Path
    losses: dict[Subnet, float] = field(default_factory=dict)
    seconds: dict[Subnet, float] = field(default_factory=dict)

    def __post_init__(self):
        self.part = self.fairseq.parts()[1]
        if self.file.exists():
            for name, values in read_json(self.file).items():
                getattr(self, name).update({subnet_of(text): value for text, value in values.items()})

    def __call__(self, subnet: Subnet) -> float:
        clock = clock_of(self.fairseq.settings.device)
        began = clock()
        self.losses[subnet] = self._loss(subnet)
        self.seconds[subnet] = clock() - began
        kept = {"losses": self.losses, "seconds": self.seconds}
        by_text = {name: {by_layer(each): value for each, value in values.items()} for name, values in kept.items()}
        write_json(self.file, by_text, durable=False)
        return self.losses[subnet]

    @torch.no_grad()
    def _loss(self, subnet: Subnet) -> float:
        self.single.take(subnet)
        self.single.eval()
        losses: list[Tensor] = []
        count = 0
        for batch in itertools.islice(self.part.batches(1, 0), self.batches):
            loss, predictions = self.fairseq.loss_of(self.single, move_to(batch, self.fairseq.settings.device))
            losses.append(loss.double())
            count += int(predictions)
        return float(sum(losses)) / count / math.log(2)

    def cost_of(self, subnets: Sequence[Subnet]) -> Cost:
        """What it cost to judge these."""
        batches = min(self.batches, len(self.part))
        counted = sum(FORWARD * batches * self.counting.subnet(subnet) for subnet in subnets)
        seconds = sum(self.seconds[subnet] for subnet in subnets)
        return Cost(evaluations=len(subnets), counted=counted, seconds=seconds)


class Front:
    """The run in a folder, part by part.

    Raises:
        UserError: the method begins with a baseline that is no pattern of the candidates.
    """

    def __init__(self, fairseq: FairseqSearch, front: FrontSettings, path: Path, save_interval: int):
        self.fairseq, self.settings, self.front = fairseq, fairseq.settings, front
        self.path, self.save_interval = path, save_interval
        self.prices = search_prices(fairseq, path)
        self.counting = Counting(fairseq)
        self.space = Space(self.settings.candidates, self.settings.layers, self.prices)
        self.bands = bands_of(front.budgets, latency_of(self.prices, self.settings.baseline))
        baseline = subnet_of(self.settings.baseline)
        self.baseline = baseline if set(baseline) <= set(self.settings.candidates) else None
        if self.baseline is None and front.method == "greedy":
            raise UserError(
                f"--method greedy: begins with the baseline {self.settings.baseline}, and --candidates "
                f"{','.join(self.settings.candidates)} lack sublayers of it; add them, or give a --baseline-pattern"
            )

    def result(self) -> dict[str, Any]:
        """All that the report needs."""
        supernet, inheritance = self._supernet(self.front.trains_mixtures, self.path)
        fronts = {"found": self._search(self.front.method, supernet, inheritance, self.settings.seed)}
        if self.front.has_control:
            fronts["control"] = self._control(supernet, inheritance)
        checked = self._spread()
        measured = self._latencies([*fronts.values()], checked)
        seconds = self._baseline_seconds()
        correlated = [measured[letters(subnet)] for subnet in checked]
        return {
            "method": self.front.method,
            "source": METHODS[self.front.method].source,
            **{name: self._described(each, measured, seconds) for name, each in fronts.items()},
            "baseline": {
                "pattern": compact(self.settings.baseline),
                **measured[self.settings.baseline],
                "loss": None if self.baseline is None else inheritance.losses[self.baseline],
                "seconds_per_update": seconds,
            },
            # Of no method: what is compared with losses from scratch, where --train-patterns asks for it.
            "inherited": {letters(each): inheritance.losses.get(each) or inheritance(each) for each in checked},
            "latency_check": {
                "patterns": {compact(letters(subnet)): measured[letters(subnet)] for subnet in checked},
                "correlation": rank_correlations(
                    [row["predicted"] for row in correlated], [row["measured"]["median"] for row in correlated]
                ),
            },
        }

    def _supernet(self, of_mixtures: bool, folder: Path) -> tuple[SupernetTraining, Inheritance]:
        """Trained, and what its patterns inherit."""
        single = self.fairseq.build_supernet(self.settings.candidates)
        cost = _supernets_cost(self.settings, self.front)
        what = (single.supernet, self.settings, self.fairseq.loss_of, self.fairseq.parts(), cost, self.prices)
        budgets = sorted(self.front.budgets)
        training = (
            MixtureTraining(*what, budgets, self.counting)
            if of_mixtures
            else SubnetTraining(*what, (), self.counting, single)
        )
        training.run_in(folder, self.save_interval)
        return training, Inheritance(self.fairseq, single, self.counting, self.front.judged_batches, folder / JUDGED)

    def _search(self, method: str, supernet: SupernetTraining, inheritance: Inheritance, seed: int) -> dict[str, Any]:
        """A method's front on a trained supernet: of each budget the best pattern that was judged, and the cost."""
        judge = Judge(inheritance, self.front.evaluations, dict(inheritance.losses))
        if self.baseline is not None and self.baseline not in inheritance.losses:
            inheritance(self.baseline)  # for the report: it is no evaluation of the method
        task = Task(self.space, self.bands, self.baseline or (), judge, seed, supernet.shares())
        print(f"judging {self.front.evaluations} patterns ({method})")
        JUDGING[method](task)
        points = []
        for budget, band in zip(sorted(self.front.budgets), self.bands, strict=True):
            best = task.best_within(band.high)
            points.append({"budget": budget, "subnet": best, "loss": None if best is None else judge.losses[best]})
        judged = [{"latency": self.space.latency(subnet), "loss": loss} for subnet, loss in judge.losses.items()]
        cost = supernet.spent + inheritance.cost_of(list(judge.losses))
        return {"method": method, "points": points, "judged": judged, "cost": cost}

    def _control(self, supernet: SupernetTraining, inheritance: Inheritance) -> dict[str, Any]:
        """Random search: on the same supernet where that trains patterns, else on one of its own, of the same cost."""
        if self.front.trains_mixtures:
            supernet, inheritance = self._supernet(False, self.path / CONTROL_FOLDER)
        return self._search(CONTROL, supernet, inheritance, self.settings.seed + CONTROLS_SEED)

    def _spread(self) -> list[Subnet]:
        """Random patterns, evenly spaced in rank from the cheapest to the most expensive of many; each once."""
        chance, count = random.Random(self.settings.seed), self.front.check_patterns
        drawn = {self.space.draw(chance) for _ in range(DRAWN * count)}
        in_order = sorted(drawn, key=lambda subnet: (self.space.latency(subnet), subnet))
        return evenly(in_order, count) if len(drawn) > count else in_order

    def _latencies(self, fronts: Sequence[dict[str, Any]], checked: Sequence[Subnet]) -> dict[str, dict[str, Any]]:
        """By pattern `predicted` ms and `measured`: median and quartiles in ms of a forward pass at batch 1."""
        found = [point["subnet"] for front in fronts for point in front["points"] if point["subnet"] is not None]
        patterns = [self.settings.baseline, *(letters(subnet) for subnet in [*found, *checked])]
        timings = measure_models(self.fairseq, patterns, ROUNDS_OF_FRONTS)
        described = {}
        for pattern, timing in timings.items():
            spread = {
                name: 1000 * value for name, value in timing.as_json().items() if name in ("median", "low", "high")
            }
            measured = {"n": len(timing.samples), **spread}
            described[pattern] = {"predicted": latency_of(self.prices, pattern), "measured": measured}
        return described

    def _baseline_seconds(self) -> float:
        update, clock, taken = baseline_update(self.fairseq), clock_of(self.settings.device), []
        for _ in range(BASELINE_UPDATES):
            began = clock()
            update()
            taken.append(clock() - began)
        return float(np.median(taken[1:]))

    def _described(self, front: Mapping[str, Any], measured: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """With patterns in place of parts of the supernet, and the cost also measured, in updates of the baseline."""
        cost, points = front["cost"], []
        for point in front["points"]:
            pattern: Optional[str] = None
            found: Mapping[str, Any] = {}
            if point["subnet"] is not None:
                pattern = letters(point["subnet"])
                found = {"by_layer": by_layer(point["subnet"]), "loss": point["loss"], **measured[pattern]}
            points.append({"budget": point["budget"], "pattern": pattern and compact(pattern), **found})
        return {**front, "cost": {**asdict(cost), "measured": cost.seconds / seconds}, "points": points}


def evenly(things: Sequence[Any], count: int) -> list[Any]:
    """So many of them, evenly spaced, the first and the last among them."""
    if count < 2:
        return list(things[:count])
    return [things[round(number * (len(things) - 1) / (count - 1))] for number in range(count)]
