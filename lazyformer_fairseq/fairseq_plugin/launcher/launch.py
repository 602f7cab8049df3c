"""From the options of a launch to the command that trains, which this process becomes; archs and YAML files by name."""

import os
import shlex
import sys
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Union

import click

from lazyformer_fairseq.arguments import CONFIGS, PACKAGE_FOLDER, as_words
from lazyformer_fairseq.errors import UserError, nearest, whole_number
from lazyformer_fairseq.evaluation.planning import NO_GPU, V100_BYTES
from lazyformer_fairseq.executors.cpuinfo import has_bf16
from lazyformer_fairseq.executors.nvidia_smi import count_gpus, precision_here, smallest_memory
from lazyformer_fairseq.executors.torch_builds import refuse_unfit_torch
from lazyformer_fairseq.options import PRECISION, Gpus, flag_of, option, read_gpus

OWN = {  # what a launch decides: given a second time, it would no longer be true
    "--user-dir": "leave it out: this command brings its own",
    "--distributed-world-size": "give --gpus and --nodes",
    "--update-freq": "it is worked out; give the size of an update, or run fairseq-train yourself",
    "--fp16": "give --precision fp16",
    "--bf16": "give --precision bf16",
    "--max-tokens": "give --batch-size, in sequences, or run fairseq-train yourself",
    "--tokenizer": "leave it out: the tokenizer is the one beside DATA, which `lazyformer corpus` keeps there",
}
Setting = Union[str, int, float, bool]
Job = tuple[Any, ...]  # arguments of evaluation.planning.job.job_of_launch, which imports torch
GLOO = {"distributed_backend": "gloo", "ddp_backend": "legacy_ddp"}  # several processes without GPUs


