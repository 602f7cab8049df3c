"""`lazyformer compare`: trains models that differ in their pattern alone, or in what is theirs, and measures them.

How long each trains, and how wide its feed-forward sublayers are, is decided once, then kept.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional

import numpy as np
import torch
from torch import nn

from lazyformer_fairseq.arguments import options_by_name
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.flops import count_other_parameters, count_parameters
from lazyformer_fairseq.evaluation.costs.latency import peak_memory
from lazyformer_fairseq.evaluation.costs.machine import record
from lazyformer_fairseq.executors.nvidia_smi import visible_gpus
from lazyformer_fairseq.experiments.compare.models import WIDTHS, ModelSpec
from lazyformer_fairseq.experiments.compare.settings import COUNTED, CompareSettings
from lazyformer_fairseq.experiments.compare.task import Chosen, ComparedTask, CompareJob
from lazyformer_fairseq.experiments.folder import RESULTS, experiment, kept
from lazyformer_fairseq.experiments.trainings import train
from lazyformer_fairseq.modules.networks.adaptive_softmax import Band
from lazyformer_fairseq.patterns.grammar import count_kinds
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.report.numbers import spread
from lazyformer_fairseq.storage.json_files import sha256_of, write_json
from lazyformer_fairseq.training.loop import CHECKPOINT, TrainingLoop

LENGTHS = "lengths.json"
COSTS = "costs.json"
UPDATES_MEASURED = 2  # for memory: the second one has the optimizer's state beside it
LONG = 1_000_000  # updates of a schedule that any warm-up and decay leave room in

Runs = Mapping[str, Mapping[int, CompareJob]]  # by name in the results and seed


def compare(settings: CompareSettings, folder: Path, command: Sequence[str]) -> dict[str, Any]:
    """Runs the comparison in `folder`, or resumes it; returns the content of `results.json`, which it writes there.

    The trained models go to `runs`, tries of rates that are shorter to `tries`.

    Args:
        command: as it was given, for the record.

    Raises:
        UserError: the folder holds a comparison of other settings, the data or a size does not fit, or a process died.
    """
    compared = settings.row.load(settings)
    for spec in settings.specs.values():
        compared.given(Chosen, spec)  # raises a UserError for an option that nobody has
        if ours := sorted(options_by_name(settings.words_of(spec)).keys() & COUNTED.keys()):
            raise UserError(f"--{ours[0].replace('_', '-')} of {spec.name}: {COUNTED[ours[0]]}")
    specs = with_equal_parameters(compared)
    with experiment(folder, settings, "a comparison", f"*/*/{CHECKPOINT}", [LENGTHS, COSTS]):
        lengths = kept(folder / LENGTHS, lambda: find_lengths(compared, specs))["entries"]
        jobs = Jobs(compared, folder, specs, lengths)
        tried = jobs.tries()
        _train(compared, [job for tries in tried.values() for job in tries], "rates")
        choices = choose_rates(settings, tried)
        runs = {
            name: {seed: jobs.run(name, seed, choices[own]["rate"]) for seed in settings.seeds}
            for name, (own, _) in lengths.items()
        }
        _train(compared, [runs[name][seed] for seed in settings.seeds for name in runs], "training")
        costs = kept(folder / COSTS, lambda: measure_costs(compared, runs))
        results = collect(compared, command, runs, choices, costs)
        write_json(folder / RESULTS, results)
        return results


def _train(compared: ComparedTask, jobs: Sequence[CompareJob], description: str) -> None:
    if jobs:
        train(jobs, compared.open_training, description, count_workers(compared.settings), compared.settings.device)


def count_workers(settings: CompareSettings) -> int:
    """Processes at a time, one per GPU, or as many as torch's threads leave processors for; 0 for turns in this one."""
    if settings.in_turn:
        return 0
    if settings.device == "cuda":
        return len(visible_gpus())
    return max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads())


