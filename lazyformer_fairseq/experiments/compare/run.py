"""`lazyformer compare`: trains models that differ in their pattern alone, or in what is theirs, and measures them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import torch
from tqdm import tqdm

from lazyformer_fairseq.experiments.compare.contestants import Contestant
from lazyformer_fairseq.experiments.compare.costs import measure_costs
from lazyformer_fairseq.experiments.compare.jobs import Job, Jobs
from lazyformer_fairseq.experiments.compare.lengths import kept_lengths, widths_in_words, with_equal_parameters
from lazyformer_fairseq.experiments.compare.rates import attempts, choose
from lazyformer_fairseq.experiments.compare.results import collect
from lazyformer_fairseq.experiments.compare.settings import CompareSettings
from lazyformer_fairseq.experiments.compare.tasks.interface import ComparedTask
from lazyformer_fairseq.experiments.compare.trainings import count_workers, train
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import keep_settings, run_lock

RESULTS = "results.json"


def compare(
    settings: CompareSettings, folder: Path, command: Sequence[str], workers: Optional[int] = None
) -> dict[str, Any]:
    """Runs the comparison in `folder`, or resumes it; returns the content of `results.json`, which it writes there.

    The trained models go to `runs`, tries of rates that are shorter to `tries`.

    Args:
        command: as it was given, for the record.
        workers: processes at a time where models train alone; None for one per GPU, or one.

    Raises:
        UserError: the folder holds a comparison of other settings, the data or a size does not fit, or a process died.
    """
    compared = settings.row.load(settings)
    contestants = with_equal_parameters(compared)
    if settings.equal_parameters:
        print(widths_in_words(compared, contestants))
    with run_lock(folder), _threads(settings.threads):
        plan, begun = folder / "lengths.json", any(folder.glob("*/*/checkpoint_last.pt"))
        keep_settings(folder / "settings.json", settings.as_kept(), "a comparison", begun, made_by_them=[plan])
        jobs = Jobs(folder, contestants, kept_lengths(compared, contestants, plan).entries)
        results = _run(compared, jobs, command, count_workers(settings, workers))
        write_json(folder / RESULTS, results)
        return results


def _run(compared: ComparedTask, jobs: Jobs, command: Sequence[str], workers: int) -> dict[str, Any]:
    settings = compared.settings
    tried = attempts(settings, jobs)
    if tried:
        all_tries = [job for of_model in tried.values() for job in of_model]
        with _bar("rates", all_tries) as progress:
            train(compared, all_tries, progress, workers)
    choices = choose(settings, tried)
    runs = {
        entry: {seed: jobs.run(entry, seed, choices[name].rate) for seed in settings.seeds}
        for entry, (name, _) in jobs.entries.items()
    }
    all_runs = [of_seeds[seed] for seed in settings.seeds for of_seeds in runs.values()]
    with _bar("training", all_runs) as progress:
        train(compared, all_runs, progress, workers)
    return collect(compared, command, runs, choices, _costs(compared, jobs, runs))


def _costs(compared: ComparedTask, jobs: Jobs, runs: Mapping[str, Mapping[int, Job]]) -> dict[str, dict[str, Any]]:
    """As measured after the first time that all was trained."""
    path = jobs.folder / "costs.json"
    if not path.exists():
        last = {entry: of_seeds[compared.settings.seeds[-1]] for entry, of_seeds in runs.items()}
        used: dict[str, Contestant] = {job.contestant.name: job.contestant for job in last.values()}
        write_json(path, measure_costs(compared, used, last))
    return read_json(path)


def _bar(description: str, jobs: Sequence[Job]) -> tqdm:
    return tqdm(total=sum(job.updates for job in jobs), desc=description, unit=" updates")


@contextmanager
def _threads(number: Optional[int]) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
