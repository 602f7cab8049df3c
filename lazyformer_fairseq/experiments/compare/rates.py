"""The learning rate that each model gets: every model tries the same ones with the first seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.jobs import Job, Jobs
from lazyformer_fairseq.experiments.compare.settings import CompareSettings


@dataclass(frozen=True)
class Choice:
    """The rate of one model.

    Attributes:
        tries: for each rate its seed, updates, and validation loss in the end.
        edge: ``lowest`` or ``highest`` where the best is the end of several: one further out may be better.
        tied: rates as good as the chosen one, which is the lowest of them.
    """

    rate: float
    tries: Sequence[Mapping[str, Any]] = ()
    edge: Optional[str] = None
    tied: Sequence[float] = ()


def attempts(settings: CompareSettings, jobs: Jobs) -> dict[str, list[Job]]:
    """The tries of each model, with its longest entry; none where there is one rate alone."""
    if len(settings.rates) == 1:
        return {}
    longest: dict[str, str] = {}
    for entry, (name, updates) in jobs.entries.items():
        if name not in longest or updates > jobs.entries[longest[name]][1]:
            longest[name] = entry
    return {
        name: [jobs.attempt(entry, settings.seeds[0], rate, settings.rate_updates) for rate in settings.rates]
        for name, entry in longest.items()
    }


def choose(settings: CompareSettings, tried: Mapping[str, Sequence[Job]]) -> dict[str, Choice]:
    """The best rate of each model, by the last point of the curve, once all tries are over.

    Raises:
        UserError: no try of a model ended in a number.
    """
    if not tried:
        return {name: Choice(settings.rates[0]) for name in settings.models}
    return {name: _best(name, jobs) for name, jobs in tried.items()}


def _best(name: str, jobs: Sequence[Job]) -> Choice:
    losses = {job.rate: job.result()["curve"]["loss"][-1] for job in jobs}
    numbers = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
    if not numbers:
        raise UserError(f"{name}: no rate of {', '.join(f'{rate:g}' for rate in losses)} ended in a number; try lower")
    best = min(numbers.values())
    equal = sorted(rate for rate, loss in numbers.items() if loss == best)
    rate = equal[0]
    edges = {min(losses): "lowest", max(losses): "highest"}
    tries = [{"rate": job.rate, "seed": job.seed, "loss": losses[job.rate], "updates": job.updates} for job in jobs]
    return Choice(rate, tries, edges.get(rate), equal[1:])
