"""A front from its settings to its report, beside its control; every file is complete or absent, and all resumes."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path as File
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.front.cost import FORWARD, Cost, Counting, as_json, clock_of
from lazyformer_fairseq.experiments.search.front.judging import Inheritance, path_of
from lazyformer_fairseq.experiments.search.front.latency_check import correlation_of, measure_latencies, spread_patterns
from lazyformer_fairseq.experiments.search.front.report import write_report
from lazyformer_fairseq.experiments.search.front.settings import FrontSettings, TrainSettings
from lazyformer_fairseq.experiments.search.front.supernets import MixtureTraining, PathTraining, SupernetTraining
from lazyformer_fairseq.experiments.search.front.trained import train_front
from lazyformer_fairseq.experiments.search.loop import SAVE_INTERVAL
from lazyformer_fairseq.experiments.search.measure import baseline_update
from lazyformer_fairseq.experiments.search.methods import CONTROL, METHODS
from lazyformer_fairseq.experiments.search.methods.task import Judge, Task
from lazyformer_fairseq.experiments.search.price import Prices, latency_of
from lazyformer_fairseq.experiments.search.report.found_pattern import by_layer, compact, letters
from lazyformer_fairseq.experiments.search.run import keep_settings_of, prices_of
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.space import Path, Space, bands_of
from lazyformer_fairseq.experiments.search.state import RESULT, refuse_other_things
from lazyformer_fairseq.experiments.search.supernet.fairseq_model import FairseqSearch
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import run_lock

JUDGED = "judged.json"
CONTROL_FOLDER = "control"
CONTROLS_SEED = 1000  # further than the method's: the two draw other patterns
BASELINE_UPDATES = 6  # timed, the first not counted


def run_front(
    settings: SearchSettings, front: FrontSettings, path: File, save_interval: int = SAVE_INTERVAL
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
    refuse_other_things(path)
    with run_lock(path):
        keep_settings_of(settings, path, front=asdict(front))
        if (path / RESULT).exists():
            print(f"{path}: this search is finished.")
            return read_json(path / RESULT)
        result = _Front(fairseq, front, path, save_interval).result()
        write_report(result, path)
        write_json(path / RESULT, result)  # last: it marks the folder as complete
        return result


def train_found(settings: SearchSettings, train: TrainSettings, result: dict[str, Any], path: File) -> str:
    """Trains a front's patterns from scratch in its folder, or resumes that; see :func:`train_front`."""
    with run_lock(path):
        return train_front(settings, train, result, path)


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


