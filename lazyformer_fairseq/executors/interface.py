"""The interface of the places where jobs run: processes of this machine, a Ray cluster, and Slurm.

A job is a call of a function that keeps its result in files of its own, each whole or not at all. So the disk says
which jobs are done, whoever did them, and a job whose process was lost is done again.
"""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional, Self

from lazyformer_fairseq.errors import UserError

LOOK_EVERY = 0.2  # seconds between two looks at jobs
ATTEMPTS = 3  # of a job whose process was lost
UNLIMITED = 10**6  # jobs, where a cluster has a queue of its own


@dataclass(frozen=True, eq=False)
class Call:
    """A job: a call of a function in another process.

    Attributes:
        function: a function of a module, or a partial of one.
        arguments: its arguments; they travel to the process by pickle.
        folder: the working folder that it begins in on a cluster; relative paths start there.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    folder: str = field(default_factory=os.getcwd)


class LostError(Exception):
    """The process of a job has ended without a word: it was killed, or its machine was lost."""


@dataclass(frozen=True)
class Ended:
    """The end of a job.

    Attributes:
        call: the job.
        error: what its function raised, or a :class:`LostError`; None where it returned.
        is_tried_again: whether the job, which was lost, is started once more.
    """

    call: Call
    error: Optional[BaseException] = None
    is_tried_again: bool = False


class Executor(ABC):
    """A place where jobs run side by side.

    Attributes:
        is_here: whether its jobs run on this machine, as this process does.
    """

    is_here = False

    @property
    @abstractmethod
    def free(self) -> int:
        """The number of jobs that could start now."""

    @abstractmethod
    def start(self, calls: Sequence[Call]) -> None:
        """Start jobs; no more than are free."""

    @abstractmethod
    def wait(self) -> list[Ended]:
        """Return the jobs that have ended since the last call, after :data:`LOOK_EVERY` seconds at the latest."""

    @abstractmethod
    def stop(self) -> None:
        """End all jobs that are under way; others may start afterwards."""

    def __enter__(self) -> Self:
        """Return itself; leaving the block stops it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()


def run_calls(calls: Sequence[Call], executor: Executor) -> Iterator[Optional[Ended]]:
    """Run jobs, as many at a time as the executor has room for; whatever happens, no job goes on afterwards.

    Args:
        calls: the jobs, in the order in which they start.
        executor: the place where they run.

    Yields:
        The end of each job; None at each look that found none. A job that was lost is started again, up to
        :data:`ATTEMPTS` times in all, and so may end several times.
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
                    waiting.append(ended.call)  # not at once: its machine may be about to be given up
                    ended = replace(ended, is_tried_again=True)  # noqa: PLW2901
                yield ended
            if not all_ended:
                yield None
    except BaseException:  # the reader of this iterator has gone, too
        executor.stop()
        raise


def error_of(function: Callable[..., Any], arguments: Sequence[Any]) -> Optional[BaseException]:
    """Call a function in the process of a job, and return the exception that it raises, or None.

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
    """Return why a job failed, in a line."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    if isinstance(error, (LostError, RuntimeError)):
        return lines[0][:500]
    return f"{type(error).__name__}: {lines[-1][:500]}"
