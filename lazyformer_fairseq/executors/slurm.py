"""The executor that runs jobs as Slurm job arrays, submitted with submitit."""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError, whole_number
from lazyformer_fairseq.executors.interface import LOOK_EVERY, UNLIMITED, Call, Executor, JobResult, LostError, error_of
from lazyformer_fairseq.extras import refuse_without_extra

TYPICAL = {"timeout_min": 24 * 60}
LARGEST_ARRAY = 1000  # jobs; Slurm's own limit is 1,001 unless its administrator sets another
LOOK_AT_SLURM_EVERY = 5.0  # seconds; each check reads files over the network


class Slurm(Executor):
    """The executor that runs jobs as Slurm job arrays.

    Args:
        kind: ``slurm``, or ``local`` for processes that submitit starts on this machine.
        folder: folder for submitit's files and logs.
        options: submitit's parameters, such as ``slurm_partition`` or ``timeout_min``.
        at_once: maximum number of concurrent jobs per array or, for ``local``, of concurrent processes.

    Raises:
        UserError: submitit is not installed, there is no Slurm here, or an option is unknown to submitit.
    """

    def __init__(self, kind: str, folder: Path, options: Mapping[str, str], at_once: Optional[int] = None):
        refuse_without_extra("cluster", "--executor slurm")
        import submitit  # takes a second to import, and is not needed by other commands

        logging.getLogger("submitit").setLevel(logging.ERROR)  # without Slurm accounting, it warns at every check

        values: dict[str, Any] = dict(TYPICAL)
        if kind == "slurm" and at_once:
            values["slurm_array_parallelism"] = at_once
        for name, text in options.items():
            values[name] = text
            if whole_number(text) is not None:
                values[name] = int(text)
        try:
            self._executor = submitit.AutoExecutor(folder, cluster=kind)
            self._executor.update_parameters(**values)
        except (RuntimeError, NameError, TypeError, ValueError) as error:
            raise UserError(f"--slurm: {error}") from error
        self._look_every = LOOK_AT_SLURM_EVERY if kind == "slurm" else LOOK_EVERY
        self._at_once = at_once if kind == "local" else None
        self._calls: dict[Any, Call] = {}

    @property
    def free(self) -> int:
        """The number of jobs that may be submitted now; practically unlimited, because Slurm has its own queue."""
        return (self._at_once or UNLIMITED) - len(self._calls)

    def start(self, calls: Sequence[Call]) -> None:
        """Submit jobs as job arrays."""
        for begin in range(0, len(calls), LARGEST_ARRAY):
            array = calls[begin : begin + LARGEST_ARRAY]
            with self._executor.batch():
                sent = [self._executor.submit(error_of, call.function, call.arguments) for call in array]
            self._calls |= zip(sent, array, strict=True)

    def wait(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call."""
        over = [job for job in self._calls if job.done()]
        if not over:
            time.sleep(self._look_every)
        return [JobResult(self._calls.pop(job), self._error_of(job)) for job in over]

    def _error_of(self, job: Any) -> Optional[BaseException]:
        try:
            return job.result()
        except Exception as lost:  # submitit raises one of several exceptions for a job without a result
            lines = str(lost).strip().splitlines() or [type(lost).__name__]
            return LostError(f"job {job.job_id}: {lines[-1].strip(' -')[:300]}")

    def stop(self) -> None:
        """Cancel all jobs that have not ended."""
        for job in self._calls:
            job.cancel()
        self._calls = {}
