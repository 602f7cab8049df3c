"""The queue: does every run of a grid once, whatever dies in between.

A run is finished when its result.json is there. That file is written last and whole, so the queue needs no memory of
its own: restarted, it takes what is not finished. Runs go to processes of this machine, or to a cluster's jobs.
"""

import math
import re
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from lazyformer_fairseq.errors import UserError, whole_number
from lazyformer_fairseq.executors.nvidia_smi import visible_gpus
from lazyformer_fairseq.executors.torch_builds import refuse_unfit_torch
from lazyformer_fairseq.executors.workers import Job, Workers, last_line, tail
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.finetuning import results
from lazyformer_fairseq.finetuning.grid import Grid, Run
from lazyformer_fairseq.finetuning.results import ATTEMPT, BEST, FAILED, LOG
from lazyformer_fairseq.finetuning.settings import GridSettings
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.in_place import refuse_foreign
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import run_lock

FINE_TUNE = "lazyformer_fairseq.finetuning.one_run:fine_tune"
TYPICAL = {"timeout_min": 24 * 60}


class ClusterJob(NamedTuple):
    job: Any

    def is_over(self) -> bool:
        return self.job.done()

    def failure(self) -> Optional[str]:
        """Why the job has failed, in a line."""
        try:
            error = self.job.exception()
        except Exception as lost:  # submitit raises one of several exceptions for a job without a result
            error = lost
        if error is None:
            return None
        last_line = (str(error).strip() or type(error).__name__).splitlines()[-1].strip(" -")
        return f"job {self.job.job_id}: {last_line[:300]}"


class Cluster:
    """An array of jobs, one run each.

    Args:
        kind: ``slurm``, or ``local`` for submitit's processes on this machine.
        folder: of submitit's own files and logs.
        options: submitit's parameters, as ``slurm_partition`` or ``timeout_min``.
        at_once: jobs of the array that run at the same time; for ``local``, processes.
        threads: of each job on a CPU.

    Raises:
        UserError: no submitit or no Slurm here, or an option that submitit does not have.
    """

    def __init__(self, kind: str, folder: Path, options: Mapping[str, str], at_once: Optional[int], threads: int = 1):
        refuse_without_extra("cluster", "--slurm")
        import submitit  # takes a second, which other commands need not spend

        try:
            self._executor = submitit.AutoExecutor(folder, cluster=kind)
            values = {}
            for name, value in options.items():
                number = whole_number(value)
                values[name] = value if number is None else number
            parallel = {"slurm_array_parallelism": at_once} if kind == "slurm" and at_once else {}
            self._executor.update_parameters(**{**TYPICAL, "cpus_per_task": threads, **parallel, **values})
        except (RuntimeError, NameError, TypeError, ValueError) as error:
            raise UserError(f"--slurm: {error}") from error
        self._threads = threads
        self.look_every = 5.0 if kind == "slurm" else 0.2  # a look at Slurm is a look at files of a network
        self._limit = at_once if kind == "local" else None
        self._jobs: list[ClusterJob] = []

    @property
    def free(self) -> int:
        """Runs that may be sent now: a cluster has a queue of its own."""
        return 10**6 if self._limit is None else self._limit - len(self._jobs)

    def start(self, runs: Sequence[tuple[Any]]) -> list[ClusterJob]:
        from lazyformer_fairseq.finetuning.one_run import fine_tune

        with self._executor.batch():
            sent = [self._executor.submit(fine_tune, run, self._threads) for (run,) in runs]
        self._jobs += map(ClusterJob, sent)
        return self._jobs[len(self._jobs) - len(runs) :]

    def release(self, job: ClusterJob) -> None:
        self._jobs.remove(job)

    def stop(self) -> None:
        """Cancels the jobs that are under way."""
        for job in self._jobs:
            job.job.cancel()


def choose_executor(given: GridSettings, name: str) -> Workers | Cluster:
    """Where runs go, from the command's options; UserError where these do not fit together.

    Args:
        name: of a cluster's jobs.
    """
    if not given.slurm:
        return Workers(given.workers, choose_gpus(given.gpus), given.threads, FINE_TUNE)
    options = {"name": name}
    for text in given.slurm:
        option, found, value = text.partition("=")
        if not found:
            raise UserError(f"--slurm {text}: give NAME=VALUE, as in slurm_partition=gpu")
        options[option] = value
    if shutil.which("sbatch") is None:
        raise UserError("--slurm: there is no sbatch here; start the command where jobs are submitted")
    return Cluster("slurm", given.output / "runs" / "jobs", options, given.workers, given.threads)


def choose_gpus(names: Optional[str]) -> list[str]:
    """The GPUs that ``--gpus`` names, all by default; none for the CPU. UserError where they are not there."""
    if names == "none":
        return []
    there = visible_gpus()
    if names and not there:
        raise UserError(f"--gpus {names}: nvidia-smi shows no GPU here; leave the option out to use the CPU")
    if there:
        refuse_unfit_torch(len(there))
    return [name.strip() for name in names.split(",")] if names else there


ATTEMPTS = 2
SHOW_EVERY = 1.0  # seconds


