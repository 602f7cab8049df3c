"""Processes that work side by side, each on a GPU or on the processor; what their logs end with."""

import multiprocessing
import os
import pkgutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Optional, Union

from lazyformer_fairseq.child_process import end_with_parent, interrupts_held_back

TAIL = 16384  # bytes of a log


@dataclass(frozen=True, eq=False)
class Job:
    """A process under way.

    Attributes:
        process: the process.
        gpu: its GPU, as CUDA_VISIBLE_DEVICES names it; None for the CPU.
    """

    process: BaseProcess
    gpu: Optional[str]

    def is_over(self) -> bool:
        """Return whether the process has ended."""
        return not self.process.is_alive()

    def failure(self) -> Optional[str]:
        """Return how the process ended if it failed, else None; the log may say more."""
        code = self.process.exitcode
        if not code:
            return None
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"


class Workers:
    """A number of processes at a time.

    Args:
        count: how many processes; None for one per GPU, or one per core.
        gpus: as CUDA_VISIBLE_DEVICES names them; empty for the CPU. More processes than GPUs share them in turn.
        threads: threads of each process on a CPU.
        work: what a process does, as MODULE:FUNCTION; it is given the arguments of its job, then the threads.
    """

    look_every = 0.1  # seconds between two looks at jobs

    def __init__(self, count: Optional[int], gpus: Sequence[str], threads: int, work: str):
        self.count = count or len(gpus) or max(1, len(os.sched_getaffinity(0)) // threads)
        self._threads = threads
        self._work = work
        self._free: list[Optional[str]] = [None] * self.count
        if gpus:
            self._free = [gpus[number % len(gpus)] for number in range(self.count)]
        self._jobs: list[Job] = []
        self._context: Union[SpawnContext, ForkServerContext] = multiprocessing.get_context("spawn")
        if not gpus:
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload([work.partition(":")[0], "torch._dynamo"])  # for optimizers

    @property
    def free(self) -> int:
        """The number of jobs that could start now."""
        return len(self._free)

    def start(self, given: Sequence[tuple[Any, ...]]) -> list[Job]:
        """Start jobs, each with the arguments of its function; no more than are free."""
        started = []
        for arguments in given:
            gpu = self._free.pop(0)
            process = self._context.Process(target=_work, args=(self._work, (*arguments, self._threads)))
            environment = {"OMP_NUM_THREADS": str(self._threads), "CUDA_VISIBLE_DEVICES": gpu or ""}
            with _environment(environment), interrupts_held_back():
                process.start()
            started.append(Job(process, gpu))
            self._jobs.append(started[-1])
        return started

    def release(self, job: Job) -> None:
        """Give the place of a job that is over to the next one."""
        job.process.join()
        self._jobs.remove(job)
        self._free.append(job.gpu)

    def stop(self) -> None:
        """End all jobs, and wait until they are gone."""
        for job in self._jobs:
            job.process.kill()
        for job in self._jobs:
            job.process.join()


def _work(work: str, arguments: tuple[Any, ...]) -> None:
    """Run a job in the new process."""
    end_with_parent()
    try:
        pkgutil.resolve_name(work)(*arguments)
    except BaseException:  # the log has it
        os._exit(1)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set the values for processes started meanwhile."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def tail(log: Path) -> str:
    """Return the end of a log, in which whatever stopped its run is; "" where it cannot be read, as of a pipe."""
    if not log.is_file():
        return ""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(log: Path) -> str:
    """Return the last line of a log, up to 500 characters."""
    lines = tail(log).strip().splitlines()
    if lines:
        return lines[-1][:500]
    return "its log is empty"
