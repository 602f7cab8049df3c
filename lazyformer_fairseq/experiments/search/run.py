"""A search in its folder, from its settings to its result; every file there is complete or absent, and all resumes.

A supernet is trained, then patterns of it are judged: of each budget of latency the best one counts, beside a control.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.folder import SETTINGS, experiment, kept
from lazyformer_fairseq.experiments.search.fairseq_model import FairseqSearch, move_to
from lazyformer_fairseq.experiments.search.latency import (
    LATENCIES,
    ROUNDS_OF_FRONTS,
    latency_of,
    measure_models,
    prices_of,
    rank_correlations,
)
from lazyformer_fairseq.experiments.search.methods import JUDGING, Judge, Task
from lazyformer_fairseq.experiments.search.report import write_report
from lazyformer_fairseq.experiments.search.settings import CONTROL, SearchSettings
from lazyformer_fairseq.experiments.search.space import (
    Band,
    Space,
    Subnet,
    bands_of,
    by_layer,
    compact,
    letters,
    subnet_of,
)
from lazyformer_fairseq.experiments.search.supernet import SinglePath
from lazyformer_fairseq.experiments.search.training import (
    FORWARD,
    STATE,
    Cost,
    Counting,
    MixtureTraining,
    SubnetTraining,
    SupernetTraining,
)
from lazyformer_fairseq.patterns.grammar import read_sublayer
from lazyformer_fairseq.report.numbers import spread
from lazyformer_fairseq.storage.json_files import read_json, write_json

RESULT, JUDGED = "result.json", "judged.json"
CONTROL_FOLDER = "control"
CONTROLS_SEED = 1000  # further than the method's: the two draw other patterns


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


def run_search(settings: SearchSettings, path: Path) -> dict[str, Any]:
    """Searches in the folder `path`, resumes a stopped search there, or returns the result of a finished one.

    Returns:
        What result.json holds.

    Raises:
        UserError: as :func:`search_in`; settings and data do not fit together; or the evaluations alone cost all
            updates.
    """
    fairseq = FairseqSearch(settings)
    fairseq.parts()  # data that does not fit must not leave a folder behind
    _supernets_cost(settings)

    def search() -> dict[str, Any]:
        result = Search(fairseq, path).result()
        write_report(result, path)
        return result

    return search_in(path, settings, STATE, search)


def _supernets_cost(settings: SearchSettings) -> float:
    """What is left for the supernet in updates of the baseline, when a pattern as large as it costs an evaluation.

    Raises:
        UserError: nothing is left.
    """
    most = settings.max_updates
    if not settings.budgets:
        return most
    of_evaluations = settings.evaluations * settings.judged_batches * FORWARD
    if of_evaluations >= most:
        raise UserError(
            f"--max-updates {most}: {settings.evaluations} evaluations on {settings.judged_batches} batches cost as "
            f"much as {of_evaluations:.0f} updates; give more updates, or fewer --evaluations or --judged-batches"
        )
    return most - of_evaluations


@dataclass
class Inheritance:
    """Losses with inherited weights on the first batches of the held-apart data, always the same; kept in `file`.

    Attributes:
        single: a trained supernet.
        batches: how many.
        losses: in bits a prediction, of the patterns judged so far.
    """

    fairseq: FairseqSearch
    single: SinglePath
    counting: Counting
    batches: int
    file: Path
    losses: dict[Subnet, float] = field(default_factory=dict)

    def __post_init__(self):
        self.part = self.fairseq.parts()[1]
        if self.file.exists():
            self.losses = {subnet_of(text): loss for text, loss in read_json(self.file).items()}

    def __call__(self, subnet: Subnet) -> float:
        self.losses[subnet] = self._loss(subnet)
        write_json(self.file, {by_layer(each): loss for each, loss in self.losses.items()}, durable=False)
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
        return Cost(evaluations=len(subnets), counted=counted)


class Search:
    """The run in a folder, part by part."""

    def __init__(self, fairseq: FairseqSearch, path: Path):
        self.fairseq, self.settings, self.path = fairseq, fairseq.settings, path
        settings = self.settings
        self.prices = settings.prices
        if self.prices is None:
            sublayers = {name: read_sublayer(name) for name in settings.priced}
            self.prices = prices_of(fairseq, settings.baseline, sublayers, path)
        self.counting = Counting(fairseq)
        self.space = Space(settings.candidates, settings.layers, self.prices)
        self.budgets: list[Optional[float]] = sorted(settings.budgets) or [None]
        self.bands = [Band(0.0, math.inf)]
        if settings.budgets:
            self.bands = bands_of(settings.budgets, latency_of(self.prices, settings.baseline))
        baseline = subnet_of(settings.baseline)
        self.baseline = baseline if set(baseline) <= set(settings.candidates) else None

    def result(self) -> dict[str, Any]:
        """All that the report needs."""
        settings = self.settings
        supernet, inheritance = self._supernet(settings.trains_mixtures, self.path)
        fronts = {"found": self._search(settings.method, supernet, inheritance, settings.seed)}
        if settings.budgets and settings.control and settings.method != CONTROL:
            fronts["control"] = self._control(supernet, inheritance)
        measured = self._latencies([*fronts.values()])
        rows = measured.values()
        return {
            "settings": {name: getattr(settings, name) for name in ("data", "task", "candidates")},
            "sizes": asdict(self.counting.sizes),
            **{name: self._described(each, measured) for name, each in fronts.items()},
            "baseline": {
                "pattern": compact(settings.baseline),
                **measured[settings.baseline],
                "loss": None if self.baseline is None else inheritance.losses[self.baseline],
            },
            "probabilities": [choices.probabilities().tolist() for choices in supernet.choices],
            "latency_correlation": rank_correlations(
                [row["predicted"] for row in rows], [row["measured"]["median"] for row in rows]
            ),
        }

    def _supernet(self, of_mixtures: bool, folder: Path) -> tuple[SupernetTraining, Inheritance]:
        """Trained, and what its patterns inherit."""
        single = self.fairseq.build_supernet(self.settings.candidates)
        data, cost = (self.fairseq.loss_of, self.fairseq.parts()), _supernets_cost(self.settings)
        kind = MixtureTraining if of_mixtures else SubnetTraining
        training = kind(single, self.settings, *data, cost, self.prices, self.counting)
        training.run_in(folder)
        return training, Inheritance(self.fairseq, single, self.counting, self.settings.judged_batches, folder / JUDGED)

    def _search(self, method: str, supernet: SupernetTraining, inheritance: Inheritance, seed: int) -> dict[str, Any]:
        """A method's front on a trained supernet: of each budget the best pattern that was judged, and the cost."""
        evaluations = self.settings.evaluations if self.settings.budgets else 1  # else the most probable alone
        judge = Judge(inheritance, evaluations, dict(inheritance.losses))
        if self.baseline is not None and self.baseline not in inheritance.losses:
            inheritance(self.baseline)  # for the report: it is no evaluation of the method
        shares = [choices.probabilities().tolist() for choices in supernet.choices] or None
        task = Task(self.space, self.bands, judge, seed, shares)
        print(f"judging {evaluations} patterns ({method})")
        JUDGING[method](task)
        points = []
        for budget, band in zip(self.budgets, self.bands, strict=True):
            best = task.best_within(band.high)
            points.append({"budget": budget, "subnet": best, "loss": None if best is None else judge.losses[best]})
        judged = [{"latency": self.space.latency(subnet), "loss": loss} for subnet, loss in judge.losses.items()]
        cost = supernet.spent + inheritance.cost_of(list(judge.losses))
        return {"method": method, "points": points, "judged": judged, "cost": cost}

    def _control(self, supernet: SupernetTraining, inheritance: Inheritance) -> dict[str, Any]:
        """Random search: on the same supernet where that trains patterns, else on one of its own, of the same cost."""
        if self.settings.trains_mixtures:
            supernet, inheritance = self._supernet(False, self.path / CONTROL_FOLDER)
        return self._search(CONTROL, supernet, inheritance, self.settings.seed + CONTROLS_SEED)

    def _latencies(self, fronts: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """By pattern `predicted` ms and `measured`: median and quartiles in ms of a forward pass at batch 1."""
        found = [point["subnet"] for front in fronts for point in front["points"] if point["subnet"] is not None]
        patterns = [self.settings.baseline, *map(letters, found)]
        return {
            pattern: {
                "predicted": latency_of(self.prices, pattern),
                "measured": spread([1000 * sample for sample in timing.samples]),
            }
            for pattern, timing in measure_models(self.fairseq, patterns, ROUNDS_OF_FRONTS).items()
        }

    def _described(self, front: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
        """With patterns in place of parts of the supernet."""
        cost, points = front["cost"], []
        for point in front["points"]:
            pattern: Optional[str] = None
            found: Mapping[str, Any] = {}
            if point["subnet"] is not None:
                pattern = letters(point["subnet"])
                found = {"by_layer": by_layer(point["subnet"]), "loss": point["loss"], **measured[pattern]}
            points.append({"budget": point["budget"], "pattern": pattern and compact(pattern), **found})
        return {**front, "cost": asdict(cost), "points": points}
