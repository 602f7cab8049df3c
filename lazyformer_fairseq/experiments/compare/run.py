"""`lazyformer compare`: train and measure models that differ in their patterns or other options.

Run lengths are determined once and stored in the folder, so a resumed comparison uses the same lengths.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from lazyformer_fairseq.executors.options import ExecutorOptions
from lazyformer_fairseq.experiments.compare.models import WIDTHS, ModelSpec
from lazyformer_fairseq.experiments.compare.settings import COUNTED, CompareSettings
from lazyformer_fairseq.experiments.compare.task import ComparedTask, CompareJob, RecipeOverrides
from lazyformer_fairseq.experiments.folder import RESULTS, experiment, hashes_as_settings, load_or_create
from lazyformer_fairseq.modules.networks.adaptive_softmax import Band
from lazyformer_fairseq.patterns.grammar import count_kinds
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.report.numbers import in_milliseconds
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.training.loop import CHECKPOINT, TrainingLoop

LENGTHS = "lengths.json"
COSTS = "costs.json"
UPDATES_MEASURED = 2  # for peak memory: the optimizer state exists only from the second update on
LONG = 1_000_000  # updates; long enough for any warm-up and decay

Runs = Mapping[str, Mapping[int, CompareJob]]  # by name in the results, then by seed


def compare(
    settings: CompareSettings,
    folder: Path,
    command: Sequence[str],
    place: ExecutorOptions = ExecutorOptions(),  # noqa: B008 (frozen)
    report_to: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Run or resume the comparison in `folder`, write its `results.json`, and return the file's contents.

    The trained models are kept in the subfolder `runs`, and shorter learning-rate trials in `tries`.

    Args:
        settings: the comparison's settings.
        folder: the comparison's folder.
        command: the command line, which is stored in the results.
        place: the executor options for runs in separate processes.
        report_to: names of experiment trackers.

    Raises:
        UserError: the folder contains a comparison with different settings or data, the data or a size is unsuitable,
            or a training process died.
    """
    compared = settings.row.load(settings)
    compared.train_at(place)
    compared.report_to = report_to

    for spec in settings.specs.values():
        compared.given(RecipeOverrides, spec)  # raises a UserError for an unknown option
        given = options_by_name(settings.words_of(spec))
        ours = sorted(given.keys() & COUNTED.keys())
        if ours:
            raise UserError(f"--{ours[0].replace('_', '-')} of {spec.name}: {COUNTED[ours[0]]}")

    specs = with_equal_parameters(compared)
    checksums = compared.hash_data()
    kept_settings = asdict(settings) | hashes_as_settings(checksums)
    with experiment(folder, kept_settings, "a comparison", f"*/*/{CHECKPOINT}", [LENGTHS, COSTS]):
        lengths = load_or_create(folder / LENGTHS, lambda: find_lengths(compared, specs))["entries"]
        for name, (own, updates) in lengths.items():
            compared.refuse_too_many_words(name, updates)
            refuse_too_short(compared, specs[own], name, updates)

        jobs = Jobs(compared, folder, specs, lengths)
        tried = jobs.tries()
        all_tries = [job for tries in tried.values() for job in tries]
        compared.train(all_tries, "rates")
        choices = choose_rates(settings, tried)

        runs = {}
        for name, (own, _) in lengths.items():
            rate = choices[own]["rate"]
            runs[name] = {seed: jobs.job(name, seed, rate) for seed in settings.seeds}
        all_runs = [runs[name][seed] for seed in settings.seeds for name in runs]
        compared.train(all_runs, "training")

        costs = load_or_create(folder / COSTS, lambda: measure_costs(compared, runs))
        shares = settings.trained()
        models = {}
        for name, of_seeds in runs.items():
            own, share = shares[name]
            models[name] = {"of": own, "share": share, **costs[name], **choices[own], **_describe(of_seeds)}
        results = {
            **record(settings, command),
            "task": settings.task,
            "data": {"folder": settings.data, "checksums": checksums, **compared.describe_data()},
            "baseline": settings.baseline,
            "measure": {**settings.row.measure, **compared.unit()},
            "models": models,
        }
        write_json(folder / RESULTS, results)
        return results