class RunQueue:
    """Runs a grid.

    Args:
        executor: where runs go.
        keep: checkpoints to keep: those of ``all`` runs, the ``best`` run's of a model and task, or ``none``.

    Attributes:
        results: of finished runs, by folder.
        failed: runs that failed for good, and why.
    """

    def __init__(self, grid: Grid, executor: Workers | Cluster, keep: str = "best"):
        self.grid, self.executor, self.keep = grid, executor, keep
        self.results: dict[Path, results.Run] = {}
        self.failed: dict[Run, str] = {}
        self._attempts: Counter[Path] = Counter()
        self._jobs: dict[Job | ClusterJob, Run] = {}
        self._waiting: list[Run] = []

    def run(self) -> None:
        """Runs everything that is not finished.

        Raises:
            UserError: a result of other settings is in the way, or another queue is at work on the folder.
            KeyboardInterrupt: after all processes were stopped.
        """
        self.grid.asked_before()  # refuses one of other tasks
        with run_lock(self.grid.output / "runs"):
            for run in sorted(self.grid.runs, key=lambda run: -run.work):  # leaves no long run for the end
                if (result := run.result()) is None:
                    refuse_foreign(run.folder / LOG)  # the process that would fail has nowhere to say why
                    self._waiting.append(run)
                    (run.folder / FAILED).unlink(missing_ok=True)
                else:
                    self.results[run.folder] = result
            self.grid.write()
            total = sum(run.work for run in self.grid.runs)
            done = total - sum(run.work for run in self._waiting)
            if self._waiting:
                log = self._waiting[0].folder / LOG
                at_once = min(self.executor.free, len(self._waiting))
                Progress.write(f"{len(self._waiting)} runs, {at_once} at a time; the first one's log is {log}")
            with Progress(
                total=total, initial=done, bar_format=_BAR, mininterval=0.5, miniters=0, smoothing=0.05
            ) as bar:
                self._show(bar, total)
                shown = 0.0
                try:
                    while self._waiting or self._jobs:
                        self._start_ready()
                        time.sleep(self.executor.look_every)
                        for job in [job for job in self._jobs if job.is_over()]:
                            self._finish(job)
                        if time.monotonic() - shown > SHOW_EVERY:
                            shown = time.monotonic()
                            self._show(bar, total)
                    self._show(bar, total)
                finally:
                    self.executor.stop()
            self._remove_checkpoints(self.grid.runs)

    def _start_ready(self) -> None:
        ready, self._waiting = self._waiting[: self.executor.free], self._waiting[self.executor.free :]
        for run, job in zip(ready, self.executor.start([(run,) for run in ready]) if ready else (), strict=True):
            self._attempts[run.folder] += 1
            self._jobs[job] = run

    def _finish(self, job: Job | ClusterJob) -> None:
        run = self._jobs.pop(job)
        failure = job.failure()
        self.executor.release(job)
        result = run.result()
        if result is not None:
            self.results[run.folder] = result
            metric, baseline = run.task.selecting_metric, next(iter(result.baseline.values()))
            Progress.write(
                f"[{len(self.results)}/{len(self.grid.runs)}] {run.name}: {metric} "
                f"{'/'.join(f'{values[metric]:.4f}' for values in result.metrics.values())} at epoch "
                f"{result.best_epoch} of {run.epochs} (baseline {baseline[metric]:.4f}), {result.seconds:.0f} s"
            )
            self._remove_checkpoints(run.rivals)
            return
        log = run.folder / LOG
        message = f"{failure or 'ended without a result'}: {last_line(log)}"
        if self._attempts[run.folder] < ATTEMPTS:
            Progress.write(f"{run.name}: failed, is tried once more ({message})")
            self._waiting.append(run)
            return
        self.failed[run] = message
        write_json(run.folder / FAILED, {"attempts": ATTEMPTS, "message": message, "log": str(log)})
        Progress.write(f"{run.name}: FAILED ({message}); see {log}")

    def _best(self, runs: Sequence[Run]) -> Optional[Run]:
        """The first finished run with the highest selecting metric, on the first development file; nan is none."""
        found = {run: self.results[run.folder] for run in runs if run.folder in self.results}
        scores = {run: next(iter(each.metrics.values()))[run.task.selecting_metric] for run, each in found.items()}
        return max((run for run in scores if not math.isnan(scores[run])), key=scores.__getitem__, default=None)

    def _remove_checkpoints(self, runs: Sequence[Run]) -> None:
        """Removes those of finished runs, except the ones to keep."""
        for run in runs if self.keep != "all" else ():
            is_kept = self.keep == "best" and self._best(run.rivals) is run
            if run.folder in self.results and not is_kept:
                (run.folder / BEST).unlink(missing_ok=True)
                shutil.rmtree(run.folder / "tokenizer", ignore_errors=True)

    def _show(self, bar: Progress, total: float) -> None:
        left = sum(run.work for run in self._waiting)
        left += sum(run.work * (1 - epochs_done(run.folder / LOG) / run.epochs) for run in self._jobs.values())
        failed = f", {len(self.failed)} FAILED" if self.failed else ""
        text = f"{len(self.results)} of {len(self.grid.runs)} runs finished, {len(self._jobs)} under way{failed}"
        bar.set_description_str(text, refresh=False)
        bar.update(total - left - bar.n)


_BAR = "{desc} {percentage:3.0f}% |{bar:20}| {elapsed} since the start, {remaining} left"


def epochs_done(log: Path) -> float:
    """Epochs of a run's present attempt, from the end of its log."""
    text = tail(log)
    places = _PLACE.findall(text[text.rfind(ATTEMPT) + 1 :])
    if not places:
        return 0.0
    epoch, batch, batches = places[-1]
    return int(epoch) if not batches else int(epoch) - 1 + int(batch) / int(batches)


# Within an epoch fairseq logs "epoch 003:    100 / 12272 loss=...", at its end "epoch 003 | valid on ...".
_PLACE = re.compile(r"epoch (\d+)(?::\s+(\d+) / (\d+)| \| valid on)")
