"""The launcher of training runs: its options, and the training command that replaces this process."""

import os
import shlex
import sys
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Union

import click

from lazyformer_fairseq.arguments import PACKAGE_FOLDER, to_arguments
from lazyformer_fairseq.errors import UserError, whole_number
from lazyformer_fairseq.evaluation.planning import NO_GPU, V100_BYTES
from lazyformer_fairseq.executors.cpuinfo import has_bf16
from lazyformer_fairseq.executors.nvidia_smi import count_gpus, precision_here, smallest_memory
from lazyformer_fairseq.executors.torch_builds import refuse_unfit_torch
from lazyformer_fairseq.options import PRECISION, Gpus, flag_of, option, read_gpus

OWN = {  # options that the launcher sets itself, which the user therefore must not set
    "--user-dir": "omit this option; the command sets it",
    "--distributed-world-size": "use --gpus and --nodes instead",
    "--update-freq": "derived from --sequences-per-update; set that instead, or run fairseq-train yourself",
    "--fp16": "use --precision fp16 instead",
    "--bf16": "use --precision bf16 instead",
    "--max-tokens": "use --batch-size, which counts sequences, or run fairseq-train yourself",
    "--tokenizer": "omit this option; the command uses the tokenizer that `lazyformer corpus` wrote beside DATA",
}
Setting = Union[str, int, float, bool]
Job = tuple[Any, ...]  # the arguments of evaluation.planning.job.job_of_launch, whose module imports torch
GLOO = {"distributed_backend": "gloo", "ddp_backend": "legacy_ddp"}  # for multiple processes without GPUs


