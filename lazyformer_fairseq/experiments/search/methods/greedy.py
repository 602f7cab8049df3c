"""Greedy search: from the baseline down through the budgets, each time the best of a few random single changes."""

from collections.abc import Iterable
from typing import Optional

from lazyformer_fairseq.experiments.search.methods.task import Task
from lazyformer_fairseq.experiments.search.space import Path

CHANGES = 6  # that are judged before one is taken


def judge_patterns(task: Task) -> None:
    """Budgets share the evaluations equally; what one leaves, the next lower one has.

    Above a budget it takes the change that costs the fewest bits for each ms that it saves; within, the one that gains
    the most, until none of those that it looked at gains.
    """
    now, judge = task.baseline, task.judge
    judge(now)
    chance, bands = task.chance(), list(reversed(task.bands))
    for number, band in enumerate(bands):
        until = len(judge.losses) + (judge.evaluations - len(judge.losses)) / (len(bands) - number)
        while not judge.is_spent:
            is_above = task.space.latency(now) > band.high
            if not is_above and len(judge.losses) >= until:
                break
            found = [path for path in task.space.changes(now) if _may(task, path, now, is_above, band.high)]
            some = chance.sample(found, min(CHANGES, len(found)))
            best = _best(task, some, now, is_above)
            if best is None:
                break
            now = best
        if task.space.latency(now) > band.high:  # nothing is left for the lower budgets
            return


def _may(task: Task, path: Path, now: Path, is_above: bool, budget: float) -> bool:
    latency = task.space.latency(path)
    return latency < task.space.latency(now) if is_above else latency <= budget and path not in task.judge.losses


def _best(task: Task, paths: Iterable[Path], now: Path, is_above: bool) -> Optional[Path]:
    """The best of the changes; None where there is none, or within the budget none that gains."""
    before = task.judge(now)
    latency = task.space.latency(now)
    worths = {}
    for path in paths:
        gained = before - task.judge(path)
        saved = latency - task.space.latency(path)
        # A change that gains and saves comes before any that costs bits.
        worths[path] = (gained / saved if gained < 0 else gained) if is_above else gained
    best = max(worths, key=worths.__getitem__, default=None)
    return best if best is not None and (is_above or worths[best] > 0) else None
