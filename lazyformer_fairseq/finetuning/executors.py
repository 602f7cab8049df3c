"""Where the runs of a grid go: to processes of this machine, or to a cluster's jobs.

In processes there is one run per GPU, or several share the CPU's cores. Each run has a process of its own. On a CPU it
is forked from one that has imported everything, which takes milliseconds where a fresh process takes seconds. CUDA
forbids that (importing fairseq has looked for GPUs already), so a GPU's processes start afresh, and see that GPU alone.

On a cluster all runs that are ready go out as one Slurm array, through submitit.
"""

import multiprocessing
import os
import pkgutil
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.child_process import end_with_parent
from lazyformer_fairseq.devices.nvidia_smi import visible_gpus
from lazyformer_fairseq.devices.precision import precision_here
from lazyformer_fairseq.devices.torch_check import refuse_unfit_torch
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.finetuning.settings import GridSettings

FINE_TUNE = "lazyformer_fairseq.finetuning.one_run:fine_tune"


class Job:
    """A run under way."""

    def __init__(self, process: BaseProcess, place: Optional[str]):
        self.process = process
        self.place = place

    def is_over(self) -> bool:
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

    def __init__(self, count: Optional[int], gpus: Sequence[str], threads: int = 1, work: str = FINE_TUNE):
        self.count = count or len(gpus) or max(1, len(os.sched_getaffinity(0)) // threads)
        self._threads = threads
        self._work = work
        self._places = [gpus[number % len(gpus)] if gpus else None for number in range(self.count)]
        self._free = list(self._places)
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
        jobs = []
        for run, *given in runs:
            place = self._free.pop(0)
            arguments = (self._work, (run, *given, self._threads))
            process = self._context.Process(target=_work, args=arguments, name=run.name)
            environment = {"OMP_NUM_THREADS": str(self._threads), "CUDA_VISIBLE_DEVICES": place or ""}
            with _environment(environment), _interrupts_held_back():
                process.start()
            jobs.append(Job(process, place))
        self._jobs += jobs
        return jobs

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
def _interrupts_held_back() -> Iterator[None]:
    """A Ctrl-C meanwhile reaches this process afterwards, and processes started meanwhile not at all."""
    resource_tracker.ensure_running()  # else started below, and that lifts the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
        refuse_without_extra("cluster", "--slurm")
        import submitit  # takes a second, which other commands need not spend

        try:
            self._executor = submitit.AutoExecutor(folder, cluster=kind)
            values = {name: int(value) if value.isdigit() else value for name, value in options.items()}
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
        jobs = [ClusterJob(job) for job in sent]
        self._jobs += jobs
        return jobs

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
        return Workers(given.workers, choose_gpus(given.gpus), given.threads)
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


def choose_precision(given: GridSettings) -> str:
    """``--precision``, else the best that the GPUs have; fp32 on a CPU."""
    return given.precision or ("fp32" if given.gpus == "none" else precision_here())