@dataclass(frozen=True)
class Jobs:
    """Makes the jobs of a comparison.

    Attributes:
        folder: of the comparison.
        specs: by name, their widths decided.
        lengths: by name in the results, such as ``mine@0.7``, the model's own, and updates.
    """

    compared: ComparedTask
    folder: Path
    specs: Mapping[str, ModelSpec]
    lengths: Mapping[str, tuple[str, int]]

    def run(self, name: str, seed: int, rate: float) -> CompareJob:
        return self._job(name, seed, rate, self.lengths[name][1], f"runs/{name}-seed{seed}-rate{rate:g}")

    def tries(self) -> dict[str, list[CompareJob]]:
        """By model of several rates, of each: with the first seed, at the model's full length.

        A try in full length is the run of that seed and rate.
        """
        settings = self.compared.settings
        longest = {}
        for name, (own, updates) in self.lengths.items():
            if own not in longest or updates > self.lengths[longest[own]][1]:
                longest[own] = name
        rates = {own: settings.rates_of(self.specs[own]) for own in longest}
        return {
            own: [self._try(name, settings.seeds[0], rate) for rate in rates[own]]
            for own, name in longest.items()
            if len(rates[own]) > 1
        }

    def _try(self, name: str, seed: int, rate: float) -> CompareJob:
        updates = self.compared.settings.rate_updates
        if updates is None or updates >= self.lengths[name][1]:
            return self.run(name, seed, rate)
        return self._job(name, seed, rate, updates, f"tries/{name}-rate{rate:g}", is_try=True)

    def _job(self, name: str, seed: int, rate: float, updates: int, folder: str, is_try: bool = False) -> CompareJob:
        compared = self.compared
        spec = self.specs[self.lengths[name][0]]
        objective = compared.objective(spec, seed, updates)
        of_all = {"spec": spec, "seed": seed, "rate": rate, "is_try": is_try}
        optimization = compared.optimization(spec, seed, rate, updates)
        return CompareJob(name, objective, optimization, self.folder / folder, updates, seed, **of_all)


def choose_rates(settings: CompareSettings, tried: Mapping[str, Sequence[CompareJob]]) -> dict[str, dict[str, Any]]:
    """What the results say of each model's rate: the best one by the last point of the curve, once all tries are over.

    `tries` have for each rate its seed, updates, and validation loss in the end. Of equal ones the lowest counts.

    Raises:
        UserError: no try of a model ended in a number.
    """
    found = {name: {"rate": settings.rates_of(spec)[0], "tries": []} for name, spec in settings.specs.items()}
    for name, jobs in tried.items():
        losses = {job.rate: job.result()["curve"]["loss"][-1] for job in jobs}
        numbers = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
        if not numbers:
            rates = ", ".join(f"{rate:g}" for rate in losses)
            raise UserError(f"{name}: no rate of {rates} ended in a number; try lower")
        best = min(numbers, key=lambda rate: (numbers[rate], rate))
        tries = [{"rate": job.rate, "seed": job.seed, "loss": losses[job.rate], "updates": job.updates} for job in jobs]
        found[name] = {"rate": best, "tries": tries}
    return found


def measure_costs(compared: ComparedTask, runs: Runs) -> dict[str, dict[str, Any]]:
    """By name in the results what :func:`_of_training` and the task's `costs_of_use` find, once all is trained."""
    last = {name: of_seeds[compared.settings.seeds[-1]] for name, of_seeds in runs.items()}
    specs = {job.spec.name: job.spec for job in last.values()}
    of_training = {
        own: _of_training(compared, spec)
        for own, spec in Progress(specs.items(), desc="memory", unit=" models", leave=False)
    }
    of_use = compared.costs_of_use(last)
    return {name: of_training[job.spec.name] | of_use.get(name, {}) for name, job in last.items()}


