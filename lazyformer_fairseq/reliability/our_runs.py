"""Recognizes runs of ours and starts them: fairseq runs many tasks, and those of others must stay as they are."""

import sys
from typing import Any

from fairseq.tasks import TASK_REGISTRY
from hydra.core.hydra_config import HydraConfig

from lazyformer_fairseq.reliability.installing import PACKAGE, start_run
from lazyformer_fairseq.reliability.options import refuse_impossible
from lazyformer_fairseq.reliability.update_size import settle


def names_task_of_ours(settings: Any) -> bool:
    """Whether a command's options, ``--task`` as parsed, or a config, ``cfg.task``, are for a task of this package."""
    task = getattr(settings, "task", None)
    return is_task_of_ours(TASK_REGISTRY.get(task if isinstance(task, str) else getattr(task, "_name", None)))


def is_task_of_ours(task: Any) -> bool:
    """The same for a class, which is ours or extends one of ours."""
    return any(base.__module__.startswith(f"{PACKAGE}.") for base in getattr(task, "__mro__", ()))


def starting_when_parsed(parse_args_and_arch, parser, input_args=None, *args, **kwargs):
    """fairseq's parser, which reads the command line itself where it is given no arguments.

    fairseq takes ``--bf16`` for the wish to run on a TPU; here ``--tpu`` alone requests one.
    """
    parsed = parse_args_and_arch(parser, input_args, *args, **kwargs)
    options = parsed[0] if isinstance(parsed, tuple) else parsed
    if names_task_of_ours(options):
        start_run(command_line=input_args is None)
        if "--tpu" not in (sys.argv if input_args is None else input_args):
            options.tpu = False
        refuse_impossible(options)
    return parsed


def starting_with_defaults(add_defaults, cfg):
    """hydra, which does not ask the parser, and the processes that fairseq starts."""
    add_defaults(cfg)
    if names_task_of_ours(cfg):
        start_run(command_line=HydraConfig.initialized())
        refuse_impossible(cfg.checkpoint, cfg.task, cfg.model, cfg.dataset, cfg.optimization, cfg.common)
        settle(cfg)


def starting_with_trainer(init, self, cfg, task, *args, **kwargs):
    """A script that parses nothing."""
    if is_task_of_ours(type(task)):
        start_run()
    init(self, cfg, task, *args, **kwargs)
