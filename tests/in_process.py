"""Commands in this process, without the seconds that another one takes to start."""

import shlex
from collections.abc import Callable, Iterable
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

from click.testing import CliRunner, Result
from helpers import lack_of_fairseq
from omegaconf import DictConfig

from lazyformer_fairseq.cli import main
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors import nvidia_smi


def invoke(*words: object, code: int = 0) -> str:
    """What ``lazyformer`` prints; an error of the user's is raised."""
    done = CliRunner().invoke(main, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def tried(*words: object) -> Result:
    """How ``lazyformer`` ends; where it needs fairseq, and there is none, the test is over."""
    done = CliRunner().invoke(main, list(map(str, words)))
    if lack_of_fairseq(done.exception):
        raise done.exception
    return done


def refusal(*words: object) -> str:
    """What ``lazyformer`` says of a user's mistake, click's own words or ours."""
    done = tried(*words)
    assert done.exit_code == 2 or isinstance(done.exception, UserError), (done.output, done.exception)
    return done.output if done.exit_code == 2 else str(done.exception)


def parser_of(monkeypatch, *commands: str) -> Callable[[Iterable[object]], dict[str, Any]]:
    """``parse(words)``: what one of these commands is called with, options checked and converted; it does nothing."""
    called: list[dict[str, Any]] = []
    for path in commands:
        command = main
        for name in path.split():
            command = command.commands[name]
        monkeypatch.setattr(command, "callback", lambda **given: called.append(given))

    def parse(words: Iterable[object]) -> dict[str, Any]:
        invoke(*words)
        return called.pop()

    return parse


def config_of(*words: object) -> DictConfig:
    """fairseq's configuration for a command line of fairseq-train."""
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    parser = options.get_training_parser()
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, list(map(str, words))))


LAUNCHER = "lazyformer_fairseq.fairseq_plugin.launcher"
TRAINERS = (f"{LAUNCHER}.train", f"{LAUNCHER}.hydra_train")


def pretrain(*arguments: object) -> CompletedProcess:
    """``pretrain("bert_base", "data", ...)``: what the command says, and its exit code."""
    done = tried("pretrain", *arguments)
    assert done.exception is None or isinstance(done.exception, (UserError, SystemExit)), done.exception
    error = f"error: {done.exception}\n" if isinstance(done.exception, UserError) else ""
    return CompletedProcess([], done.exit_code, done.stdout, done.stderr + error)


def dry_run(*arguments: object) -> tuple[list[str], list[str]]:
    """The launcher with its options, and the arguments of fairseq-train or fairseq-hydra-train."""
    run = pretrain(*arguments, "--dry-run", "--no-fit")
    assert run.returncode == 0, run.stderr
    command = shlex.split(run.stdout)
    at = next(at for at, word in enumerate(command) if word in TRAINERS)
    return command[:at], command[at + 1 :]


def parsed(arguments: list[str]) -> DictConfig:
    """What fairseq-train makes of its arguments."""
    from lazyformer_fairseq.fairseq_plugin.reliability.options import settle_update_size

    with mock.patch.object(nvidia_smi, "_ask", lambda *_: []):  # no GPU is there for what this process's torch trains
        cfg = config_of(*arguments)
    settle_update_size(cfg)
    return cfg


def settings_of(*arguments: object) -> DictConfig:
    """With which ``lazyformer pretrain`` would train."""
    return parsed(dry_run(*arguments)[1])


def assert_recipe(cfg: DictConfig, name: str) -> None:
    """NVIDIA's wt103_base.yaml, wt103_large.yaml and lamb.py, Transformer-XL's Adam, or image GPT's."""
    schedule, optimizer = cfg.lr_scheduler, cfg.optimizer
    clip_norm = 1.0 if name.startswith("igpt") else 0.25
    assert (schedule._name, cfg.optimization.clip_norm, optimizer.weight_decay) == ("cosine", clip_norm, 0.0)
    assert cfg.model.init_std == (0.005 if name == "nvidia_large" else 0.02)
    assert cfg.task.roll == name.startswith("nvidia") and not cfg.model.same_length
    if name.startswith("igpt"):
        assert (optimizer._name, optimizer.adam_betas.replace(" ", "")) == ("fused_adam", "(0.9,0.95)")
        rate = 1e-3 if name == "igpt_large" else 3e-3
        assert (cfg.optimization.lr, schedule.warmup_updates, schedule.min_lr) == ([rate], 9609, 0.0)
        return
    if name == "transformer_xl":
        assert (optimizer._name, optimizer.adam_eps) == ("fused_adam", 1e-8)
        assert (cfg.optimization.lr, schedule.warmup_updates, schedule.min_lr) == ([2.5e-4], 1000, 0.0)
        return
    assert (optimizer._name, optimizer.lamb_eps, optimizer.max_weight_norm) == ("nvlamb", 1e-6, 10.0)
    assert optimizer.no_bias_correction and optimizer.lamb_betas.replace(" ", "") == "(0.9,0.999)"
    lowest, warmup = {"nvidia": (1e-3, 1000), "nvidia_large": (1e-4, 16_000)}[name]
    assert (cfg.optimization.lr, schedule.min_lr, schedule.warmup_updates) == ([0.01], lowest, warmup)
    assert schedule.warmup_init_lr == 0.0
