"""The executor that runs jobs in processes on this machine, each on a GPU or on the CPU."""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Optional, Union

from lazyformer_fairseq.child_process import end_with_parent, interrupts_held_back
from lazyformer_fairseq.executors.interface import LOOK_EVERY, Call, Executor, JobResult, LostError, error_of


def processors_here() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, eq=False)
class Worker:
    """A worker process, and our end of the pipe to it."""

    process: BaseProcess
    pipe: connection.Connection

    def close(self) -> str:
        """Close the pipe, wait for the process to end, and return a description of how it ended."""
        self.pipe.close()
        self.process.join()
        code = self.process.exitcode or 0
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"


@dataclass(eq=False)
class Slot:
    """A slot for one process.

    Attributes:
        gpu: the process's GPU, as in CUDA_VISIBLE_DEVICES; "" for the CPU.
        worker: the process, if any.
        call: the job that it is running, if any.
    """

    gpu: str = ""
    worker: Optional[Worker] = None
    call: Optional[Call] = None


class Local(Executor):
    """The executor that runs jobs in processes on this machine.

    Args:
        count: maximum number of processes; None for one per GPU or, without GPUs, as many as the cores allow.
        gpus: the GPUs, as in CUDA_VISIBLE_DEVICES; empty for the CPU. If there are more processes than GPUs, they share
            them.
        threads: number of CPU threads per process.
        preload: modules that are already imported when a process starts; used only without GPUs.
        keeps_processes: whether a process is reused for further jobs. Otherwise each job gets a new process, so that
            nothing remains in memory or on the GPU.
    """

    is_here = True

    def __init__(
        self,
        count: Optional[int] = None,
        gpus: Sequence[str] = (),
        threads: int = 1,
        preload: Sequence[str] = (),
        keeps_processes: bool = False,
    ):
        self.count = count or len(gpus) or max(1, processors_here() // threads)
        self._environment = {"OMP_NUM_THREADS": str(threads)}
        self._keeps_processes = keeps_processes
        self._places = [Slot() for _ in range(self.count)]
        self._context: Union[SpawnContext, ForkServerContext] = multiprocessing.get_context("spawn")
        for number, place in enumerate(self._places):
            if gpus:
                place.gpu = gpus[number % len(gpus)]
        if not gpus:
            with _environment({**self._environment, "CUDA_VISIBLE_DEVICES": ""}):
                self._context = start_fork_server(preload)

    @property
    def free(self) -> int:
        """The number of jobs that could start now."""
        return sum(place.call is None for place in self._places)

    def start(self, calls: Sequence[Call]) -> None:
        """Start jobs, at most as many as :attr:`free`."""
        places = [place for place in self._places if place.call is None]
        for call, place in zip(calls, places, strict=False):
            if place.worker is None:
                place.worker = self._open(place.gpu)
            place.call = call
            with suppress(BrokenPipeError):  # the process was killed while idle, which wait() will detect
                place.worker.pipe.send((call.function, call.arguments))

    def wait(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call."""
        busy = [place for place in self._places if place.worker and place.call]
        ready = connection.wait([place.worker.pipe for place in busy if place.worker], LOOK_EVERY)
        return [self._end(place) for place in busy if place.worker and place.worker.pipe in ready]

    def stop(self) -> None:
        """Kill all processes, and wait for them to end."""
        workers = [place.worker for place in self._places if place.worker is not None]
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.close()
        self._places = [Slot(place.gpu) for place in self._places]

    def _open(self, gpu: str) -> Worker:
        """Start a process that waits for jobs."""
        pipe, its_end = multiprocessing.Pipe()
        process = self._context.Process(target=_serve, args=(its_end,))
        with _environment({**self._environment, "CUDA_VISIBLE_DEVICES": gpu}), interrupts_held_back():
            process.start()
        its_end.close()  # so that reading from the pipe ends when the process does
        return Worker(process, pipe)

    def _end(self, place: Slot) -> JobResult:
        """Return the outcome of a slot's job, after the slot's pipe has become readable."""
        worker = place.worker
        call = place.call
        assert worker is not None and call is not None
        place.call = None
        try:
            ended = JobResult(call, worker.pipe.recv())
            is_lost = False
        except (EOFError, ConnectionResetError):
            is_lost = True
        if is_lost or not self._keeps_processes:
            place.worker = None
            how = worker.close()
        if is_lost:
            ended = JobResult(call, LostError(how))
        return ended


def start_fork_server(preload: Sequence[str]) -> ForkServerContext:
    """Start the fork server unless it is already running; it imports the modules while this process continues.

    The fork server ignores Ctrl-C, because its imports would otherwise print a traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with interrupts_held_back():
        forkserver.ensure_running()
    return context


def _serve(pipe: connection.Connection) -> None:
    """Run jobs in a new process until the parent closes the pipe."""
    end_with_parent()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(error_of(function, arguments))


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes started within the block."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
