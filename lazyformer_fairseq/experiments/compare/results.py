"""The content of results.json: all that a report of a comparison reads."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lazyformer_fairseq.experiments.compare.jobs import Job
from lazyformer_fairseq.experiments.compare.rates import Choice
from lazyformer_fairseq.experiments.compare.tasks.interface import ComparedTask
from lazyformer_fairseq.measure.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.patterns.grammar import count_kinds
from lazyformer_fairseq.report.numbers import spread
from lazyformer_fairseq.storage.hashes import sha256_of


def collect(
    compared: ComparedTask,
    command: Sequence[str],
    jobs: Mapping[str, Mapping[int, Job]],
    choices: Mapping[str, Choice],
    costs: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The content.

    Args:
        command: as it was given, for the record.
        jobs: by entry and seed; all are over.
        choices: by model.
        costs: by entry.
    """
    settings = compared.settings
    shares = settings.entries()
    data = compared.describe_data()
    return {
        "task": settings.task,
        "settings": settings.as_kept(),
        "command": " ".join(command),
        "machine": describe_machine(settings.device),
        "versions": describe_versions(),
        "data": {
            "folder": settings.data,
            "checksums": {name: sha256_of(path) for name, path in compared.data_files().items()},
            **data,
        },
        "baseline": settings.baseline,
        "measure": {**settings.row.measure, **compared.unit()},
        "models": {
            entry: _entry(of_seeds, shares[entry], choices[shares[entry][0]], costs[entry])
            for entry, of_seeds in jobs.items()
        },
    }


def _entry(
    jobs: Mapping[int, Job], share: tuple[str, float], choice: Choice, costs: Mapping[str, Any]
) -> dict[str, Any]:
    contestant = next(iter(jobs.values())).contestant
    runs = {str(seed): job.result() for seed, job in jobs.items()}
    seconds = np.concatenate([run["seconds"] for run in runs.values()])
    curves = [run["curve"] for run in runs.values()]
    return {
        "what": contestant.what,
        "pattern": None if contestant.is_external else contestant.pattern,
        "of": share[0],
        "share": share[1],
        "sublayers": count_kinds(contestant.pattern),
        **{size: getattr(contestant, size) for size in ("embed_dim", "ffn_embed_dim", "heads")},
        **costs,
        "tokens_per_update": sum(curve["tokens"][-1] for curve in curves) / len(seconds),
        "updates": next(iter(jobs.values())).updates,
        "rate": choice.rate,
        "tries": list(choice.tries),
        "rate_is_at_an_edge": choice.edge,
        "tied_rates": list(choice.tied),
        "milliseconds_per_update": spread(1000 * seconds),
        "runs": {seed: {**run, "seconds": float(sum(run["seconds"]))} for seed, run in runs.items()},
    }
