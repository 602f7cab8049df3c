"""The executor that runs jobs as tasks on all machines of a Ray cluster (https://docs.ray.io)."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.interface import LOOK_EVERY, Call, Executor, JobResult, LostError, error_of
from lazyformer_fairseq.extras import refuse_without_extra

ADDRESS = "RAY_ADDRESS"


class RayCluster(Executor):
    """The executor for the Ray cluster at RAY_ADDRESS.

    If that variable is not set, a cluster is started on this machine for this process. Every machine must have this
    package and the same files under the same paths, including the jobs' working directories.

    Args:
        at_once: maximum number of concurrent jobs; None for as many as the cluster has room for.
        threads: number of CPU cores per job.
        gpus: number of GPUs per job: 0, 1, or a fraction of one.

    Raises:
        UserError: Ray is not installed, there is no cluster at RAY_ADDRESS, or none of its machines has the cores and
            GPUs that a job needs.
    """

    def __init__(self, at_once: Optional[int] = None, threads: int = 1, gpus: float = 0):
        refuse_without_extra("cluster", "--executor ray")
        import ray  # takes a second to import, and is not needed by other commands

        self._ray = ray
        if not ray.is_initialized():
            try:
                ray.init(address=os.environ.get(ADDRESS), log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UserError(f"{ADDRESS}={os.environ.get(ADDRESS)}: {str(error).splitlines()[0]}") from error
        self._refuse_too_small(threads, gpus)
        settings = {"env_vars": {"OMP_NUM_THREADS": str(threads)}}
        as_task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0, runtime_env=settings)
        self._call = as_task(_call_in)
        self._at_once = at_once
        self._threads = threads
        self._calls: dict[Any, Call] = {}

    def _refuse_too_small(self, threads: int, gpus: float) -> None:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        for node in nodes:
            if node.get("CPU", 0) >= threads and node.get("GPU", 0) >= gpus:
                return
        needed = f"{threads} CPU cores and {gpus:g} GPUs"
        raise UserError(f"--executor ray: a job needs {needed}, but no machine in the cluster has that many")

    @property
    def free(self) -> int:
        """The number of jobs that could start now, which changes as machines join or leave the cluster."""
        room = self._at_once
        if room is None:
            cores = self._ray.cluster_resources().get("CPU", 0)
            room = max(1, int(cores // self._threads))
        return max(0, room - len(self._calls))

    def start(self, calls: Sequence[Call]) -> None:
        """Submit jobs to the cluster."""
        for call in calls:
            self._calls[self._call.remote(call.folder, call.function, call.arguments)] = call

    def wait(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call."""
        references = list(self._calls)
        ready, _ = self._ray.wait(references, timeout=LOOK_EVERY)
        if ready:
            ready, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
        return [JobResult(self._calls.pop(reference), self._error_of(reference)) for reference in ready]

    def _error_of(self, reference: Any) -> Optional[BaseException]:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # the job did not start, because its module is missing
            return RuntimeError(f"{type(error.cause).__name__}: {error.cause}")
        except self._ray.exceptions.RayError as error:
            return LostError(f"{type(error).__name__} from Ray")

    def stop(self) -> None:
        """Cancel all jobs; a cluster that was started for this process ends with it."""
        for reference in self._calls:
            self._ray.cancel(reference, force=True)
        self._calls = {}


def _call_in(folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Optional[BaseException]:
    """Call a function after changing the working directory to `folder`, because paths may be relative to it."""
    os.chdir(folder)
    return error_of(function, arguments)
