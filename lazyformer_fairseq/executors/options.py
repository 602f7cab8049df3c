"""Options that determine where a command's jobs run."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.interface import Executor
from lazyformer_fairseq.executors.local import Local
from lazyformer_fairseq.executors.nvidia_smi import visible_gpus
from lazyformer_fairseq.executors.ray_cluster import RayCluster
from lazyformer_fairseq.executors.slurm import Slurm
from lazyformer_fairseq.executors.torch_builds import refuse_unfit_torch
from lazyformer_fairseq.options import option

LOCAL = "local"
RAY = "ray"
SLURM = "slurm"
WHERE = "Where jobs run"  # a section of --help


@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """Options that determine where a command's jobs run."""

    executor: str = option(
        LOCAL,
        "Where to run jobs. local: in processes on this machine; ray: on the Ray cluster at RAY_ADDRESS or, if that "
        "variable is not set, on a new cluster on this machine; slurm: as Slurm job arrays. All machines must have the "
        "same files under the same paths; a corpus may be at a URL.",
        choices=(LOCAL, RAY, SLURM),
        section=WHERE,
    )
    workers: Optional[int] = option(
        None,
        "Number of jobs to run in parallel.",
        low=1,
        shown="on this machine, one per GPU or, without GPUs, cores / threads; on a cluster, as many as fit",
        section=WHERE,
    )
    slurm: tuple[str, ...] = option(
        (),
        "Parameters for --executor slurm, named as in submitit, such as slurm_partition=gpu,timeout_min=600.",
        metavar="NAME=VALUE,...",
        section=WHERE,
    )

    def given(self) -> dict[str, str]:
        """Return the options that differ from their defaults, by name, as written on a command line."""
        found = {}
        for name, value in asdict(self).items():
            if value != getattr(ExecutorOptions, name):
                found[name] = ",".join(value) if isinstance(value, tuple) else str(value)
        return found

    def slurm_parameters(self) -> dict[str, str]:
        """Return the ``--slurm`` parameters, by name.

        Raises:
            UserError: a parameter has no value, there are parameters although the jobs do not run under Slurm, or Slurm
                is not available here.
        """
        parameters = {}
        for text in self.slurm:
            name, found, value = text.partition("=")
            if not found:
                raise UserError(f"--slurm {text}: must be NAME=VALUE, as in slurm_partition=gpu")
            if self.executor != SLURM:
                raise UserError(f"--slurm {text}: applies only to --executor slurm; use both or neither")
            parameters[name] = value
        if self.executor == SLURM and shutil.which("sbatch") is None:
            raise UserError(
                "--executor slurm: there is no sbatch on this machine; run the command where jobs can be submitted"
            )
        return parameters


def choose_executor(
    given: ExecutorOptions,
    folder: Path,
    name: str,
    threads: int = 1,
    gpus: Sequence[str] = (),
    preload: Sequence[str] = (),
) -> Executor:
    """Return the executor that the options select.

    Args:
        given: the options.
        folder: folder for the logs of Slurm jobs.
        name: name for Slurm jobs.
        threads: number of CPU cores per job.
        gpus: the GPUs on this machine that may be used. On a Ray cluster, each job gets one GPU if this is not empty;
            under Slurm, the ``--slurm`` parameters determine the GPUs.
        preload: see :class:`Local`.

    Raises:
        UserError: the options conflict, or the executor is not available.
    """
    parameters = given.slurm_parameters()
    if given.executor == SLURM:
        options = {"name": name, "cpus_per_task": str(threads), **parameters}
        return Slurm(SLURM, folder, options, given.workers)
    if given.executor == RAY:
        return RayCluster(given.workers, threads, gpus=min(1, len(gpus)))
    return Local(given.workers, gpus, threads, preload)


def choose_gpus(names: Optional[str]) -> list[str]:
    """Return the GPUs selected by ``--gpus``, by default all of them; an empty list means the CPU.

    Raises:
        UserError: there is no GPU, or torch cannot use the GPUs.
    """
    if names == "none":
        return []
    there = visible_gpus()
    if names and not there:
        raise UserError(f"--gpus {names}: nvidia-smi reports no GPU here; omit the option to use the CPU")
    if there:
        refuse_unfit_torch(len(there))
    if names:
        return [name.strip() for name in names.split(",")]
    return there
