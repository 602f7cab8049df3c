"""Processes that work side by side, each on a GPU or on the processor; what their logs end with."""

import multiprocessing
import os
import pkgutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Optional

from lazyformer_fairseq.child_process import end_with_parent, interrupts_held_back

TAIL = 16384  # bytes of a log


class Job(NamedTuple):
    """A run under way."""

    process: BaseProcess
    place: Optional[str]

    def is_over(self) -> bool:
        """Return whether the process has ended."""
        return not self.process.is_alive()

    def failure(self) -> Optional[str]:
        """How the process ended if it failed; the log may have more."""
        code = self.process.exitcode
        if not code:
            return None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Workers:
    """So many processes at a time.

    Args:
        count: of processes; None for one per GPU, or one per core.
        gpus: as CUDA_VISIBLE_DEVICES names them; empty for the CPU. More processes than GPUs share them in turn.
        threads: of each process on a CPU.
        work: what a process does, as MODULE:FUNCTION: a run's arguments, then the number of threads, are given to it.
    """

    look_every = 0.1  # seconds between two looks at jobs

    def __init__(self, count: Optional[int], gpus: Sequence[str], threads: int, work: str):
        self.count = count or len(gpus) or max(1, len(os.sched_getaffinity(0)) // threads)
        self._threads, self._work = threads, work
        self._free = [gpus[number % len(gpus)] if gpus else None for number in range(self.count)]
        self._jobs: list[Job] = []
        self._context = multiprocessing.get_context("spawn" if gpus else "forkserver")
        if not gpus:
            self._context.set_forkserver_preload([work.partition(":")[0], "torch._dynamo"])  # for optimizers

    @property
    def free(self) -> int:
        """Runs that could start now."""
        return len(self._free)

    def start(self, runs: Sequence[tuple[Any, ...]]) -> list[Job]:
        """Starts runs, each with what its function is given beside it; no more than are free."""
        for run, *given in runs:
            place = self._free.pop(0)
            arguments = (self._work, (run, *given, self._threads))
            process = self._context.Process(target=_work, args=arguments, name=run.name)
            environment = {"OMP_NUM_THREADS": str(self._threads), "CUDA_VISIBLE_DEVICES": place or ""}
            with _environment(environment), interrupts_held_back():
                process.start()
            self._jobs.append(Job(process, place))
        return self._jobs[len(self._jobs) - len(runs) :]

    def release(self, job: Job) -> None:
        """Gives the place of a job that is over to the next one."""
        job.process.join()
        self._jobs.remove(job)
        self._free.append(job.place)

    def stop(self) -> None:
        """Ends all jobs, and waits until they are gone."""
        for job in self._jobs:
            job.process.kill()
        for job in self._jobs:
            job.process.join()


def _work(work: str, arguments: tuple[Any, ...]) -> None:
    """Runs in the new process."""
    end_with_parent()
    try:
        pkgutil.resolve_name(work)(*arguments)
    except BaseException:  # the log has it
        os._exit(1)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets the values for processes started meanwhile."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def tail(log: Path) -> str:
    """The end of a log, in which whatever stopped its run is; "" where it cannot be read, as of a pipe."""
    if not log.is_file():
        return ""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(log: Path) -> str:
    """Return the last line of a log, for a message."""
    lines = tail(log).strip().splitlines()
    return lines[-1][:500] if lines else "its log is empty"
