"""Where the runs of a grid go: to processes of this machine, or to a cluster."""

import os
import shutil
from collections.abc import Mapping
from typing import Any, Optional, Union

from lazyformer_fairseq.devices.nvidia_smi import visible_gpus
from lazyformer_fairseq.devices.precision import precision_here
from lazyformer_fairseq.devices.torch_check import refuse_unfit_torch
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.run.cluster import Cluster
from lazyformer_fairseq.finetuning.run.workers import Workers


def choose_executor(given: Mapping[str, Any], name: str) -> Union[Workers, Cluster]:
    """Where runs go, from the command's options; UserError where these do not fit together.

    Args:
        given: the values of :func:`lazyformer_fairseq.finetuning.options.where_runs_go`, and ``output``.
        name: of a cluster's jobs.
    """
    options = {"name": name}
    for text in given["slurm"]:
        option, found, value = text.partition("=")
        if not found:
            raise UserError(f"--slurm {text}: give NAME=VALUE, as in slurm_partition=gpu")
        options[option] = value
    if given["executor"] == "processes":
        if given["slurm"]:
            raise UserError("--slurm: means something with --executor slurm alone")
        return Workers(given["workers"], choose_gpus(given["gpus"]), given["threads"])
    folder = given["output"] / "runs" / "jobs"
    if given["executor"] == "slurm":
        if shutil.which("sbatch") is None:
            raise UserError("--executor slurm: there is no sbatch here; start the command where jobs are submitted")
        return Cluster("slurm", folder, options, given["workers"], given["threads"])
    return Cluster("local", folder, options, given["workers"] or len(os.sched_getaffinity(0)), given["threads"])


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


def choose_precision(given: Mapping[str, Any]) -> str:
    """``--precision``, else the best that the GPUs have; fp32 on a CPU."""
    return given["precision"] or ("fp32" if given["gpus"] == "none" else precision_here())