def _of_training(compared: ComparedTask, spec: ModelSpec) -> dict[str, Any]:
    """`parameters`, `parameters_without_embeddings`, `flops_per_update`, `peak_memory_bytes`.

    The peak is of two updates: weights, gradients, the optimizer's state, and what the backward pass keeps.
    """
    made: list[TrainingLoop] = []

    def some_updates() -> None:
        made.append(_training(compared, spec, UPDATES_MEASURED, Path(folder)))
        for _ in range(UPDATES_MEASURED):
            made[0].update()

    with TemporaryDirectory() as folder:
        peak = peak_memory(some_updates, compared.settings.device)
    (training,) = made
    return {
        "parameters": training.parameters,
        "parameters_without_embeddings": training.parameters - _in_embeddings(training.model),
        "flops_per_update": compared.mean_flops(spec, len(training.objective.dictionary)),
        "peak_memory_bytes": peak,
    }


def _training(compared: ComparedTask, spec: ModelSpec, updates: int, folder: Path) -> TrainingLoop:
    """One that counts for nothing."""
    seed = compared.settings.seeds[0]
    rate = compared.settings.rates_of(spec)[0]
    return TrainingLoop(compared.objective(spec, seed, updates), compared.optimization(spec, seed, rate, LONG), folder)


def _in_embeddings(model: nn.Module) -> int:
    """Parameters of tables: of words (also where the head shares them), positions, token types."""
    tables = [module for module in model.modules() if isinstance(module, (nn.Embedding, Band))]
    return sum({id(weight): weight.numel() for table in tables for weight in table.parameters()}.values())