@dataclass(frozen=True)
class Launch:
    """Options for where and how a run is executed: processes, nodes and precision."""

    gpus: Optional[Gpus] = option(
        None,
        "Number of processes on this node, one per GPU. With --dry-run, 8x16GB describes another node's GPUs.",
        parse=read_gpus,
        metavar="N",
        shown="all GPUs of this node, or 1 process on the CPU",
    )
    nodes: int = option(
        1,
        "Number of nodes. Start the command on each node; all nodes must share DATA and --save-dir.",
        low=1,
    )
    node_rank: int = option(0, "Rank of this node, counted from 0.", low=0)
    master: str = option("127.0.0.1:29500", "Address of node 0 in a multi-node run.", metavar="HOST:PORT")
    max_restarts: Optional[int] = option(
        None,
        "How many times to restart all processes from the last checkpoint after one of them dies.",
        low=0,
        shown="3; 0 if there is only one process",
    )
    precision: Optional[str] = PRECISION(
        shown="bf16 if all GPUs support it, else fp16; on a CPU with native bf16, bf16 for encoders; else fp32"
    )
    fit: bool = option(True, "Choose the largest batch size that fits in GPU memory, unless you set one.")
    dry_run: bool = option(
        False,
        "Print the command without running it, and the output of `lazyformer plan` on standard error.",
    )

    def __post_init__(self):
        """Raise a UserError for options that contradict each other or that this machine cannot satisfy."""
        host, _, port = self.master.rpartition(":")
        if not host or whole_number(port) is None:
            raise UserError(f"--master {self.master}: must be HOST:PORT")
        if self.node_rank >= (nodes := self.nodes):
            raise UserError(f"--node-rank {self.node_rank}: with --nodes {nodes}, must be from 0 to {nodes - 1}")
        if self.gpus and self.gpus.memory and not self.dry_run:
            raise UserError(f"--gpus {self.gpus}: GPU memory applies only to --dry-run; use {self.gpus.count}")
        if self.found and self.processes > self.found:
            if self.dry_run:
                others = f", or describe another node, as in --gpus {self.processes}x16GB"
            else:
                others = ""
            raise UserError(f"--gpus {self.processes}: this node has only {self.found}; use at most that many{others}")

    @cached_property
    def described_gpus(self) -> Optional[Gpus]:
        """The GPUs of the other node that a dry run is for; None if it is for this node."""
        if not (self.dry_run and self.gpus) or (count_gpus() and not self.gpus.memory):
            return None
        return Gpus(self.gpus.count, self.gpus.memory or V100_BYTES)

    @cached_property
    def found(self) -> int:
        """The node's number of GPUs."""
        if self.described_gpus:
            return self.described_gpus.count
        return count_gpus()

    @property
    def memory(self) -> Optional[int]:
        """The memory of the node's smallest GPU in bytes; None if it is unknown."""
        if self.described_gpus:
            return self.described_gpus.memory
        return smallest_memory()

    @property
    def processes(self) -> int:
        """The number of processes on this node."""
        if self.gpus:
            return self.gpus.count
        return self.found or 1

    @property
    def world_size(self) -> int:
        """The number of processes on all nodes."""
        return self.nodes * self.processes

    def in_fast_precision(self, save_dir: Path) -> "Launch":
        """Return this launch, switched to bf16 if it runs on a CPU with native bf16.

        Nothing changes if the user has chosen a precision, or if the run in `save_dir` began in a different precision.
        """
        if (
            self.precision
            or self.found
            or self.described_gpus
            or not has_bf16()
            or _began_in_another_precision(save_dir)
        ):
            return self
        click.echo(
            "using bf16, which is about twice as fast as fp32 on this CPU; weights are updated in fp32 (to use fp32 "
            "throughout, pass --precision fp32)",
            err=True,
        )
        return replace(self, precision="bf16")

    def refuse_uneven(self, per_update: int) -> None:
        """Raise a UserError if an update cannot be divided equally among the processes."""
        if per_update % self.world_size:
            raise UserError(
                f"{per_update} sequences per update cannot be divided equally among {self.world_size} processes; make "
                "--sequences-per-update a multiple of the number of processes"
            )

    def batch(self, job: Job, otherwise: int) -> int:
        """Return the largest batch size per process, in sequences, that fits in GPU memory.

        Args:
            job: the training job.
            otherwise: the batch size to use without a GPU, if its memory is unknown, or with ``--no-fit``.
        """
        memory = self.memory if self.found and self.fit else None
        if memory is None:
            return otherwise
        from lazyformer_fairseq.evaluation.planning.fit import Hardware, batch_that_fits
        from lazyformer_fairseq.evaluation.planning.job import job_of_launch

        try:
            size, why = batch_that_fits(job_of_launch(*job), Hardware(self.world_size, memory, self._precision))
        except UserError as error:  # for example, an update that cannot be divided among the GPUs
            size = otherwise
            why = f"could not estimate the memory: {error}"
        click.echo(f"--batch-size {size or 'as in the file'}: {why}", err=True)
        return size

    def show_plan(self, job: Job) -> None:
        """Print the plan to standard error if this is a ``--dry-run`` without ``--no-fit``."""
        if not (self.dry_run and self.fit):
            return
        from lazyformer_fairseq.evaluation.planning.fit import Hardware, as_text, make_plan
        from lazyformer_fairseq.evaluation.planning.job import job_of_launch

        made = job_of_launch(*job)
        if self.found:
            place = Hardware(self.world_size, self.memory or V100_BYTES, self._precision)
        else:
            place = Hardware.of_processor(self._precision, self.world_size)
        click.echo(as_text(make_plan(made, place, made.attention_backend)), err=True)

    def train(self, data: str, options: list[str], given: tuple[str, ...]) -> None:
        """Replace this process with fairseq-train.

        Args:
            data: the data folder or folders.
            options: options for fairseq-train.
            given: the user's options, which take precedence.

        Raises:
            UserError: the user has set an option that the launcher sets itself.
        """
        for word in given:
            name = word.partition("=")[0]
            if name in OWN:
                raise UserError(f"{name}: {OWN[name]}")
        options = [*options, "--log-seconds", "60", "--distributed-world-size", str(self.world_size)]
        if not self.found:
            options += to_arguments({"cpu": True, **GLOO})
        if self._precision != "fp32":
            options.append(f"--{self._precision}")
        words = [data, "--user-dir", str(PACKAGE_FOLDER), *options, *given]
        self._exec("lazyformer_fairseq.fairseq_plugin.launcher.train", words)

    def train_from_yaml(self, config: Path, settings: dict[str, Setting], given: tuple[str, ...]) -> None:
        """Replace this process with fairseq-hydra-train on a YAML file.

        Args:
            config: the YAML file.
            settings: overrides of the file's settings.
            given: the user's overrides, which take precedence.

        Raises:
            UserError: one of the user's arguments is not an override.
        """
        no_overrides = (word for word in given if word.startswith("-") or "=" not in word)
        wrong = next(no_overrides, None)
        if wrong:
            raise UserError(f"{wrong}: with a YAML file, write settings as in optimization.max_update=1000")
        settings = settings | {
            "common.user_dir": str(PACKAGE_FOLDER),
            "common.cpu": not self.found,
            **{f"common.{half}": self._precision == half for half in ("fp16", "bf16")},
            "distributed_training.distributed_world_size": self.world_size,
            "++task.log_seconds": 60,  # ++ because hydra does not know the task's options before it has read the file
        }
        if not self.found:
            settings |= {f"distributed_training.{name}": value for name, value in GLOO.items()}
        words = [f"{name}={_as_hydra_override(value)}" for name, value in settings.items()]
        where = ["--config-dir", str(config.absolute().parent), "--config-name", config.stem]
        self._exec("lazyformer_fairseq.fairseq_plugin.launcher.hydra_train", [*where, *words, *given])

    @property
    def _precision(self) -> str:
        return self.precision or ("fp16" if self.described_gpus else precision_here())

    def _torchrun(self) -> list[str]:
        """Return the arguments that run torchrun; empty for a single process that is never restarted."""
        restarts = self.max_restarts
        if restarts is None:
            restarts = 3 if self.world_size > 1 else 0
        if self.world_size == 1 and not restarts:
            return []
        words = ["-m", "lazyformer_fairseq.fairseq_plugin.reliability.torchrun", "--nnodes", str(self.nodes)]
        words += ["--nproc-per-node", str(self.processes), "--rdzv-backend", "c10d"]
        if self.nodes == 1:  # port 0: any free port
            words += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
        else:
            words += ["--rdzv-endpoint", self.master, "--rdzv-id", "lazyformer"]
            words += ["--rdzv-conf", f"is_host={int(self.node_rank == 0)}"]
        return [*words, "--max-restarts", str(restarts)]

    def _exec(self, module: str, words: list[str]) -> None:
        """Replace this process with the command, so that signals reach it; with ``--dry-run``, only print it."""
        command = [sys.executable, *self._torchrun(), "-m", module, *words]
        if self.dry_run:
            if self.described_gpus and not self.gpus.memory:
                click.echo(NO_GPU, err=True)
            click.echo(shlex.join(command))
            return
        if self.found and "--cpu" not in words:
            refuse_unfit_torch(self.processes)
        sys.stdout.flush()
        os.execv(sys.executable, command)  # noqa: S606


def _began_in_another_precision(save_dir: Path) -> bool:
    """Return whether the folder contains a run that did not begin in bf16."""
    if not (save_dir / "checkpoint_last.pt").exists():
        return False
    from lazyformer_fairseq.training.run_record import RUN, read_run  # imports torch

    return not (save_dir / RUN).exists() or read_run(save_dir).precision != "bf16"


def _as_hydra_override(value: Setting) -> str:
    if isinstance(value, str):
        return "'{}'".format(value.replace("\\", "\\\\").replace("'", "\\'"))
    return str(value).lower()


def words_of_options(run: Any, without: Collection[str]) -> list[str]:
    """Return a command's options that differ from their defaults, as command-line arguments.

    Args:
        run: the command's settings.
        without: names of options to omit.
    """
    words = []
    for one in fields(run):
        value = getattr(run, one.name)
        if one.name in without or value == one.default:
            continue
        flag = flag_of(one)
        if not isinstance(value, bool):
            words += [flag, str(value)]
        else:
            words.append(flag if value else flag.replace("--", "--no-"))
    return words