@dataclass(frozen=True)
class Jobs:
    """A comparison's jobs.

    Attributes:
        compared: the comparison's task.
        folder: the comparison's folder.
        specs: the models by name, with their final feed-forward widths.
        lengths: a mapping from each run's name in the results, such as ``mine@0.7``, to the run's model name and number
            of updates.
    """

    compared: ComparedTask
    folder: Path
    specs: Mapping[str, ModelSpec]
    lengths: Mapping[str, tuple[str, int]]

    def job(self, name: str, seed: int, rate: float, is_try: bool = False) -> CompareJob:
        """Return the job for a run or for a learning-rate trial, which may be shorter than a run.

        Args:
            name: the run's name in the results.
            seed: the seed.
            rate: the peak learning rate.
            is_try: whether the job is a learning-rate trial.
        """
        own, updates = self.lengths[name]
        most = self.compared.settings.rate_updates
        is_shorter = is_try and most is not None and most < updates
        folder = f"runs/{name}-seed{seed}-rate{rate:g}"
        if is_shorter:
            updates = most
            folder = f"tries/{name}-rate{rate:g}"
        spec = self.specs[own]
        return CompareJob(
            name=name,
            objective=self.compared.objective(spec, seed, updates),
            optimization=self.compared.optimization(spec, seed, rate, updates),
            folder=self.folder / folder,
            group=seed,
            spec=spec,
            seed=seed,
            rate=rate,
            is_try=is_shorter,
        )

    def tries(self) -> dict[str, list[CompareJob]]:
        """Return the learning-rate trials of each model that has several learning rates, by model.

        Trials use the first seed and the length of the model's longest run, unless the settings shorten them. A trial
        that is not shortened is identical to the run with its seed and rate.
        """
        settings = self.compared.settings
        seed = settings.seeds[0]
        longest = {}
        for name, (own, updates) in self.lengths.items():
            if own not in longest or updates > self.lengths[longest[own]][1]:
                longest[own] = name
        tries = {}
        for own, name in longest.items():
            rates = settings.rates_of(self.specs[own])
            if len(rates) > 1:
                tries[own] = [self.job(name, seed, rate, is_try=True) for rate in rates]
        return tries


def choose_rates(settings: CompareSettings, tried: Mapping[str, Sequence[CompareJob]]) -> dict[str, dict[str, Any]]:
    """Return each model's best learning `rate` among its finished trials, and a description of its `tries`.

    The best rate has the lowest final validation loss; ties go to the lowest rate. Each entry of `tries` has the rate,
    the seed, the number of updates and the final validation loss.

    Raises:
        UserError: all of a model's trials diverged.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, spec in settings.specs.items():
        found[name] = {"rate": settings.rates_of(spec)[0], "tries": []}
    for name, jobs in tried.items():
        losses = {job.rate: job.result()["curve"]["loss"][-1] for job in jobs}
        numbers = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
        if not numbers:
            rates = ", ".join(f"{rate:g}" for rate in losses)
            raise UserError(f"{name}: training diverged at every learning rate ({rates}); try lower ones with --lr")
        best = min(numbers, key=lambda rate: (numbers[rate], rate))
        tries = [{"rate": job.rate, "seed": job.seed, "loss": losses[job.rate], "updates": job.updates} for job in jobs]
        found[name] = {"rate": best, "tries": tries}
    return found


def measure_costs(compared: ComparedTask, runs: Runs) -> dict[str, dict[str, Any]]:
    """Measure finished runs' training costs and the task's `costs_of_use`.

    Returns:
        The costs, by each run's name in the results.
    """
    last_seed = compared.settings.seeds[-1]
    last = {name: of_seeds[last_seed] for name, of_seeds in runs.items()}
    specs = {job.spec.name: job.spec for job in last.values()}
    of_training = {}
    for own, spec in Progress(specs.items(), desc="memory", unit=" models", leave=False):
        of_training[own] = _costs_of_training(compared, spec)
    of_use = compared.costs_of_use(last)
    costs = {}
    for name, job in last.items():
        costs[name] = of_training[job.spec.name] | of_use.get(name, {})
    return costs


def _costs_of_training(compared: ComparedTask, spec: ModelSpec) -> dict[str, Any]:
    """Return a model's `parameters`, `parameters_without_embeddings`, `flops_per_update` and `peak_memory_bytes`.

    Peak memory is measured over two updates and includes weights, gradients, optimizer state, and activations saved for
    the backward pass.
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
        "parameters_without_embeddings": training.parameters - _count_embedding_parameters(training.model),
        "flops_per_update": compared.mean_flops(spec, len(training.objective.dictionary)),
        "peak_memory_bytes": peak,
    }


