"""``lazyformer pretrain`` in this process, and what fairseq-train makes of its words."""

import shlex
from subprocess import CompletedProcess
from unittest import mock

from click.testing import CliRunner
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import DictConfig

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.devices import nvidia_smi
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.options import settle_update_size

TRAINERS = ("fairseq_cli.train", "lazyformer_fairseq.pretraining.hydra_train")


def pretrain(*arguments: object) -> CompletedProcess:
    """``pretrain("bert_base", "data", ...)``: what the command says, and its exit code."""
    done = CliRunner().invoke(main, ["pretrain", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, (UserError, SystemExit)), done.exception
    error = f"error: {done.exception}\n" if isinstance(done.exception, UserError) else ""
    return CompletedProcess([], done.exit_code, done.stdout, done.stderr + error)


def dry_run(*arguments: object, by=pretrain) -> tuple[list[str], list[str]]:
    """The launcher with its options, and the arguments of fairseq-train or fairseq-hydra-train."""
    run = by(*arguments, "--dry-run", "--no-fit")
    assert run.returncode == 0, run.stderr
    command = shlex.split(run.stdout)
    at = next(at for at, word in enumerate(command) if word in TRAINERS)
    return command[:at], command[at + 1 :]


def parsed(arguments: list[str]) -> DictConfig:
    """What fairseq-train makes of its arguments."""
    with mock.patch.object(nvidia_smi, "_ask", lambda *_: []):  # no GPU is there for what this process's torch trains
        cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))
    settle_update_size(cfg)
    return cfg


def settings_of(*arguments: object) -> DictConfig:
    """With which ``lazyformer pretrain`` would train."""
    return parsed(dry_run(*arguments)[1])