class _Front:
    """The run in a folder, part by part."""

    def __init__(self, fairseq: FairseqSearch, front: FrontSettings, path: File, save_interval: int):
        self.fairseq, self.settings, self.front = fairseq, fairseq.settings, front
        self.path, self.save_interval = path, save_interval
        self.prices: Prices = prices_of(fairseq, path)
        self.counting = Counting(fairseq)
        self.space = Space(self.settings.candidates, self.settings.layers, self.prices)
        self.bands = bands_of(front.budgets, latency_of(self.prices, self.settings.baseline))
        self.baseline = self._baseline()

    def _baseline(self) -> Optional[Path]:
        """Its path; None where the candidates lack one of its sublayers."""
        path = path_of(self.settings.baseline)
        if set(path) <= set(self.settings.candidates):
            return path
        if self.front.method == "greedy":
            raise UserError(
                f"--method greedy: begins with the baseline {self.settings.baseline}, and --candidates "
                f"{','.join(self.settings.candidates)} lack sublayers of it; add them, or give a --baseline-pattern"
            )
        return None

    def result(self) -> dict[str, Any]:
        """All that the report needs."""
        supernet, inheritance = self._supernet(self.front.trains_mixtures, self.path)
        found = self._search(self.front.method, supernet, inheritance, self.settings.seed)
        result: dict[str, Any] = {"method": self.front.method, "source": METHODS[self.front.method].source}
        fronts = {"found": found}
        if self.front.has_control:
            fronts["control"] = self._control(supernet, inheritance)
        checked = spread_patterns(self.space, self.front.check_patterns, self.settings.seed)
        measured = self._latencies([*fronts.values()], checked)
        baseline_seconds = self._baseline_seconds()
        for name, each in fronts.items():
            cost = as_json(each["cost"], baseline_seconds)
            result[name] = {**each, "cost": cost, "points": [self._point(p, measured) for p in each["points"]]}
        loss = None if self.baseline is None else inheritance.losses[self.baseline]
        result["baseline"] = {
            "pattern": compact(self.settings.baseline),
            **measured[self.settings.baseline],
            "loss": loss,
            "seconds_per_update": baseline_seconds,
        }
        # Of no method: what is compared with losses from scratch, where --train-patterns asks for it.
        result["inherited"] = {letters(path): inheritance.losses.get(path) or inheritance(path) for path in checked}
        result["latency_check"] = {
            "patterns": {compact(letters(path)): measured[letters(path)] for path in checked},
            "correlation": correlation_of(measured, checked),
        }
        return result

    def _supernet(self, of_mixtures: bool, folder: File) -> tuple[SupernetTraining, Inheritance]:
        """Trained, and what its patterns inherit."""
        cost = _supernets_cost(self.settings, self.front)
        training: SupernetTraining
        if of_mixtures:
            training = MixtureTraining(self.fairseq, self.counting, cost, self.front, self.prices)
        else:
            training = PathTraining(self.fairseq, self.counting, cost)
        training.run(folder, self.save_interval)
        batches = self.front.judged_batches
        return training, Inheritance(self.fairseq, training.single, self.counting, batches, folder / JUDGED)

    def _search(self, method: str, supernet: SupernetTraining, inheritance: Inheritance, seed: int) -> dict[str, Any]:
        """A method's front on a trained supernet: of each budget the best pattern that was judged, and the cost."""
        known = dict(inheritance.losses)
        judge = Judge(inheritance, self.front.evaluations, known)
        if self.baseline is not None and self.baseline not in inheritance.losses:
            inheritance(self.baseline)  # for the report: it is no evaluation of the method
        baseline = self.baseline or ()
        task = Task(self.space, self.bands, baseline, judge, seed, supernet.shares())
        print(f"judging {self.front.evaluations} patterns ({method})")
        METHODS[method].judge_patterns(task)
        points = []
        for budget, band in zip(sorted(self.front.budgets), self.bands, strict=True):
            best = task.best_within(band.high)
            points.append({"budget": budget, "path": best, "loss": None if best is None else judge.losses[best]})
        judged = [{"latency": self.space.latency(path), "loss": loss} for path, loss in judge.losses.items()]
        cost: Cost = supernet.spent + inheritance.cost_of(list(judge.losses))
        return {"method": method, "points": points, "judged": judged, "cost": cost}

    def _control(self, supernet: SupernetTraining, inheritance: Inheritance) -> dict[str, Any]:
        """Random search: on the same supernet where that trains paths, else on one of its own, of the same cost."""
        if self.front.trains_mixtures:
            supernet, inheritance = self._supernet(False, self.path / CONTROL_FOLDER)
        return self._search(CONTROL, supernet, inheritance, self.settings.seed + CONTROLS_SEED)

    def _latencies(self, fronts: Sequence[dict[str, Any]], checked: Sequence[Path]) -> dict[str, dict[str, Any]]:
        found = [point["path"] for front in fronts for point in front["points"] if point["path"] is not None]
        patterns = dict.fromkeys([self.settings.baseline, *(letters(path) for path in [*found, *checked])])
        return measure_latencies(self.fairseq, self.prices, list(patterns))

    def _baseline_seconds(self) -> float:
        update, clock, taken = baseline_update(self.fairseq), clock_of(self.settings.device), []
        for _ in range(BASELINE_UPDATES):
            began = clock()
            update()
            taken.append(clock() - began)
        return float(np.median(taken[1:]))

    def _point(self, point: dict[str, Any], measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
        if point["path"] is None:
            return {"budget": point["budget"], "pattern": None}
        pattern = letters(point["path"])
        return {
            "budget": point["budget"],
            "pattern": compact(pattern),
            "by_layer": by_layer(point["path"]),
            "loss": point["loss"],
            **measured[pattern],
        }
