"""An experiment's training runs: resumable jobs that are interleaved in one process or run in separate processes.

Runs that are interleaved update by update have comparable timings: they share one process and one machine state, so
anything that briefly slows down one model slows down the others too.
"""

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch

from lazyformer_fairseq.child_process import output_to
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.interface import Call, Executor, reason, run_calls
from lazyformer_fairseq.executors.local import processors_here
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.checked import Count, as_type
from lazyformer_fairseq.storage.in_place import last_line, refuse_foreign
from lazyformer_fairseq.storage.json_files import read_checked_json, write_checked_json, write_json
from lazyformer_fairseq.storage.run_lock import file_lock
from lazyformer_fairseq.training.loop import CHECKPOINT, DivergedError, TrainingLoop
from lazyformer_fairseq.training.objectives.interface import Objective
from lazyformer_fairseq.training.optimization import OptimizationConfig
from lazyformer_fairseq.training.stop_signals import StopRequest

RESULT = "result.json"
LOG = "train.log"
PROGRESS = "progress.json"  # read by the process that waits for the run
PRELOAD = (__name__, "torch._dynamo")  # modules that worker processes import early; optimizers need torch._dynamo
Curve = dict[str, list[float]]  # for each metric, one value per validation; NaN where the run diverged


@dataclass(frozen=True)
class Finished:
    """The fields that the results of all runs have in common.

    Attributes:
        curve: one list per metric, with one value per validation.
    """

    curve: Curve


