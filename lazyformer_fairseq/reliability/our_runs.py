"""Recognizes runs of ours and starts them: fairseq runs many tasks, and those of others must stay as they are."""

import functools
from collections.abc import Callable
from typing import Any

from fairseq.tasks import TASK_REGISTRY
from hydra.core.hydra_config import HydraConfig

from lazyformer_fairseq.reliability.installing import PACKAGE, start_run


def names_task_of_ours(settings: Any) -> bool:
    """Whether a command's options, ``--task`` as parsed, or a config, ``cfg.task``, are for a task of this package."""
    task = getattr(settings, "task", None)
    return is_task_of_ours(TASK_REGISTRY.get(task if isinstance(task, str) else getattr(task, "_name", None)))


def is_task_of_ours(task: Any) -> bool:
    """The same for a class, which is ours or extends one of ours."""
    return any(base.__module__.startswith(f"{PACKAGE}.") for base in getattr(task, "__mro__", ()))


def starting_when_parsed(parse_args_and_arch: Callable) -> Callable:
    """fairseq's parser, which reads the command line itself where it is given no arguments."""

    @functools.wraps(parse_args_and_arch)
    def parse(parser, input_args=None, *args, **kwargs):
        parsed = parse_args_and_arch(parser, input_args, *args, **kwargs)
        if names_task_of_ours(parsed[0] if isinstance(parsed, tuple) else parsed):
            start_run(command_line=input_args is None)
        return parsed

    return parse


def starting_with_defaults(add_defaults: Callable) -> Callable:
    """``add_defaults(cfg)``."""

    @functools.wraps(add_defaults)
    def add(cfg):
        add_defaults(cfg)
        if names_task_of_ours(cfg):
            start_run(command_line=HydraConfig.initialized())

    return add


def starting_with_trainer(init: Callable) -> Callable:
    """``Trainer.__init__``."""

    @functools.wraps(init)
    def wrapped(self, cfg, task, *args, **kwargs):
        if is_task_of_ours(type(task)):
            start_run()
        init(self, cfg, task, *args, **kwargs)

    return wrapped
