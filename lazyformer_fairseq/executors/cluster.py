"""Jobs of a cluster, sent by submitit; each is a call of one function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError, whole_number

TYPICAL = {"timeout_min": 24 * 60}
UNLIMITED = 10**6  # jobs


@dataclass(frozen=True)
class ClusterJob:
    """A job under way.

    Attributes:
        job: submitit's.
    """

    job: Any

    def is_over(self) -> bool:
        """Return whether the job has ended."""
        return self.job.done()

    def failure(self) -> Optional[str]:
        """Return why the job has failed, in a line; None where it has not."""
        try:
            error = self.job.exception()
        except Exception as lost:  # submitit raises one of several exceptions for a job without a result
            error = lost
        if error is None:
            return None
        last_line = (str(error).strip() or type(error).__name__).splitlines()[-1].strip(" -")
        return f"job {self.job.job_id}: {last_line[:300]}"


class Cluster:
    """An array of jobs.

    Args:
        where: ``slurm``, or ``local`` for submitit's processes on this machine.
        folder: folder of submitit's own files and logs.
        options: submitit's parameters, such as ``slurm_partition`` or ``timeout_min``.
        at_once: jobs of the array that run at the same time; for ``local``, processes.
        work: what a job does, a function of what it is given.

    Raises:
        UserError: there is no Slurm here, or an option is unknown to submitit.
    """

    def __init__(
        self,
        where: str,
        folder: Path,
        *,
        options: Mapping[str, str],
        at_once: Optional[int],
        work: Callable[..., Any],
    ):
        import submitit  # takes a second, which other commands need not spend

        values: dict[str, Any] = dict(TYPICAL)
        if where == "slurm" and at_once:
            values["slurm_array_parallelism"] = at_once
        for name, text in options.items():
            values[name] = text
            if whole_number(text) is not None:
                values[name] = int(text)
        try:
            self._executor = submitit.AutoExecutor(folder, cluster=where)
            self._executor.update_parameters(**values)
        except (RuntimeError, NameError, TypeError, ValueError) as error:
            raise UserError(f"--slurm: {error}") from error
        self.look_every = 5.0 if where == "slurm" else 0.2  # a look at Slurm is a look at files of a network
        self._limit = None
        if where == "local":
            self._limit = at_once
        self._work = work
        self._jobs: list[ClusterJob] = []

    @property
    def free(self) -> int:
        """The number of jobs that may be sent now: Slurm has a queue of its own."""
        if self._limit is None:
            return UNLIMITED
        return self._limit - len(self._jobs)

    def start(self, given: Sequence[tuple[Any, ...]]) -> list[ClusterJob]:
        """Send jobs, each with the arguments of its function."""
        with self._executor.batch():
            sent = [self._executor.submit(self._work, *arguments) for arguments in given]
        jobs = [ClusterJob(job) for job in sent]
        self._jobs += jobs
        return jobs

    def release(self, job: ClusterJob) -> None:
        """Forget a job that is over."""
        self._jobs.remove(job)

    def stop(self) -> None:
        """Cancel the jobs that are under way."""
        for job in self._jobs:
            job.job.cancel()