def _training(compared: ComparedTask, spec: ModelSpec, updates: int, folder: Path) -> TrainingLoop:
    """Return a training loop that is used only for measurements and then discarded."""
    seed = compared.settings.seeds[0]
    rate = compared.settings.rates_of(spec)[0]
    objective = compared.objective(spec, seed, updates)
    optimization = compared.optimization(spec, seed, rate, LONG)
    return TrainingLoop(objective, optimization, folder)


def _count_embedding_parameters(model: nn.Module) -> int:
    """Return the number of parameters in word, position and token-type embeddings.

    Word embeddings that are tied to the head are included.
    """
    found = {}
    for module in model.modules():
        if isinstance(module, (nn.Embedding, Band)):
            found |= {id(weight): weight.numel() for weight in module.parameters()}
    return sum(found.values())


def _describe(jobs: Mapping[int, CompareJob]) -> dict[str, Any]:
    """Return a model's entry in results.json from its jobs by seed."""
    job = next(iter(jobs.values()))
    runs = {}
    seconds: list[float] = []
    tokens = 0
    for seed, each in jobs.items():
        result = each.result()
        seconds += result["seconds"]
        tokens += result["curve"]["tokens"][-1]
        runs[str(seed)] = {**result, "seconds": float(sum(result["seconds"]))}
    pattern = None
    if not job.spec.is_external:
        pattern = job.spec.pattern
    return {
        "what": job.spec.what,
        "arch": job.spec.arch,
        "pattern": pattern,
        "sublayers": count_kinds(job.spec.pattern),
        **{size: getattr(job.spec, size) for size in WIDTHS},
        "tokens_per_update": tokens / len(seconds),
        "updates": job.updates,
        "milliseconds_per_update": in_milliseconds(seconds),
        "runs": runs,
    }


TRIAL_WARM_UP = 5
TRIAL_UPDATES = 20
STEP = 8  # feed-forward widths are multiples of this


def find_lengths(compared: ComparedTask, specs: Mapping[str, ModelSpec]) -> dict[str, Any]:
    """Determine the lengths of all runs, using a trial unless the settings give all of them the same number of updates.

    Returns:
        A dictionary with two entries. `entries` maps each run's name in the results to the run's model name and number
        of updates. `milliseconds` maps each model to its time per update in the trial; it is empty if there was no
        trial.
    """
    settings = compared.settings
    trained = settings.trained()
    if settings.budget is None and not settings.shares:
        equal = {name: (own, settings.updates) for name, (own, _) in trained.items()}
        return {"entries": equal, "milliseconds": {}}
    milliseconds = _trial(compared, specs)
    seconds = settings.budget or settings.updates * milliseconds[settings.baseline] / 1000
    entries = {}
    for name, (own, share) in trained.items():
        updates = int(1000 * share * seconds / milliseconds[own])
        if settings.budget is not None and settings.word_budget is not None:
            updates = min(updates, int(settings.word_budget / compared.words_per_update))
        if name == settings.baseline and settings.updates is not None:
            updates = settings.updates
        entries[name] = (own, max(1, updates))
    return {"entries": entries, "milliseconds": milliseconds}


def refuse_too_short(compared: ComparedTask, spec: ModelSpec, name: str, updates: int) -> None:
    """Raise a UserError if a model's learning-rate schedule does not fit into its run or its learning-rate trials.

    Args:
        compared: the task.
        spec: the model.
        name: the run's name in the results.
        updates: the run's length.
    """
    settings = compared.settings
    given = f"--updates {settings.updates}"
    if settings.budget is not None:
        given = f"--budget {settings.budget:g}s"
    elif settings.shares:
        given = "--time-fractions"
    lengths = {given: updates}
    if len(settings.rates_of(spec)) > 1 and settings.rate_updates is not None:
        lengths[f"--rate-updates {settings.rate_updates}"] = min(updates, settings.rate_updates)

    def fits(length: int) -> bool:
        rate = settings.rates_of(spec)[0]
        optimization = compared.optimization(spec, settings.seeds[0], rate, length)
        any_optimizer = replace(optimization, optimizer="fused_adam", optimizer_options={})
        parameter = nn.Parameter(torch.zeros(1))
        try:
            optimization.build_schedule(any_optimizer.build_optimizer([parameter]))
        except UserError:
            return False
        return True

    for option, length in lengths.items():
        if not fits(length) and fits(LONG):  # if LONG does not fit either, the schedule's options are wrong
            least = bisect_left(range(LONG), True, lo=length, key=fits)
            noun = "update" if length == 1 else "updates"
            raise UserError(
                f"{option}: allows only {length:,} {noun} for {name}, but its learning-rate schedule requires at least "
                f"{least:,}; use a larger value"
            )


