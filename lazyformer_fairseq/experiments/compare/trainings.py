"""The jobs of a comparison, done: update by update in turn in this process, or each alone in one of its own."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Optional

import torch
from tqdm import tqdm

from lazyformer_fairseq.devices.nvidia_smi import visible_gpus
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.compare.jobs import LOG, RESULT, Job
from lazyformer_fairseq.experiments.compare.settings import CompareSettings
from lazyformer_fairseq.experiments.compare.tasks.interface import ComparedTask
from lazyformer_fairseq.experiments.curve_training import CurveTraining, train_in_turn
from lazyformer_fairseq.fairseq_plugin.reliability.installing import start_run
from lazyformer_fairseq.finetuning.run.one_run import output_to
from lazyformer_fairseq.finetuning.run.queue import last_line
from lazyformer_fairseq.finetuning.run.workers import Workers
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import file_lock

POINTS_LEAN = 1.5  # towards the start of a curve, where it is steep; 1 for equal steps


def points(total: int, count: int) -> list[int]:
    """Updates at which a training of `total` is validated: `count` of them, the end among them, most of them early."""
    return sorted({max(1, round(total * (number / count) ** POINTS_LEAN)) for number in range(1, count + 1)})


class JobTraining(CurveTraining):
    """The training of a job."""

    def __init__(self, compared: ComparedTask, job: Job):
        command = compared.command(job.contestant, job.seed, job.rate, job.updates)
        super().__init__(job.entry, command, job.folder, job.updates)
        self.compared = compared
        self.job = job
        self.points = frozenset(points(job.updates, compared.settings.points))
        self.tokens: list[int] = self._kept("tokens", [])[: self.updates]
        vocabulary = len(self.task.source_dictionary)
        self.flops_of_update = compared.flops_of_update(job.contestant, vocabulary)

    def update(self) -> int:
        self.tokens.append(super().update())
        return self.tokens[-1]

    def measure(self) -> Mapping[str, float]:
        found = self.compared.measure(self.trainer.model, self.task)
        return {**found, "tokens": sum(self.tokens), "flops": self.updates * self.flops_of_update}

    def is_due(self) -> bool:
        return self.updates in self.points

    def save(self, with_optimizer: bool = True) -> None:
        self._keep("tokens", self.tokens)
        super().save(with_optimizer)

    def finish(self) -> None:
        """Writes the result, and removes the optimizer's part of the checkpoint from the disk."""
        result = {
            "rate": self.job.rate,
            "curve": self.curve,
            "final": self.compared.final(self.trainer.model, self.task),
            "seconds": self.seconds,
        }
        write_json(self.folder / RESULT, result)
        self.save(with_optimizer=False)


def train(compared: ComparedTask, jobs: Sequence[Job], progress: tqdm, workers: int = 1) -> None:
    """Does all jobs that have no result yet; those of a seed together.

    Args:
        progress: counts updates.
        workers: processes at a time where models train alone.

    Raises:
        UserError: a process has died; names its log.
    """
    unfinished = list(dict.fromkeys(job for job in jobs if job.result() is None))
    progress.update(sum(job.updates for job in {*jobs} - {*unfinished}))
    if not compared.settings.in_turn:
        _train_alone(compared.settings, unfinished, progress, workers)
        return
    for seed in dict.fromkeys(job.seed for job in unfinished):
        trainings = [JobTraining(compared, job) for job in unfinished if job.seed == seed]
        progress.update(sum(training.updates for training in trainings))
        train_in_turn(trainings, progress)
        for training in trainings:
            training.finish()


def train_alone(job: Job, settings: CompareSettings, threads: int) -> None:
    """Does one job in a process of its own, which it may be the second to try; its output goes to the job's log."""
    start_run()
    torch.set_num_threads(threads)
    job.folder.mkdir(parents=True, exist_ok=True)
    with file_lock(job.folder / ".lock"), output_to(job.folder / LOG):
        if job.result() is None:
            training = JobTraining(settings.row.load(settings), job)
            with tqdm(total=job.updates, initial=training.updates, disable=True) as progress:
                train_in_turn([training], progress)
            training.finish()


def count_workers(settings: CompareSettings, given: Optional[int]) -> int:
    """Processes at a time."""
    if settings.in_turn:
        return 1
    return given or (len(visible_gpus()) if settings.device == "cuda" else 1)


def _train_alone(settings: CompareSettings, jobs: Sequence[Job], progress: tqdm, workers: int) -> None:
    gpus = visible_gpus() if settings.device == "cuda" else []
    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // workers)
    executor = Workers(workers, gpus, threads, "lazyformer_fairseq.experiments.compare.trainings:train_alone")
    waiting, under_way, seen = list(jobs), {}, {}
    try:
        while waiting or under_way:
            while waiting and executor.free:
                job = waiting.pop(0)
                (process,) = executor.start([(job, settings)])
                under_way[process] = job
            time.sleep(executor.look_every)
            for process, job in list(under_way.items()):
                made = job.updates if process.is_over() else job.updates_saved()
                progress.update(made - seen.get(job, 0))
                seen[job] = made
                if process.is_over():
                    del under_way[process]
                    _refuse_failure(job, process.failure())
                    executor.release(process)
    finally:
        executor.stop()


def _refuse_failure(job: Job, failure: Optional[str]) -> None:
    if job.result() is None:
        log = job.folder / LOG
        raise UserError(
            f"{job.name}: {failure or 'ended without a result'}; the last line of {log} is: {last_line(log)}. Rerun to "
            "resume"
        )
