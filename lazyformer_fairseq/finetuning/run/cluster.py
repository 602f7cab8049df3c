"""Runs as jobs of a cluster: all that are ready go out as one Slurm array, through submitit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.finetuning.run.grid import Run

TYPICAL = {"timeout_min": 24 * 60}


class ClusterJob:
    def __init__(self, job):
        self.job = job

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
        refuse_without_extra("cluster", f"--executor {kind}")
        import submitit  # takes a second, which other commands need not spend

        try:
            self._executor = submitit.AutoExecutor(folder, cluster=kind)
            values = {name: _number(value) for name, value in options.items()}
            parallel = {"slurm_array_parallelism": at_once} if kind == "slurm" and at_once else {}
            self._executor.update_parameters(**{**TYPICAL, "cpus_per_task": threads, **parallel, **values})
        except (RuntimeError, NameError, TypeError, ValueError) as error:
            raise UserError(f"--executor {kind}: {error}") from error
        self._threads = threads
        self.look_every = 5.0 if kind == "slurm" else 0.2  # a look at Slurm is a look at files of a network
        self._limit = at_once if kind == "local" else None
        self._jobs: list[ClusterJob] = []

    @property
    def free(self) -> int:
        """Runs that may be sent now: a cluster has a queue of its own."""
        return 10**6 if self._limit is None else self._limit - len(self._jobs)

    def start(self, runs: Sequence[tuple[Run, Path]]) -> list[ClusterJob]:
        from lazyformer_fairseq.finetuning.run.one_run import fine_tune

        with self._executor.batch():
            sent = [self._executor.submit(fine_tune, run, start, self._threads) for run, start in runs]
        jobs = [ClusterJob(job) for job in sent]
        self._jobs += jobs
        return jobs

    def release(self, job: ClusterJob) -> None:
        self._jobs.remove(job)

    def stop(self) -> None:
        """Cancels the jobs that are under way."""
        for job in self._jobs:
            job.job.cancel()


def _number(value: str):
    return int(value) if value.isdigit() else value