def _trial(compared: ComparedTask, specs: Mapping[str, ModelSpec]) -> dict[str, float]:
    """Measure each model's milliseconds per update in short interleaved runs, which are then discarded."""
    updates = TRIAL_WARM_UP + TRIAL_UPDATES
    with TemporaryDirectory() as folder:
        trainings = {name: _training(compared, spec, updates, Path(folder) / name) for name, spec in specs.items()}
        for _ in Progress(range(updates), desc="trial", unit=" updates", leave=False):
            for training in trainings.values():
                training.update()
    milliseconds = {}
    for name, training in trainings.items():
        milliseconds[name] = 1000 * _mean_of_medians(compared, specs[name], training.seconds)
    return milliseconds


def _mean_of_medians(compared: ComparedTask, spec: ModelSpec, seconds: Sequence[float]) -> float:
    """Estimate a whole run's seconds per update from the duration of each update in a trial.

    The estimate is the mean of the median times at each input length, weighted by the fraction of updates at that
    length.
    """
    total = 0.0
    measured = 0.0
    begin = 0.0
    phases = compared.phases(spec, len(seconds), TRIAL_WARM_UP)
    ends = [end for _, end in compared.lengths(spec)]
    for (_, updates), end in zip(phases, ends, strict=True):
        if updates:
            total += (end - begin) * np.median(seconds[updates.start : updates.stop])
            measured += end - begin
        begin = end
    return float(total / measured)


def with_equal_parameters(compared: ComparedTask) -> dict[str, ModelSpec]:
    """Return the models by name, with feed-forward widths adjusted to match the baseline's size if requested.

    If so, each model gets the width at which its number of sublayer parameters, without embeddings and head, is closest
    to the baseline's. External models and models that set their own width are not adjusted.

    Raises:
        UserError: a pattern has no sublayer with a width, or has too many parameters at any width.
    """
    settings = compared.settings
    specs = dict(settings.specs)
    if not settings.equal_parameters:
        return specs
    wanted = parameters_of_sublayers(compared, specs[settings.baseline])
    for name, spec in specs.items():
        has_own_width = "ffn" in settings.models[name].partition(";")[2]
        if name != settings.baseline and not spec.is_external and not has_own_width:
            specs[name] = replace(spec, ffn_embed_dim=_width(compared, spec, wanted))
    return specs


def parameters_of_sublayers(compared: ComparedTask, spec: ModelSpec, width: Optional[int] = None) -> int:
    """Return a model's number of parameters, excluding embeddings, the head, and biases that sublayers share.

    Args:
        compared: the task.
        spec: the model.
        width: a feed-forward width that replaces the model's own.
    """
    if width is not None:
        spec = replace(spec, ffn_embed_dim=width)
    sizes = compared.sizes(spec)
    return count_parameters(spec.pattern, sizes) - count_other_parameters(sizes)


def _width(compared: ComparedTask, spec: ModelSpec, wanted: int) -> int:
    """Return the multiple of STEP at which the parameter count, linear in the width, is closest to `wanted`."""

    def surplus(steps: int) -> int:
        return parameters_of_sublayers(compared, spec, steps * STEP) - wanted

    least = surplus(1)
    growth = surplus(2) - surplus(1)
    if not growth:
        raise UserError(
            f"--equal-parameters: {spec.name} ({spec.pattern}) has no sublayer with a feed-forward width to adjust"
        )
    if least > 0:
        raise UserError(
            f"--equal-parameters: {spec.name} ({spec.pattern}) has {least:,} more parameters than the baseline even at "
            f"a feed-forward width of {STEP}; use fewer sublayers"
        )
    below = 1 + -least // growth
    return STEP * min(below, below + 1, key=lambda steps: abs(surplus(steps)))
