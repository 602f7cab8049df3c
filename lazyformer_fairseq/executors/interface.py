"""The common interface for running jobs in processes on this machine, on a Ray cluster, or under Slurm.

A job is a function call that stores its result in its own files, which are written atomically. The files therefore show
which jobs are done, no matter where they ran, and a job can be run again if its process is lost.
"""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional, Self

from lazyformer_fairseq.errors import UserError

LOOK_EVERY = 0.2  # seconds between two checks of the jobs
ATTEMPTS = 3  # maximum number of attempts at a job whose process is lost
UNLIMITED = 10**6  # number of concurrent jobs for a cluster with its own queue


@dataclass(frozen=True, eq=False)
class Call:
    """A job: a function call to be made in another process.

    Attributes:
        function: a module-level function, or a partial of one.
        arguments: its arguments, which must be picklable.
        folder: the working directory of the job on a cluster, to which paths may be relative.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    folder: str = field(default_factory=os.getcwd)


class LostError(Exception):
    """An error for a job that ended without a result because its process was killed or its machine was lost."""


@dataclass(frozen=True)
class JobResult:
    """The outcome of a job.

    Attributes:
        call: the job.
        error: the exception that its function raised, or a :class:`LostError`; None if the function returned.
        is_tried_again: whether the job was lost and will be restarted.
    """

    call: Call
    error: Optional[BaseException] = None
    is_tried_again: bool = False


class Executor(ABC):
    """The base class of executors, which run jobs in parallel.

    Attributes:
        is_here: whether the jobs run on this process's machine.
    """

    is_here = False

    @property
    @abstractmethod
    def free(self) -> int:
        """The number of jobs that could start now."""

    @abstractmethod
    def start(self, calls: Sequence[Call]) -> None:
        """Start jobs, at most as many as :attr:`free`."""

    @abstractmethod
    def wait(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call; if none have, first wait up to LOOK_EVERY seconds."""

    @abstractmethod
    def stop(self) -> None:
        """Stop all running jobs; new ones may be started afterwards."""

    def __enter__(self) -> Self:
        """Return the executor, which is stopped at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all running jobs."""
        self.stop()


def run_calls(calls: Sequence[Call], executor: Executor) -> Iterator[Optional[JobResult]]:
    """Run jobs, as many in parallel as the executor has room for; if interrupted, stop the running jobs.

    Args:
        calls: the jobs, in the order in which they are started.
        executor: the executor that runs them.

    Yields:
        The outcome of each job, or None for each check that finds no finished job. A lost job is restarted, up to
        :data:`ATTEMPTS` attempts in total, so it may have several outcomes.
    """
    waiting = list(calls)
    attempts: Counter[Call] = Counter()
    running = 0
    try:
        while waiting or running:
            ready = waiting[: executor.free]
            if ready:
                waiting = waiting[len(ready) :]
                executor.start(ready)
                attempts.update(ready)
                running += len(ready)
            all_ended = executor.wait()
            running -= len(all_ended)
            for ended in all_ended:
                if isinstance(ended.error, LostError) and attempts[ended.call] < ATTEMPTS:
                    waiting.append(ended.call)  # to the end of the queue, because its machine may be failing
                    ended = replace(ended, is_tried_again=True)  # noqa: PLW2901
                yield ended
            if not all_ended:
                yield None
    except BaseException:  # includes the GeneratorExit of a caller that stops iterating
        executor.stop()
        raise


def error_of(function: Callable[..., Any], arguments: Sequence[Any]) -> Optional[BaseException]:
    """Call a function in a job's process, and return the exception that it raises, or None.

    Exceptions other than a UserError or an OSError become a RuntimeError, because they may not survive pickling.
    """
    try:
        function(*arguments)
    except (UserError, OSError) as error:
        return error
    except BaseException as error:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return None


def reason(error: BaseException) -> str:
    """Return the reason for a job's failure, in one line."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    if isinstance(error, (LostError, RuntimeError)):
        return lines[0][:500]
    return f"{type(error).__name__}: {lines[-1][:500]}"