@dataclass(frozen=True)
class Launch:
    """The place and the manner of a training: processes, nodes and precision."""

    gpus: Optional[Gpus] = option(
        None,
        "Processes on this node; with --dry-run 8x16GB is a node that has other GPUs.",
        parse=read_gpus,
        metavar="N",
        shown="its GPUs, or 1 process on the CPU",
    )
    nodes: int = option(1, "Start the command on each. All see the same DATA and --save-dir.", low=1)
    node_rank: int = option(0, "Number of this node, from 0.", low=0)
    master: str = option("127.0.0.1:29500", "Node 0, where there are several.", metavar="HOST:PORT")
    max_restarts: Optional[int] = option(
        None,
        "Times that all processes start again, from the last checkpoint, when one dies.",
        low=0,
        shown="3; 0 where there is only one process",
    )
    precision: Optional[str] = PRECISION(
        shown="on GPUs bf16 where all have it, else fp16; on a CPU bf16 where it multiplies in it, causal models fp32"
    )
    fit: bool = option(True, "Take as large a batch as fits the GPUs' memory, unless you give one.")
    dry_run: bool = option(False, "Print the command, on standard error what `lazyformer plan` prints; run nothing.")

    def __post_init__(self):
        """Raise a UserError for what this machine cannot do."""
        host, _, port = self.master.rpartition(":")
        if not host or whole_number(port) is None:
            raise UserError(f"--master {self.master}: give HOST:PORT")
        if self.node_rank >= (nodes := self.nodes):
            raise UserError(f"--node-rank {self.node_rank}: --nodes {nodes} are numbered from 0 to {nodes - 1}")
        if self.gpus and self.gpus.memory and not self.dry_run:
            raise UserError(f"--gpus {self.gpus}: the size of others is for --dry-run; give {self.gpus.count}")
        if self.found and self.processes > self.found:
            if self.dry_run:
                others = f"; for a --dry-run of others --gpus {self.processes}x16GB"
            else:
                others = ""
            raise UserError(f"--gpus {self.processes}: this node has {self.found}; give as many at most{others}")

    @cached_property
    def supposed(self) -> Optional[Gpus]:
        """Return GPUs that are not here, and that a dry run is for."""
        if not (self.dry_run and self.gpus) or (count_gpus() and not self.gpus.memory):
            return None
        return Gpus(self.gpus.count, self.gpus.memory or V100_BYTES)

    @cached_property
    def found(self) -> int:
        """Return the number of GPUs of this node."""
        if self.supposed:
            return self.supposed.count
        return count_gpus()

    @property
    def memory(self) -> Optional[int]:
        """Return the bytes of the smallest of them; None where nobody knows."""
        if self.supposed:
            return self.supposed.memory
        return smallest_memory()

    @property
    def processes(self) -> int:
        """Return the number of processes of this node."""
        if self.gpus:
            return self.gpus.count
        return self.found or 1

    @property
    def world(self) -> int:
        """Return the number of processes of all nodes."""
        return self.nodes * self.processes

    def in_fast_precision(self, save_dir: Path) -> "Launch":
        """Return a launch in bf16 on a processor that multiplies in it, unless another precision is chosen or begun."""
        if self.precision or self.found or self.supposed or not has_bf16() or _began_in_another_precision(save_dir):
            return self
        click.echo(
            "bf16, as this processor computes it about twice as fast as fp32 (--precision fp32 for that); weights are "
            "updated in fp32",
            err=True,
        )
        return replace(self, precision="bf16")

    def refuse_uneven(self, per_update: int) -> None:
        """Raise a UserError where an update cannot be shared equally."""
        if per_update % self.world:
            raise UserError(
                f"{per_update} sequences an update do not divide among {self.world} processes; give "
                "--sequences-per-update N"
            )

    def batch(self, job: Job, otherwise: int) -> int:
        """Return the sequences that a process takes at once: what fits the GPUs.

        Args:
            job: what is trained.
            otherwise: the size where there is no GPU, where its memory is not known, and with ``--no-fit``.
        """
        memory = self.memory if self.found and self.fit else None
        if memory is None:
            return otherwise
        from lazyformer_fairseq.evaluation.planning.fit import Place, batch_that_fits
        from lazyformer_fairseq.evaluation.planning.job import job_of_launch

        try:
            size, why = batch_that_fits(job_of_launch(*job), Place(self.world, memory, self._precision))
        except UserError as error:  # such as an update that does not divide among the GPUs
            size = otherwise
            why = f"the memory is not measured: {error}"
        click.echo(f"--batch-size {size or 'as the file says'}: {why}", err=True)
        return size

    def show_plan(self, job: Job) -> None:
        """Print the plan of a ``--dry-run`` on standard error, unless ``--no-fit`` is given."""
        if not (self.dry_run and self.fit):
            return
        from lazyformer_fairseq.evaluation.planning.fit import Place, as_text, make_plan
        from lazyformer_fairseq.evaluation.planning.job import job_of_launch

        made = job_of_launch(*job)
        if self.found:
            place = Place(self.world, self.memory or V100_BYTES, self._precision)
        else:
            place = Place.of_processor(self._precision, self.world)
        click.echo(as_text(make_plan(made, place, made.attention_backend)), err=True)

    def train(self, data: str, options: list[str], given: tuple[str, ...]) -> None:
        """Become fairseq-train on `data`, with `options` and those that the user has `given`, which win."""
        for name in (word.partition("=")[0] for word in given):
            if advice := OWN.get(name):
                raise UserError(f"{name}: {advice}")
        options = [*options, "--log-seconds", "60", "--distributed-world-size", str(self.world)]
        if not self.found:
            options += as_words({"cpu": True, **GLOO})
        if self._precision != "fp32":
            options.append(f"--{self._precision}")
        words = [data, "--user-dir", str(PACKAGE_FOLDER), *options, *given]
        self._become("lazyformer_fairseq.fairseq_plugin.launcher.train", words)

    def train_from_yaml(self, config: Path, settings: dict[str, Setting], given: tuple[str, ...]) -> None:
        """Become fairseq-hydra-train on a YAML file, with `settings` and those that the user has `given`."""
        if wrong := next((word for word in given if word.startswith("-") or "=" not in word), None):
            raise UserError(f"{wrong}: with a YAML file settings are written as optimization.max_update=1000")
        settings = settings | {
            "common.user_dir": str(PACKAGE_FOLDER),
            "common.cpu": not self.found,
            **{f"common.{half}": self._precision == half for half in ("fp16", "bf16")},
            "distributed_training.distributed_world_size": self.world,
            "++task.log_seconds": 60,  # ++: a task's options are known only after hydra has read the file
        }
        if not self.found:
            settings |= {f"distributed_training.{name}": value for name, value in GLOO.items()}
        words = [f"{name}={_in_hydras_words(value)}" for name, value in settings.items()]
        where = ["--config-dir", str(config.absolute().parent), "--config-name", config.stem]
        self._become("lazyformer_fairseq.fairseq_plugin.launcher.hydra_train", [*where, *words, *given])

    @property
    def _precision(self) -> str:
        return self.precision or ("fp16" if self.supposed else precision_here())

    def _torchrun(self) -> list[str]:
        """Return what stands before the module that trains; nothing where one process is never restarted."""
        restarts = self.max_restarts
        if restarts is None:
            restarts = 3 if self.world > 1 else 0
        if self.world == 1 and not restarts:
            return []
        words = ["-m", "lazyformer_fairseq.fairseq_plugin.reliability.torchrun", "--nnodes", str(self.nodes)]
        words += ["--nproc-per-node", str(self.processes), "--rdzv-backend", "c10d"]
        if self.nodes == 1:  # on any port that is free
            words += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
        else:
            words += ["--rdzv-endpoint", self.master, "--rdzv-id", "lazyformer"]
            words += ["--rdzv-conf", f"is_host={int(self.node_rank == 0)}"]
        return [*words, "--max-restarts", str(restarts)]

    def _become(self, module: str, words: list[str]) -> None:
        """Become the command, so that signals reach it; only print it for ``--dry-run``."""
        command = [sys.executable, *self._torchrun(), "-m", module, *words]
        if self.dry_run:
            if self.supposed and not self.gpus.memory:
                click.echo(NO_GPU, err=True)
            click.echo(shlex.join(command))
            return
        if self.found and "--cpu" not in words:
            refuse_unfit_torch(self.processes)
        sys.stdout.flush()
        os.execv(sys.executable, command)  # noqa: S606


def _began_in_another_precision(save_dir: Path) -> bool:
    """Return whether a run stands there that did not begin in bf16."""
    if not (save_dir / "checkpoint_last.pt").exists():
        return False
    from lazyformer_fairseq.training.run_record import RUN, read_run  # imports torch

    return not (save_dir / RUN).exists() or read_run(save_dir).precision != "bf16"


def _in_hydras_words(value: Setting) -> str:
    if isinstance(value, str):
        return "'{}'".format(value.replace("\\", "\\\\").replace("'", "\\'"))
    return str(value).lower()


def words_of_options(run: Any, without: Collection[str]) -> list[str]:
    """Return the options of a command that were given, as words of a command line."""
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


def find_config(name: str) -> Path:
    """Find a user's YAML file, else the one of that name that comes with this package, of a model's pre-training.

    Raises:
        UserError: there is none; with the nearest names.
    """
    folders = [CONFIGS / folder for folder in ("pretraining", "language_modeling")]
    paths = (Path(folder, name) for folder in ("", *folders))
    if path := next(filter(Path.is_file, paths), None):
        return path
    known = nearest(Path(name).name, [path.name for folder in folders for path in folder.glob("*.yaml")])
    raise UserError(f"{name}: no such file, here or in {' or '.join(map(str, folders))}{known}")
