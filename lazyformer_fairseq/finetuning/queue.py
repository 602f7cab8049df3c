"""The queue: does every run of a grid once, whatever dies in between.

A run is finished when its result.json is there. That file is written last and whole, so the queue needs no memory of
its own: restarted, it takes what is not finished. Runs go to processes of this machine, or to a cluster's jobs.
"""

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.cluster import Cluster, ClusterJob
from lazyformer_fairseq.executors.nvidia_smi import visible_gpus
from lazyformer_fairseq.executors.torch_builds import refuse_unfit_torch
from lazyformer_fairseq.executors.workers import Job, Workers, last_line
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.finetuning import results
from lazyformer_fairseq.finetuning.grid import Grid, Run
from lazyformer_fairseq.finetuning.results import BEST, FAILED, LOG
from lazyformer_fairseq.finetuning.settings import GridSettings
from lazyformer_fairseq.finetuning.training import fine_tune
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.in_place import refuse_foreign
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import run_lock

FINE_TUNE = f"{fine_tune.__module__}:{fine_tune.__name__}"
ATTEMPTS = 2


def choose_executor(given: GridSettings, name: str) -> Workers | Cluster:
    """Return where runs go, from the command's options.

    Args:
        given: the options.
        name: the name of a cluster's jobs.

    Raises:
        UserError: the options do not fit together.
    """
    if not given.slurm:
        return Workers(given.workers, choose_gpus(given.gpus), given.threads, FINE_TUNE)
    refuse_without_extra("cluster", "--slurm")
    options = {"name": name, "cpus_per_task": str(given.threads)}
    for text in given.slurm:
        option, found, value = text.partition("=")
        if not found:
            raise UserError(f"--slurm {text}: give NAME=VALUE, as in slurm_partition=gpu")
        options[option] = value
    if shutil.which("sbatch") is None:
        raise UserError("--slurm: there is no sbatch here; start the command where jobs are submitted")
    return Cluster(
        "slurm",
        given.output / "runs" / "jobs",
        options=options,
        at_once=given.workers,
        work=partial(fine_tune, threads=given.threads),
    )


def choose_gpus(names: Optional[str]) -> list[str]:
    """Return the GPUs that ``--gpus`` names, all by default; none for the CPU.

    Raises:
        UserError: they are not there.
    """
    if names == "none":
        return []
    there = visible_gpus()
    if names and not there:
        raise UserError(f"--gpus {names}: nvidia-smi shows no GPU here; leave the option out to use the CPU")
    if there:
        refuse_unfit_torch(len(there))
    if names:
        return [name.strip() for name in names.split(",")]
    return there


class RunQueue:
    """Runs a grid.

    Args:
        grid: the grid.
        executor: the place that runs go to.
        keep: checkpoints to keep: those of ``all`` runs, the ``best`` run's of a model and task, or ``none``.

    Attributes:
        results: the results of finished runs, by folder.
        failed: runs that failed for good, and why.
    """

    def __init__(self, grid: Grid, executor: Workers | Cluster, keep: str = "best"):
        self.grid = grid
        self.executor = executor
        self.keep = keep
        self.results: dict[Path, results.Run] = {}
        self.failed: dict[Run, str] = {}
        self._attempts: Counter[Path] = Counter()
        self._jobs: dict[Job | ClusterJob, Run] = {}
        self._waiting: list[Run] = []

    def run(self) -> None:
        """Run everything that is not finished.

        Raises:
            UserError: a result of other settings is in the way, or another queue is at work on the folder.
            KeyboardInterrupt: after all processes were stopped.
        """
        self.grid.asked_before()  # refuses one of other tasks
        with run_lock(self.grid.output / "runs"):
            self._sort_runs()
            self.grid.write()
            if self._waiting:
                log = self._waiting[0].folder / LOG
                at_once = min(self.executor.free, len(self._waiting))
                Progress.write(f"{len(self._waiting)} runs, {at_once} at a time; the first one's log is {log}")
            with Progress(total=len(self.grid.runs), initial=len(self.results), desc="runs", unit=" runs") as bar:
                try:
                    while self._waiting or self._jobs:
                        self._start_ready()
                        time.sleep(self.executor.look_every)
                        for job in [job for job in self._jobs if job.is_over()]:
                            self._finish(job)
                        bar.update(len(self.results) + len(self.failed) - bar.n)
                finally:
                    self.executor.stop()
            self._remove_checkpoints(self.grid.runs)

    def _sort_runs(self) -> None:
        """Find out which runs are finished, and which wait: the largest first, so that no long run is left for last."""
        for run in sorted(self.grid.runs, key=_work, reverse=True):
            result = run.result()
            if result is not None:
                self.results[run.folder] = result
                continue
            refuse_foreign(run.folder / LOG)  # the process that would fail has nowhere to say why
            (run.folder / FAILED).unlink(missing_ok=True)
            self._waiting.append(run)

    def _start_ready(self) -> None:
        free = self.executor.free
        ready = self._waiting[:free]
        if not ready:
            return
        self._waiting = self._waiting[free:]
        for run, job in zip(ready, self.executor.start([(run,) for run in ready]), strict=True):
            self._attempts[run.folder] += 1
            self._jobs[job] = run

    def _finish(self, job: Job | ClusterJob) -> None:
        run = self._jobs.pop(job)
        failure = job.failure() or "ended without a result"
        self.executor.release(job)
        result = run.result()
        if result is not None:
            self.results[run.folder] = result
            metric = run.task.selecting_metric
            scores = "/".join(f"{values[metric]:.4f}" for values in result.metrics.values())
            baseline = next(iter(result.baseline.values()))
            Progress.write(
                f"[{len(self.results)}/{len(self.grid.runs)}] {run.name}: {metric} {scores} at epoch "
                f"{result.best_epoch} of {run.epochs} (baseline {baseline[metric]:.4f}), {result.seconds:.0f} s"
            )
            self._remove_checkpoints(run.rivals)
            return

        log = run.folder / LOG
        message = f"{failure}: {last_line(log)}"
        if self._attempts[run.folder] < ATTEMPTS:
            Progress.write(f"{run.name}: failed, is tried once more ({message})")
            self._waiting.append(run)
            return
        self.failed[run] = message
        write_json(run.folder / FAILED, {"attempts": ATTEMPTS, "message": message, "log": str(log)})
        Progress.write(f"{run.name}: FAILED ({message}); see {log}")

    def _remove_checkpoints(self, runs: Sequence[Run]) -> None:
        """Remove those of finished runs, except the ones to keep."""
        if self.keep == "all":
            return
        for run in runs:
            is_kept = self.keep == "best" and self._is_best(run)
            if run.folder in self.results and not is_kept:
                (run.folder / BEST).unlink(missing_ok=True)
                shutil.rmtree(run.folder / "tokenizer", ignore_errors=True)

    def _is_best(self, run: Run) -> bool:
        """Return whether a run is the best finished one of its model and task; of equal ones the first."""
        finished = [self.results[each.folder] for each in run.rivals if each.folder in self.results]
        best = results.TaskResults(run.task, finished, failed=[], missing=[]).best
        return bool(best) and best[0].folder == run.folder


def _work(run: Run) -> float:
    """Return the work of a run, in tokens times parameters."""
    rows, tokens = run.data.size_of("train")
    return run.epochs * tokens * run.train_rows / rows * run.model.parameters
