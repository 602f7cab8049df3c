"""The trainings of an experiment: jobs that resume, done update by update in turn, or each alone in a process.

In turn, so that their times compare: one process, one machine state; what slows one model down for a moment slows the
others too.
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
PROGRESS = "progress.json"  # for the process that waits for this one
PRELOAD = (__name__, "torch._dynamo")  # of processes that train; the latter for optimizers
Curve = dict[str, list[float]]  # by validation; NaN where the training diverged


@dataclass(frozen=True)
class Finished:
    """The part that the results of all trainings share.

    Attributes:
        curve: a list per measure, with a value per validation.
    """

    curve: Curve


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        name: the name that progress and errors show.
        objective, optimization: what is learned, and how.
        folder: the folder of its checkpoint, record and result.
        group: jobs of one group take turns; one group follows the other.
        start: a checkpoint of another training, to go on from if it is there.
    """

    name: str
    objective: Objective = field(compare=False)
    optimization: OptimizationConfig = field(compare=False)
    folder: Path
    group: Hashable = 0
    start: Optional[Path] = None

    def __str__(self) -> str:
        return self.name

    @property
    def updates(self) -> int:
        """The updates of the whole training."""
        return self.optimization.updates

    def result(self) -> Optional[dict[str, Any]]:
        """Return the result; None until the training is over. The file is written last and whole.

        Raises:
            UserError: the file was damaged since.
        """
        path = self.folder / RESULT
        if not path.exists():
            return None
        remedy = f"remove {self.folder} and run the same command again, which trains this model anew"
        content = read_checked_json(path, remedy)
        as_type(Finished, content, path, remedy)
        return content

    def updates_saved(self) -> int:
        """Return the updates saved by another process; for progress alone, so that a damaged file counts as none."""
        try:
            return int(json.loads((self.folder / PROGRESS).read_bytes())["updates"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0


class Training(TrainingLoop):
    """The training of a job, whose validations make a curve, kept with its checkpoints.

    Attributes:
        curve: lists with a value per validation: `updates`, `seconds` (of training alone), and what else is measured.
        tokens: the tokens of each update.
        validations: points of a curve, beside the one before the first update; the training is saved at each.
        may_diverge: whether the curve of a training that diverges ends in NaN; else its error ends all.
    """

    validations = 5
    may_diverge = False

    def __init__(self, job: Job):
        super().__init__(job.objective, job.optimization, job.folder, job.start)
        self.job = job
        self.name = job.name
        self.tokens: list[int] = self.from_history("tokens", list[Count], [])
        self.curve: dict[str, list[float]] = self.from_history("curve", Curve, {})

    @abstractmethod
    def measure(self) -> Mapping[str, float]:
        """Return the measures of a point of the curve, beside updates and seconds; progress shows the first."""

    def result(self) -> dict[str, Any]:
        """Return the result of the finished training."""
        return {"parameters": self.parameters, "curve": self.curve, "seconds": self.seconds}

    def is_due(self) -> bool:
        """Return whether to validate and save after this update."""
        return self.updates == self.job.updates or self.updates % max(1, self.job.updates // self.validations) == 0

    def update(self) -> int:
        """Train on one batch; return its number of tokens."""
        tokens = super().update()
        self.tokens.append(tokens)
        return tokens

    def validate(self) -> None:
        """Add a point to the curve, unless it has one of this update."""
        if self.curve and self.curve["updates"][-1] == self.updates:
            return
        point = {"updates": self.updates, "seconds": sum(self.seconds), **self.measure()}
        for name, value in point.items():
            if not isinstance(value, int):
                value = float(value)  # noqa: PLW2901  a checkpoint holds none of numpy's numbers
            self.curve.setdefault(name, []).append(value)
        self.log_metrics("valid", point)

    def give_up(self) -> None:
        """End a training that diverged: the last point of its curve has no numbers."""
        self.updates = self.job.updates
        point = {**dict.fromkeys(self.curve, math.nan), "updates": self.updates, "seconds": sum(self.seconds)}
        for name, value in point.items():
            self.curve[name].append(value)

    def save(self, with_optimizer: bool = True, name: str = CHECKPOINT) -> None:
        """Save a checkpoint, which keeps the curve and the tokens of each update too."""
        self.history |= {"tokens": self.tokens, "curve": self.curve}
        super().save(with_optimizer, name)
        write_json(self.folder / PROGRESS, {"updates": self.updates}, durable=False)

    def finish(self) -> None:
        """Write the result, and remove the optimizer's part of the checkpoint from the disk."""
        write_checked_json(self.folder / RESULT, self.result())
        self.save(with_optimizer=False)


Opening = Callable[[Job], Training]


def train(
    jobs: Sequence[Job],
    open_training: Opening,
    description: str = "training",
    executor: Optional[Executor] = None,
    threads: int = 1,
) -> None:
    """Do all jobs that have no result yet, and show how far they are.

    Args:
        jobs: the trainings; one that comes twice is done once.
        open_training: a function that starts or resumes a job's training.
        description: the label of the progress bar.
        executor: the place where each trains alone; None for turns in this process.
        threads: torch's threads for a training that is alone.

    Raises:
        UserError: a training has failed; names its log.
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
            train_in_turn(trainings, progress)
            for training in trainings:
                training.finish()


def threads_of_each(at_once: Optional[int]) -> int:
    """Return torch's threads for each of so many trainings side by side on this machine; None for as many as fit."""
    return min(torch.get_num_threads(), max(1, processors_here() // (at_once or 1)))


def train_in_turn(trainings: Sequence[Training], progress: Progress) -> None:
    """Train all to their ends; the one farthest behind is next, so that equal totals mean strict turns.

    Args:
        trainings: the trainings that take turns.
        progress: the bar that counts updates.

    Raises:
        SystemExit: a signal asked for it; all are saved after the update under way, and the same command resumes.
    """
    with StopRequest().listening() as stop:
        for training in trainings:
            training.stop = stop
        _take_turns(trainings, progress)


def _take_turns(trainings: Sequence[Training], progress: Progress) -> None:
    for training in trainings:
        if not training.curve:
            training.validate()
    progress.unpause()  # else the time left would begin with that of these validations for every update
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
            behind.give_up()
        progress.update(behind.updates - before)
        code = behind.stop.agreed_code()
        if code:
            for training in trainings:
                training.save()
            print("stopped by a signal: all is saved, and the same command resumes", flush=True)
            raise SystemExit(code)
        if behind.is_due():
            behind.validate()
            behind.save()
            progress.unpause()
            *_, measure = list(behind.curve)[:3]  # the first behind updates and seconds
            progress.set_postfix_str(", ".join(f"{each.name} {each.curve[measure][-1]:.2f}" for each in trainings))


def train_alone(job: Job, open_training: Opening, threads: int) -> None:
    """Do one job in a process of its own, which may be the second to try it; its output goes to the job's log."""
    torch.set_num_threads(threads)
    job.folder.mkdir(parents=True, exist_ok=True)
    with file_lock(job.folder / ".lock"), output_to(job.folder / LOG):
        if job.result() is None:
            training = open_training(job)
            with Progress(disable=True) as progress:
                train_in_turn([training], progress)
            training.finish()


def _train_alone(
    jobs: Sequence[Job],
    open_training: Opening,
    progress: Progress,
    executor: Executor,
    threads: int,
) -> None:
    calls = {}
    for job in jobs:
        refuse_foreign(job.folder / LOG)  # the process that would fail has nowhere to say why
        calls[Call(train_alone, (job, open_training, threads))] = job
    before = progress.n
    for ended in run_calls(list(calls), executor):
        if ended is not None and ended.error is not None:
            job = calls[ended.call]
            log = job.folder / LOG
            why = f"{job}: {reason(ended.error)}; the last line of {log} is: {last_line(log)}"
            if not ended.is_tried_again:
                raise UserError(f"{why}. Rerun to resume")
            Progress.write(f"{why}. It is resumed")
        made = sum(job.updates_saved() for job in jobs)
        progress.update(before + made - progress.n)
