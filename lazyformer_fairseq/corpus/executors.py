"""Runs the tasks of a stage: on this machine, on a Slurm cluster or on Ray, all by datatrove's executors.

Tasks share their progress through files, so that a bar shows it across machines.
"""

import copy
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Literal

import loguru
from datatrove.executor.base import PipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.stats import PipelineStats
from tqdm import tqdm

from lazyformer_fairseq.child_process import end_with_parent
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import OUT_OF_SPACE
from lazyformer_fairseq.storage.run_lock import acquire_file_lock, file_lock

# In every process: the one that the user started reports an error, once.
loguru.logger.disable("datatrove")
for talkative in ("asyncio", "fsspec"):  # fairseq opens the root logger to all that libraries log
    logging.getLogger(talkative).setLevel(logging.WARNING)

WORKERS_LOCK = "workers.lock"
FAILED = "failed"  # folder of errors, a file for each task that failed
LOOK_AT_CLUSTER_EVERY = 5.0  # seconds


@dataclass(frozen=True)
class ExecutorSettings:
    """Where tasks run; does not affect the result.

    Attributes:
        kind: this machine, a Slurm cluster, or the Ray cluster that ``RAY_ADDRESS`` names (a local one without).
        workers: tasks at the same time.
        slurm: options of sbatch; ``time`` and ``partition`` are required.
    """

    kind: Literal["local", "slurm", "ray"] = "local"
    workers: int = 1
    slurm: dict[str, str] = field(default_factory=dict)


def run_tasks(pipeline: list[PipelineStep], tasks: int, folder: Path, settings: ExecutorSettings) -> None:
    """Runs ``pipeline`` once for each rank below ``tasks``, but for those that an earlier run completed.

    Args:
        folder: of datatrove's completions, statistics and logs.

    Raises:
        UserError: a task failed for a reason that the user can fix; finished work stays.
    """
    executor_class, options = {"local": _local, "slurm": _slurm, "ray": _ray}[settings.kind](settings, folder)
    shutil.rmtree(folder / FAILED, ignore_errors=True)
    executor = executor_class(pipeline, tasks, workers=settings.workers, logging_dir=str(folder), **options)
    executor.run()
    if missing := executor.get_incomplete_ranks():
        if failed := sorted((folder / FAILED).glob("*")):
            raise UserError(failed[0].read_text(encoding="utf-8"))
        raise UserError(
            f"{len(missing)} of {tasks} tasks did not finish (the first is {missing[0]}); their logs are in "
            f"{folder}. What was finished stays: run the same command again to go on"
        )


class TellWhatFailed(PipelineExecutor):
    """Mixin: writes errors to a file for whoever started the tasks, because a cluster returns no exception."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1):
        try:
            return super()._run_for_rank(rank, local_rank, node_rank)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in OUT_OF_SPACE:
                error = UserError(
                    f"{error.filename or self.logging_dir.path}: cannot be written ({error.strerror}). "
                    "What was finished stays: make room and run the same command again"
                )
            with suppress(OSError):  # the disk may be full
                folder = Path(self.logging_dir.path, FAILED)
                folder.mkdir(exist_ok=True)
                what = str(error) if isinstance(error, UserError) else f"task {rank}: {traceback.format_exc()}"
                (folder / f"{rank:05d}").write_text(what, encoding="utf-8")
            raise error from None


class WithoutLogs(LocalPipelineExecutor):
    """Mixin: a task without a log of its own, which stays empty here and costs 12 ms."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        data = None
        for step in self.pipeline:
            data = step(data, rank, self.world_size)
        deque(data, maxlen=0)
        stats = PipelineStats(self.pipeline)
        with self.logging_dir.open(f"stats/{rank:05d}.json", "w") as file:
            stats.save_to_disk(file)
        self.mark_rank_as_completed(rank)
        return stats


class LocalExecutor(TellWhatFailed, WithoutLogs):
    """datatrove's, on a pool that notices the death of a worker and leaves no worker behind when its parent dies."""

    def run(self) -> None:
        ranks = self.get_incomplete_ranks()
        if self.workers == 1 or len(ranks) < 2:
            for rank in ranks:
                # As in a pool, each task gets a pipeline of its own: steps keep their own counts.
                copy.deepcopy(self).run_task(rank)
            return
        context = start_fork_server()
        lock = Path(self.logging_dir.path).parent / WORKERS_LOCK
        pool = ProcessPoolExecutor(min(self.workers, len(ranks)), context, _begin_worker, (lock,))
        try:
            futures = [pool.submit(self.run_task, rank) for rank in ranks]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BrokenProcessPool:
            raise UserError(
                "a worker died: killed from outside, or by the system for want of memory. What was finished stays: "
                "run the same command again, with fewer --workers if memory was short"
            ) from None
        finally:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            pool.shutdown(cancel_futures=True)

    def run_task(self, rank: int) -> None:
        """Runs one task in this process."""
        self._run_for_rank(rank, local_rank=1)


def _local(settings: ExecutorSettings, folder: Path) -> tuple[type[PipelineExecutor], dict[str, Any]]:
    return LocalExecutor, {}


