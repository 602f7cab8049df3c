"""Runs the tasks of a stage, in this process or in a pool that leaves no worker behind, and shows their progress.

A task is done once its counts lie in the stage's folder, ``tasks/STAGE/NNNNN.json``. Whoever resumes does the others.
"""

import multiprocessing
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Optional

from tqdm import tqdm

from lazyformer_fairseq.child_process import end_with_parent
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import OUT_OF_SPACE
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import acquire_file_lock, file_lock

WORKERS_LOCK = "workers.lock"
SECONDS_FILE = "seconds"
CORE_SECONDS, PEAK_MEMORY = "core seconds", "peak memory"
Task = Callable[[int], Optional[dict[str, Counter]]]


def run_tasks(task: Task, sizes: Sequence[int], folder: Path, workers: int) -> None:
    """Runs ``task(rank)`` for each rank below ``len(sizes)``, but for those that an earlier run completed.

    Args:
        task: returns its counts by step, or None where it is one step and counts nothing; can be pickled.
        sizes: in bytes of input, for the bar; 1 each where there is no such size.
        folder: receives the counts, and the seconds that passed.

    Raises:
        UserError: a task failed for a reason that the user can fix; finished work stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [rank for rank in range(len(sizes)) if not (folder / f"{rank:05d}.json").exists()]
    scale = {"unit": "B", "unit_scale": True} if max(sizes) > 1 else {"unit": " tasks"}
    done = sum(sizes) - sum(sizes[rank] for rank in waiting)
    run, lock, began = partial(run_task, task, folder), folder.parent / WORKERS_LOCK, time.monotonic()
    try:
        with tqdm(total=sum(sizes), initial=done, desc=folder.name, disable=None, **scale) as bar:
            alone = workers == 1 or len(waiting) < 2
            for rank in map(run, waiting) if alone else _in_pool(run, waiting, workers, lock):
                bar.update(sizes[rank])
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        raise UserError(
            f"{error.filename or folder}: cannot be written ({error.strerror}). What was finished stays: make room and "
            "run the same command again"
        ) from None
    finally:
        with (folder / SECONDS_FILE).open("a") as file:  # of this run; a resumed run adds a line
            file.write(f"{time.monotonic() - began}\n")


def run_task(task: Task, folder: Path, rank: int) -> int:
    """Runs one task in this process, writes its counts with what it cost, and returns its rank."""
    began = time.process_time()
    steps = task(rank) or {folder.name: Counter()}
    seconds = time.process_time() - began
    for counts in steps.values():
        counts.setdefault(CORE_SECONDS, seconds)  # of a task that is one step
    in_bytes = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * in_bytes
    cost = {"task": {CORE_SECONDS: seconds, PEAK_MEMORY: peak}}
    write_json(folder / f"{rank:05d}.json", {**steps, **cost}, durable=False)
    return rank


def _in_pool(run: Callable[[int], int], ranks: Sequence[int], workers: int, lock: Path) -> Iterator[int]:
    """Ranks as their tasks end, in a pool that notices the death of a worker, and ends with this process."""
    pool = ProcessPoolExecutor(min(workers, len(ranks)), start_fork_server(), _begin_worker, (lock,))
    try:
        for future in as_completed([pool.submit(run, rank) for rank in ranks]):
            yield future.result()
    except BrokenProcessPool:
        raise UserError(
            "a worker died: killed from outside, or by the system for want of memory. What was finished stays: "
            "run the same command again, with fewer --workers if memory was short"
        ) from None
    finally:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(cancel_futures=True)


def wait_for_workers(folder: Path) -> None:
    """Waits until the workers of a killed run have exited; they exit by themselves within seconds."""
    folder.mkdir(exist_ok=True)
    with file_lock(folder / WORKERS_LOCK):
        pass


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
