"""Recognizes runs of ours and starts them: fairseq runs many tasks, and those of others must stay as they are.

What a run logs goes to ``train.log`` in ``--save-dir``, too, over all its starts; ``lazyformer curves`` reads it.
"""

import functools
import logging
import os
import re
import sys
from argparse import ArgumentParser
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.distributed.utils import is_master
from fairseq.tasks import TASK_REGISTRY
from hydra.core.hydra_config import HydraConfig

from lazyformer_fairseq.arguments import options_by_name
from lazyformer_fairseq.devices.torch_check import refuse_unfit_torch
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.fairseq_plugin.reliability.options import refuse_impossible, refuse_unfit, settle_update_size
from lazyformer_fairseq.fairseq_plugin.replacements import PACKAGE, Stage, install, start_run
from lazyformer_fairseq.storage.run_lock import lock_for_process

LOG = "train.log"
FORMAT = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
TIME = "%Y-%m-%d %H:%M:%S"  # both as fairseq prints them
_handler: Optional[logging.FileHandler] = None


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
    words = sys.argv[1:] if input_args is None else input_args
    task = options_by_name(words).get("task")
    if is_task_of_ours(TASK_REGISTRY.get(task)) or (task is not None and task not in TASK_REGISTRY):
        parser.error = functools.partial(_refuse, parser, input_args is None)
    parsed = parse_args_and_arch(parser, input_args, *args, **kwargs)
    options = parsed[0] if isinstance(parsed, tuple) else parsed
    if names_task_of_ours(options):
        start_run(command_line=input_args is None)
        if "--tpu" not in words:
            options.tpu = False
        refuse_impossible(options)
        _refuse_unfit_torch(options, options)
    return parsed


def _refuse(parser: ArgumentParser, command_line: bool, message: str) -> None:
    """In place of argparse's ``error``, which prints a page: a UserError with the names that are nearest."""
    if command_line:
        start_run(command_line=True)
    if match := re.fullmatch(r"argument ([\w-]+)\S*: invalid choice: '(.*)' \(choose from (.*)\)", message):
        option, value, choices = match.groups()
        known = re.findall("'(.*?)'", choices)
        message = f"{option} {value}: no such name{nearest(value, known)}"
    elif message.startswith("unrecognized arguments: "):
        words = message.removeprefix("unrecognized arguments: ").split(" ")
        name = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
        message = f"{name}: no such option here{nearest(name, parser._option_string_actions)}"
    raise UserError(message)


def importing_one_plugin(import_user_module, args):
    """``import_user_module(args)``. Raises a UserError where ``--user-dir`` is missing, or another copy of ours."""
    try:
        import_user_module(args)
    except (ImportError, FileNotFoundError) as error:
        if isinstance(error, FileNotFoundError):
            what = "no such folder"
        elif "not globally unique" in str(error) and Path(args.user_dir).name == PACKAGE:
            what = f"{PACKAGE} is loaded already, from another folder; give {Path(__file__).parents[2]}"
        else:
            raise
        if "--user-dir" in sys.argv:
            install(Stage.COMMAND_LINE)
        raise UserError(f"--user-dir {args.user_dir}: {what}") from error


def starting_with_defaults(add_defaults, cfg):
    """hydra, which does not ask the parser, and the processes that fairseq starts."""
    add_defaults(cfg)
    if names_task_of_ours(cfg):
        start_run(command_line=HydraConfig.initialized())
        refuse_impossible(cfg.checkpoint, cfg.task, cfg.model, cfg.dataset, cfg.optimization, cfg.common)
        refuse_unfit(cfg)
        _refuse_unfit_torch(cfg.common, cfg.distributed_training)
        settle_update_size(cfg)
        _claim_folder(cfg.checkpoint, cfg.distributed_training)


def _refuse_unfit_torch(common: Any, distributed_training: Any) -> None:
    """Raises a UserError for a torch that cannot use the GPUs, unless the run was told to use none."""
    if not common.cpu:
        refuse_unfit_torch(int(os.environ.get("LOCAL_WORLD_SIZE", distributed_training.distributed_world_size)))


def _claim_folder(checkpoint: Any, distributed_training: Any) -> None:
    """The first process of a run claims ``--save-dir`` for all, and logs there.

    Each raises a UserError where another run has it.
    """
    is_shared = torch.distributed.is_initialized()
    if checkpoint.no_save or (distributed_training.distributed_world_size > 1 and not is_shared):
        return
    problem = [None]
    if is_master(distributed_training):
        try:
            lock_for_process(Path(checkpoint.save_dir), f".training{checkpoint.checkpoint_suffix}.lock")
            log_to(Path(checkpoint.save_dir))
        except UserError as error:
            problem = [f"--save-dir {error}"]
    if is_shared:
        torch.distributed.broadcast_object_list(problem)
    if problem[0]:
        raise UserError(problem[0])


def log_to(folder: Path) -> None:
    """From here on this process appends what it logs to the folder's log; the folder of an earlier run is let go.

    Nothing is done where the output goes to that file already.
    """
    global _handler
    path = (folder / LOG).absolute()
    if _handler is not None:
        if _handler.baseFilename == str(path):
            return
        logging.getLogger().removeHandler(_handler)
        _handler.close()
        _handler = None
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                return
    _handler = _LogFile(path, encoding="utf-8")
    _handler.setFormatter(logging.Formatter(FORMAT, TIME))
    logging.getLogger().addHandler(_handler)


class _LogFile(logging.FileHandler):
    """A full disk does not disturb the run: what it logs goes to its output too."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing."""

    def close(self) -> None:
        with suppress(OSError):
            super().close()