def _slurm(settings: ExecutorSettings, folder: Path) -> tuple[type[PipelineExecutor], dict[str, Any]]:
    from datatrove.executor.slurm import SlurmPipelineExecutor

    class SlurmExecutor(TellWhatFailed, SlurmPipelineExecutor):
        def launch_merge_stats(self) -> None:
            """Submits no job of its own: ``manifest.py`` adds up the statistics."""

        def launch_job(self) -> None:
            try:
                super().launch_job()
            except subprocess.CalledProcessError as error:
                raise UserError(f"sbatch refused the job ({error}); see what it printed, and --slurm") from None
            while self.get_incomplete_ranks() and self.job_id != -1 and _is_queued(self.job_id):
                time.sleep(LOOK_AT_CLUSTER_EVERY)

    options = dict(settings.slurm)
    if missing := {"time", "partition"} - options.keys():
        raise UserError(f"--slurm {sorted(missing)[0]}=... is missing: sbatch needs a time limit and a partition")
    if shutil.which("sbatch") is None:
        raise UserError("--executor slurm: there is no command sbatch here; start this on a node of the cluster")
    return SlurmExecutor, {
        "time": options.pop("time"),
        "partition": options.pop("partition"),
        "mem_per_cpu_gb": int(options.pop("mem_per_cpu_gb", 2)),
        "env_command": f"export PATH={os.environ['PATH']}",
        "qos": options.pop("qos", ""),
        "job_name": f"lazyformer-{folder.name}",
        "slurm_logs_folder": str(folder / "slurm"),
        "sbatch_args": options,
        "requeue": True,
    }


def _is_queued(job: str) -> bool:
    answer = subprocess.run(["squeue", "--noheader", "--jobs", str(job)], capture_output=True, text=True)
    return answer.returncode == 0 and bool(answer.stdout.strip())


def _ray(settings: ExecutorSettings, folder: Path) -> tuple[type[PipelineExecutor], dict[str, Any]]:
    try:
        import ray
    except ImportError:
        raise UserError("--executor ray needs Ray: pip install 'lazyformer_fairseq[cluster]'") from None
    from datatrove.executor.ray import RayPipelineExecutor

    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="error")

    class RayExecutor(TellWhatFailed, RayPipelineExecutor):
        """datatrove's."""

    return RayExecutor, {}


def wait_for_workers(folder: Path) -> None:
    """Waits until the workers of a killed run have exited; they exit by themselves within seconds."""
    folder.mkdir(exist_ok=True)
    with file_lock(folder / WORKERS_LOCK):
        pass


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_fork_server() -> BaseContext:
    """Starts the process that forks the workers, if it is not there; it imports while its parent goes on.

    It ignores Ctrl-C, or its imports would print a traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lazyformer_fairseq.corpus.worker_imports"])  # it pays for these once
    resource_tracker.ensure_running()  # else started below, and that lifts the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a Ctrl-C meanwhile reaches us afterwards
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _begin_worker(lock_file: Path) -> None:
    """Ends the worker soon after the process that gave it work has ended, however it ended."""
    end_with_parent()
    acquire_file_lock(lock_file, shared=True)


REPORT_EVERY, LOOK_EVERY = 0.5, 0.25  # seconds


class TaskProgress:
    """Writes how many bytes of a task's input are done, at most twice a second."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._last = 0.0

    def __call__(self, rank: int, bytes_done: int) -> None:
        if (now := time.monotonic()) - self._last < REPORT_EVERY:
            return
        self._last = now
        (self.folder / f"{rank:05d}").write_text(str(bytes_done))


@contextmanager
def progress_bar(title: str, sizes: Sequence[int], completions: Path, progress: Path, in_bytes: bool) -> Iterator[None]:
    """Shows a bar with rate and time left while the block runs.

    Args:
        sizes: of the tasks, in bytes (1 each where the tasks are counted).
        completions: folder that holds a file NNNNN for each finished task.
        progress: folder of the :class:`TaskProgress` of the others.
        in_bytes: whether the sizes are bytes.
    """
    scale = {"unit": "B", "unit_scale": True} if in_bytes else {"unit": " tasks"}
    stop = threading.Event()
    done = bytes_done(sizes, completions, progress)
    with tqdm(total=sum(sizes), initial=done, desc=title, disable=None, **scale) as bar:

        def watch() -> None:
            while not stop.wait(LOOK_EVERY):
                bar.update(max(0, bytes_done(sizes, completions, progress) - bar.n))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
            bar.update(bytes_done(sizes, completions, progress) - bar.n)
        finally:
            stop.set()
            watcher.join()


def bytes_done(sizes: Sequence[int], completions: Path, progress: Path) -> int:
    """The sizes of the finished tasks plus what the others report; the folders are those of :func:`progress_bar`."""
    finished = {int(path.name) for path in completions.glob("[0-9]*")}
    under_way = {int(path.name): path for path in progress.glob("[0-9]*") if int(path.name) not in finished}
    done = sum(sizes[rank] for rank in finished)
    for rank, path in under_way.items():
        done += min(sizes[rank], int(path.read_text() or 0))
    return done