def collect(
    compared: ComparedTask,
    command: Sequence[str],
    runs: Runs,
    choices: Mapping[str, Mapping[str, Any]],
    costs: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of results.json: all that a report of a comparison reads.

    Args:
        command: as it was given, for the record.
        runs: all are over.
        choices: by model, of its rate.
        costs: by name in the results.
    """
    settings = compared.settings
    shares = compared.settings.trained()
    checksums = {name: sha256_of(path) for name, path in compared.data_files().items()}
    return {
        **record(settings, command),
        "task": settings.task,
        "data": {"folder": settings.data, "checksums": checksums, **compared.describe_data()},
        "baseline": settings.baseline,
        "measure": {**settings.row.measure, **compared.unit()},
        "models": {
            name: _model(of_seeds, shares[name], costs[name], choices[shares[name][0]])
            for name, of_seeds in runs.items()
        },
    }


def _model(
    jobs: Mapping[int, CompareJob],
    share: tuple[str, float],
    costs: Mapping[str, Any],
    choice: Mapping[str, Any],
) -> dict[str, Any]:
    job, runs = next(iter(jobs.values())), {str(seed): job.result() for seed, job in jobs.items()}
    seconds = np.concatenate([run["seconds"] for run in runs.values()])
    tokens = sum(run["curve"]["tokens"][-1] for run in runs.values())
    return {
        **{"what": job.spec.what, "arch": job.spec.arch, "pattern": None if job.spec.is_external else job.spec.pattern},
        **{"of": share[0], "share": share[1]},
        "sublayers": count_kinds(job.spec.pattern),
        **{size: getattr(job.spec, size) for size in WIDTHS},
        **costs,
        **{"tokens_per_update": tokens / len(seconds), "updates": job.updates, **choice},
        "milliseconds_per_update": spread(1000 * seconds),
        "runs": {seed: {**run, "seconds": float(sum(run["seconds"]))} for seed, run in runs.items()},
    }


TRIAL_WARM_UP = 5
TRIAL_UPDATES = 20
STEP = 8  # of a feed-forward width


def find_lengths(compared: ComparedTask, specs: Mapping[str, ModelSpec]) -> dict[str, Any]:
    """`entries`: by name in the results, the model's own name, and updates; `milliseconds`: by model, of an update.

    Milliseconds are those of a trial, which is made unless the settings give updates alone.
    """
    settings = compared.settings
    trained = compared.settings.trained()
    if settings.budget is None and not settings.shares:
        return {"entries": {name: (own, settings.updates) for name, (own, _) in trained.items()}, "milliseconds": {}}
    milliseconds = _trial(compared, specs)
    seconds = settings.budget or settings.updates * milliseconds[settings.baseline] / 1000
    lengths = {name: (own, int(1000 * share * seconds / milliseconds[own])) for name, (own, share) in trained.items()}
    if settings.updates is not None:
        lengths[settings.baseline] = (settings.baseline, settings.updates)
    entries = {name: (own, max(1, updates)) for name, (own, updates) in lengths.items()}
    return {"entries": entries, "milliseconds": milliseconds}


def _trial(compared: ComparedTask, specs: Mapping[str, ModelSpec]) -> dict[str, float]:
    """Median milliseconds of an update by model; all take turns, with updates of their own that count for nothing."""
    trial = TRIAL_WARM_UP + TRIAL_UPDATES
    with TemporaryDirectory() as folder:
        trainings = {name: _training(compared, spec, trial, Path(folder) / name) for name, spec in specs.items()}
        for _ in Progress(range(trial), desc="trial", unit=" updates", leave=False):
            for training in trainings.values():
                training.update()
    return {name: 1000 * _mean_of_medians(compared, specs[name], each.seconds) for name, each in trainings.items()}


def _mean_of_medians(compared: ComparedTask, spec: ModelSpec, seconds: Sequence[float]) -> float:
    """Of the updates of each length of inputs the median, each for the share that it has of a training."""
    phases = compared.phases(spec, len(seconds), TRIAL_WARM_UP)
    of_phases = zip(phases, np.diff([0.0, *(end for _, end in compared.lengths(spec))]), strict=True)
    medians = [(share, np.median(seconds[made.start : made.stop])) for (_, made), share in of_phases if made]
    return float(sum(share * median for share, median in medians) / sum(share for share, _ in medians))


def with_equal_parameters(compared: ComparedTask) -> dict[str, ModelSpec]:
    """The models; where the settings ask for it, with the width that brings each closest to the baseline's size.

    Parameters of sublayers count, which leaves embeddings and head out. A model that says its width keeps it, and so
    does an external.

    Raises:
        UserError: a pattern without a sublayer that has a width, or too large for any width.
    """
    settings = compared.settings
    specs = compared.settings.specs
    if not settings.equal_parameters:
        return specs
    wanted = parameters_of_sublayers(compared, specs[settings.baseline])

    def fitted(spec: ModelSpec) -> ModelSpec:
        says_so = "ffn" in settings.models[spec.name].partition(";")[2]
        if spec.name == settings.baseline or spec.is_external or says_so:
            return spec
        return replace(spec, ffn_embed_dim=_width(compared, spec, wanted))

    return {name: fitted(spec) for name, spec in specs.items()}


def parameters_of_sublayers(compared: ComparedTask, spec: ModelSpec, width: Optional[int] = None) -> int:
    """All that is not embeddings, head, or biases that sublayers share.

    Args:
        width: of the feed-forward sublayers, in place of its own.
    """
    sizes = compared.sizes(spec if width is None else replace(spec, ffn_embed_dim=width))
    return count_parameters(spec.pattern, sizes) - count_other_parameters(sizes)


def _width(compared: ComparedTask, spec: ModelSpec, wanted: int) -> int:
    """The multiple of STEP whose parameters, which grow in proportion to it, come closest to those wanted."""

    def surplus(steps: int) -> int:
        return parameters_of_sublayers(compared, spec, steps * STEP) - wanted

    least = surplus(1)
    growth = surplus(2) - surplus(1)
    if not growth:
        raise UserError(f"--equal-parameters: {spec.name}, {spec.pattern}, has no sublayer with a width")
    if least > 0:
        raise UserError(
            f"--equal-parameters: {spec.name}, {spec.pattern}, has {least:,} parameters more than the baseline even at "
            f"a width of {STEP}"
        )
    below = 1 + -least // growth
    return STEP * min(below, below + 1, key=lambda steps: abs(surplus(steps)))