@dataclass(frozen=True)
class Job:
    """A training run.

    Attributes:
        name: the name shown in progress and error messages.
        objective: what the model learns.
        optimization: the optimizer, schedule, precision and number of updates.
        folder: the folder for the run's checkpoint, record and result.
        group: jobs in the same group are interleaved; groups run one after another.
        start: another run's checkpoint, to start from if it exists.
        report_to: names of experiment trackers.
    """

    name: str
    objective: Objective = field(compare=False)
    optimization: OptimizationConfig = field(compare=False)
    folder: Path
    group: Hashable = 0
    start: Optional[Path] = None
    report_to: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def updates(self) -> int:
        """The number of updates in the whole run."""
        return self.optimization.updates

    def result(self) -> Optional[dict[str, Any]]:
        """Return the result, or None while the run is unfinished.

        The result file is written atomically as the last step of a run.

        Raises:
            UserError: the result file has been damaged since it was written.
        """
        path = self.folder / RESULT
        if not path.exists():
            return None
        remedy = f"remove {self.folder} and run the same command again, which retrains this model from scratch"
        content = read_checked_json(path, remedy)
        as_type(Finished, content, path, remedy)
        return content

    def updates_saved(self) -> int:
        """Return the number of updates that another process has saved, or 0 if the job's progress file is unreadable.

        The number is only used to show progress, so a damaged file is not an error.
        """
        try:
            return int(json.loads((self.folder / PROGRESS).read_bytes())["updates"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0


class Training(TrainingLoop):
    """A job's training loop, which stores the validation curve in the checkpoints.

    Attributes:
        curve: one list per metric, with one value per validation: `updates`, `seconds` (of training only) and the
            results of :meth:`measure`.
        tokens: the number of tokens in each update.
        validations: the number of points on the curve, not counting the one before the first update. A checkpoint is
            saved at each point.
        may_diverge: if true, a run that diverges gets NaN as the last point of its curve and the other runs continue;
            if false, the error ends all runs.
    """

    validations = 5
    may_diverge = False

    def __init__(self, job: Job):
        super().__init__(job.objective, job.optimization, job.folder, job.start, job.report_to)
        self.job = job
        self.name = job.name
        self.tokens: list[int] = self.from_history("tokens", list[Count], [])
        self.curve: dict[str, list[float]] = self.from_history("curve", Curve, {})

    @abstractmethod
    def measure(self) -> Mapping[str, float]:
        """Compute the metrics for one point of the curve; the progress bar shows the first one."""

    def result(self) -> dict[str, Any]:
        """Return the finished run's result, which is written to the result file."""
        return {"parameters": self.parameters, "curve": self.curve, "seconds": self.seconds}

    def is_due(self) -> bool:
        """Return whether to validate and save after this update."""
        if self.updates == self.job.updates:
            return True
        interval = max(1, self.job.updates // self.validations)
        return self.updates % interval == 0

    def update(self) -> int:
        """Train on one batch and return its number of tokens."""
        tokens = super().update()
        self.tokens.append(tokens)
        return tokens

    def validate(self) -> None:
        """Add a point to the curve, unless it already has one for the current update."""
        if self.curve and self.curve["updates"][-1] == self.updates:
            return
        point = {"updates": self.updates, "seconds": sum(self.seconds), **self.measure()}
        for name, value in point.items():
            if not isinstance(value, int):
                value = float(value)  # noqa: PLW2901  checkpoints must not contain numpy scalars
            self.curve.setdefault(name, []).append(value)
        self.log_metrics("valid", point)

    def mark_diverged(self) -> None:
        """End a run that has diverged by adding a last point with NaN metrics to its curve."""
        self.updates = self.job.updates
        point = dict.fromkeys(self.curve, math.nan)
        point |= {"updates": self.updates, "seconds": sum(self.seconds)}
        for name, value in point.items():
            self.curve[name].append(value)

    def save(self, with_optimizer: bool = True, name: str = CHECKPOINT) -> None:
        """Save a checkpoint that includes the curve and the number of tokens in each update."""
        self.history |= {"tokens": self.tokens, "curve": self.curve}
        super().save(with_optimizer, name)
        write_json(self.folder / PROGRESS, {"updates": self.updates}, durable=False)

    def finish(self) -> None:
        """Write the result, and save the checkpoint again without the optimizer state to free disk space."""
        write_checked_json(self.folder / RESULT, self.result())
        self.save(with_optimizer=False)


OpenTraining = Callable[[Job], Training]


def train(
    jobs: Sequence[Job],
    open_training: OpenTraining,
    description: str = "training",
    executor: Optional[Executor] = None,
    threads: int = 1,
) -> None:
    """Run all jobs that have no result yet, and show a progress bar.

    Args:
        jobs: the jobs; duplicates run only once.
        open_training: a function that starts or resumes a job's run.
        description: the label of the progress bar.
        executor: the executor that runs each job in a separate process; None to interleave the jobs in this process.
        threads: the number of torch threads for each job that runs in a separate process.

    Raises:
        UserError: a job in a separate process has failed. The message names its log.
    """
    jobs = list(dict.fromkeys(jobs))
    unfinished = [job for job in jobs if job.result() is None]
    total = sum(job.updates for job in jobs)
    left = sum(job.updates for job in unfinished)
    with Progress(total=total, initial=total - left, desc=description, unit=" updates") as progress:
        if executor is not None:
            _train_alone(unfinished, open_training, progress, executor, threads)
            return
        for group in dict.fromkeys(job.group for job in unfinished):
            trainings = [open_training(job) for job in unfinished if job.group == group]
            progress.update(sum(training.updates for training in trainings))
            train_interleaved(trainings, progress)
            for training in trainings:
                training.finish()


def threads_per_run(at_once: Optional[int]) -> int:
    """Return the number of torch threads per run if `at_once` of them run on this machine at the same time.

    None means as many runs as the CPU cores allow, each with torch's current number of threads.
    """
    cores_per_run = processors_here() // (at_once or 1)
    return min(torch.get_num_threads(), max(1, cores_per_run))


def train_interleaved(trainings: Sequence[Training], progress: Progress) -> None:
    """Train all runs to completion, interleaving their updates; each update goes to the run that is farthest behind.

    Runs with equal numbers of updates therefore alternate strictly.

    Args:
        trainings: the runs to interleave.
        progress: the progress bar, which counts updates.

    Raises:
        SystemExit: a signal requested a stop. All runs are saved after the current update, and the same command resumes
            them.
    """
    with StopRequest().listening() as stop:
        for training in trainings:
            training.stop = stop
        try:
            _interleave(trainings, progress)
        finally:
            for training in trainings:
                training.close()


def _interleave(trainings: Sequence[Training], progress: Progress) -> None:
    for training in trainings:
        if not training.curve:
            training.validate()
    progress.unpause()  # otherwise the remaining time would be estimated as if these validations were updates

    while True:
        behind = min(trainings, key=lambda training: training.updates / training.job.updates)
        if behind.updates >= behind.job.updates:
            break

        before = behind.updates
        try:
            behind.update()
        except DivergedError as error:
            if not behind.may_diverge:
                raise
            print(f"{behind.job}: diverged. {error}", flush=True)
            behind.mark_diverged()
        progress.update(behind.updates - before)

        code = behind.stop.agreed_code()
        if code:
            for training in trainings:
                training.save()
            print("stopped by a signal: all runs have been saved; run the same command again to resume", flush=True)
            raise SystemExit(code)

        if behind.is_due():
            behind.validate()
            behind.save()
            progress.unpause()
            *_, measure = list(behind.curve)[:3]  # the first metric comes after updates and seconds
            values = [f"{each.name} {each.curve[measure][-1]:.2f}" for each in trainings]
            progress.set_postfix_str(", ".join(values))


def train_alone(job: Job, open_training: OpenTraining, threads: int) -> None:
    """Run one job in the current process and send its output to the job's log.

    The job may already have been attempted in another process. The call waits until no other process is working on it,
    and does nothing if the job has a result by then.
    """
    torch.set_num_threads(threads)
    job.folder.mkdir(parents=True, exist_ok=True)
    with file_lock(job.folder / ".lock"), output_to(job.folder / LOG):
        if job.result() is None:
            training = open_training(job)
            with Progress(disable=True) as progress:
                train_interleaved([training], progress)
            training.finish()


def _train_alone(
    jobs: Sequence[Job],
    open_training: OpenTraining,
    progress: Progress,
    executor: Executor,
    threads: int,
) -> None:
    calls = {}
    for job in jobs:
        refuse_foreign(job.folder / LOG)  # checked here because a job that cannot open its log cannot report why
        calls[Call(train_alone, (job, open_training, threads))] = job
    before = progress.n
    for ended in run_calls(list(calls), executor):
        if ended is not None and ended.error is not None:
            job = calls[ended.call]
            log = job.folder / LOG
            why = f"{job}: {reason(ended.error)}; the last line of {log} is: {last_line(log)}"
            if not ended.is_tried_again:
                raise UserError(f"{why}. Rerun to resume")
            Progress.write(f"{why}. Resuming the run")
        made = sum(job.updates_saved() for job in jobs)
        progress.update(before + made - progress.n)
