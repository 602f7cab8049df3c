"""The options by which commands choose where their jobs run."""

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
    """The place where the jobs of a command run."""

    executor: str = option(
        LOCAL,
        "local: processes of this machine; ray: the Ray cluster at RAY_ADDRESS, or one on this machine; slurm: arrays "
        "of Slurm jobs. All machines must have the same files under the same paths; a corpus may be at a URL.",
        choices=(LOCAL, RAY, SLURM),
        section=WHERE,
    )
    workers: Optional[int] = option(
        None,
        "Jobs at a time.",
        low=1,
        shown="on this machine as many as GPUs, else cores / threads; on a cluster as many as there is room for",
        section=WHERE,
    )
    slurm: tuple[str, ...] = option(
        (),
        "Parameters of --executor slurm, by submitit's names: slurm_partition=gpu,timeout_min=600.",
        metavar="NAME=VALUE,...",
        section=WHERE,
    )

    def given(self) -> dict[str, str]:
        """Return the options that are not as they are by default, by name, as a command line has them."""
        found = {}
        for name, value in asdict(self).items():
            if value != getattr(ExecutorOptions, name):
                found[name] = ",".join(value) if isinstance(value, tuple) else str(value)
        return found

    def slurm_parameters(self) -> dict[str, str]:
        """Return the parameters by name.

        Raises:
            UserError: one has no value, there is no Slurm here, or the jobs go elsewhere.
        """
        parameters = {}
        for text in self.slurm:
            name, found, value = text.partition("=")
            if not found:
                raise UserError(f"--slurm {text}: give NAME=VALUE, as in slurm_partition=gpu")
            if self.executor != SLURM:
                raise UserError(f"--slurm {text}: means something with --executor slurm; give both, or neither")
            parameters[name] = value
        if self.executor == SLURM and shutil.which("sbatch") is None:
            raise UserError("--executor slurm: there is no sbatch here; start the command where jobs are submitted")
        return parameters


def choose_executor(
    given: ExecutorOptions,
    folder: Path,
    name: str,
    threads: int = 1,
    gpus: Sequence[str] = (),
    preload: Sequence[str] = (),
) -> Executor:
    """Return the place where jobs run.

    Args:
        given: the options.
        folder: the folder of Slurm's logs.
        name: the name of Slurm's jobs.
        threads: processors of a job.
        gpus: this machine's GPUs that may be used; of a cluster's each job gets one where there are any here. Slurm
            gives what its parameters say.
        preload: modules that processes of this machine begin with.

    Raises:
        UserError: the options do not fit together, or the place is not there.
    """
    parameters = given.slurm_parameters()
    if given.executor == SLURM:
        options = {"name": name, "cpus_per_task": str(threads), **parameters}
        return Slurm(SLURM, folder, options, given.workers)
    if given.executor == RAY:
        return RayCluster(given.workers, threads, gpus=min(1, len(gpus)))
    return Local(given.workers, gpus, threads, preload)


def choose_gpus(names: Optional[str]) -> list[str]:
    """Return the GPUs that ``--gpus`` names, all by default; none for the CPU.

    Raises:
        UserError: they are not there.
    """
    if names == "none":
        return []
    there = visible_gpus()
    if names and not there:
        raise UserError(f"--gpus {names}: nvidia-smi shows no GPU here; leave the option out to use the CPU")
    if there:
        refuse_unfit_torch(len(there))
    if names:
        return [name.strip() for name in names.split(",")]
    return there
