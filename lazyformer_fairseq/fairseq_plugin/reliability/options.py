"""The startup of fairseq runs with one of our tasks: detection, options and early checks.

fairseq also runs many other tasks, whose behavior must not change.
"""

import functools
import importlib.util
import logging
import os
import re
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed.utils import is_master
from fairseq.tasks import TASK_REGISTRY
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lazyformer_fairseq.arguments import options_by_name
from lazyformer_fairseq.errors import UserError, nearest, whole_number
from lazyformer_fairseq.executors.torch_builds import refuse_unfit_torch
from lazyformer_fairseq.fairseq_plugin.option_bounds import BOUNDS
from lazyformer_fairseq.fairseq_plugin.reliability.run_log import log_to
from lazyformer_fairseq.fairseq_plugin.reliability.words import read_budget, read_words
from lazyformer_fairseq.fairseq_plugin.replacements import PACKAGE, Stage, install, start_run
from lazyformer_fairseq.options import refuse_out_of_bounds, split_at_commas
from lazyformer_fairseq.storage.atomic import refuse_unwritable
from lazyformer_fairseq.storage.run_lock import lock_for_process
from lazyformer_fairseq.training.trackers import TRACKERS, refuse_missing_trackers

logger = logging.getLogger(__name__)


CRITERIONS = {
    "full_sentences_masked_lm": "masked_lm_accuracy",
    "masked_permuted_lm": "masked_lm_accuracy",
    "inputs_masked_lm": "masked_lm_accuracy",
    "glue": "glue",
    "squad": "squad",
    "stream_language_modeling": "causal_lm",
}
OURS = "'lazyformer_fairseq[trackers]', or in a checkout pip install '.[trackers]'"
LOGS_NEED = {"tensorboard_logdir": (("tensorboard", "tensorboardX"), OURS), "wandb_project": (("wandb",), OURS)}


def option(default: Any, help: str) -> Any:
    """Return a config field that fairseq turns into a command-line option."""
    return field(default=default, metadata={"help": help})


@dataclass
class ReliabilityConfig(FairseqDataclass):
    """Options shared by all of this package's tasks."""

    keep_updates_list: Optional[str] = option(
        None,
        "updates, such as 100000,200000, whose checkpoints are kept permanently as checkpoint_update_N.pt",
    )
    max_skipped_updates: int = option(
        10,
        "roll back after skipping this many updates in a row because of NaN, Inf or a loss spike",
    )
    max_rollbacks: int = option(
        3,
        "maximum number of rollbacks to the last good checkpoint, after which the run stops with a report",
    )
    loss_spike: float = option(
        0.0, "skip an update if its loss is more than this many times the recent median; 0: never"
    )
    sequences_per_update: Optional[int] = option(
        None,
        "sequences per update over all GPUs; this sets --update-freq and makes --batch-size an upper bound",
    )
    log_seconds: float = option(
        0.0,
        "seconds between progress lines; all other output except warnings and metrics goes only to train.log; 0: show "
        "everything",
    )
    report_to: Optional[str] = option(None, f"experiment trackers to log metrics.jsonl to: {', '.join(TRACKERS)}")


LONGEST_SOCKET = 107  # bytes in the path of a Unix socket on Linux (man 7 unix)
SOCKET = len("/listener-12345678")  # the length of a socket's name in multiprocessing's folder


def refuse_impossible(*options: Any) -> None:
    """Raise a UserError for invalid values of fairseq's options or ours.

    Asynchronous checkpoint writing is also rejected, because fairseq exits with code 0 if it is not available.

    Args:
        options: objects that have options as attributes; missing attributes are skipped.
    """
    for some in options:
        if getattr(some, "write_checkpoints_asynchronously", False):
            raise UserError(
                "--write-checkpoints-asynchronously: with this option fairseq may not write checkpoint_last.pt, and a "
                "kill may leave an incomplete file; omit the option"
            )
        listed_updates(getattr(some, "keep_updates_list", None))
        read_words(some, "checkpoint_words")
        read_budget(some)
        refuse_out_of_bounds({name: getattr(some, name, None) for name in BOUNDS}, BOUNDS)


def refuse_unfit(cfg: DictConfig) -> None:
    """Raise a UserError for settings that would make the run fail late or would silently have no effect."""
    task = cfg.task._name
    if task in CRITERIONS and getattr(cfg.criterion, "_name", None) in (None, "cross_entropy"):
        raise UserError(
            f"--criterion: use {CRITERIONS[task]}; fairseq's default, cross_entropy, cannot train --task {task}"
        )
    refuse_no_batch(cfg)
    refuse_long_temporary_folder(cfg.dataset.num_workers)
    schedule = cfg.get("lr_scheduler")
    if getattr(schedule, "_name", None) == "inverse_sqrt" and schedule.warmup_updates < 1:  # fairseq divides by it
        raise UserError(f"--warmup-updates {schedule.warmup_updates}: --lr-scheduler inverse_sqrt requires at least 1")
    refuse_missing_trackers(split_at_commas(cfg.task.get("report_to") or ""))
    for name in ("log_file", "tensorboard_logdir"):
        if path := cfg.common.get(name):
            try:
                refuse_unwritable(Path(path))
            except UserError as error:
                raise UserError(f"--{name.replace('_', '-')} {error}") from None
    if cfg.common.log_file:
        Path(cfg.common.log_file).parent.mkdir(parents=True, exist_ok=True)
    for name, (packages, what) in LOGS_NEED.items():
        if cfg.common.get(name) and not any(map(importlib.util.find_spec, packages)):
            raise UserError(
                f"--{name.replace('_', '-')} {cfg.common[name]}: nothing would be written, because "
                f"{' or '.join(packages)} is not installed; run pip install {what}"
            )


def refuse_no_batch(cfg: DictConfig) -> None:
    """Raise a UserError if neither ``--batch-size`` nor ``--max-tokens`` is set."""
    if cfg.dataset.batch_size is None and cfg.dataset.max_tokens is None:
        raise UserError("--batch-size: set the number of sequences per batch and process, or set --max-tokens")


def refuse_long_temporary_folder(workers: int) -> None:
    """Raise a UserError if the temporary folder's path is too long for the data workers' sockets.

    torch's data workers open a socket in multiprocessing's folder. If its path is too long, they fail silently and the
    run waits for a batch forever.

    Args:
        workers: the number of data workers.
    """
    if workers == 0 or torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return
    surplus = len(os.fsencode(get_temp_dir())) + SOCKET - LONGEST_SOCKET
    if surplus > 0:
        folder = tempfile.gettempdir()
        length = len(os.fsencode(folder))
        raise UserError(
            f"--num-workers {workers}: the path of the temporary folder is too long for the data workers' sockets: "
            f"{folder} has {length} characters, but the limit is {length - surplus}; set TMPDIR to a shorter path, "
            "such as /tmp (export TMPDIR=/tmp)"
        )


def listed_updates(text: Optional[str]) -> frozenset[int]:
    """Parse the value of ``--keep-updates-list``.

    Raises:
        UserError: a part of it is not a whole number.
    """
    if text is None:
        return frozenset()
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not whole_number(part):
            raise UserError(
                f"--keep-updates-list {text}: {part!r} is not an update number; use whole numbers, such as "
                "100000,200000"
            )
    return frozenset(map(int, parts))


def settle_update_size(cfg: DictConfig) -> None:
    """Derive ``update_freq`` from ``--sequences-per-update``, if that is set, and from the number of processes.

    This also lowers ``batch_size`` to a divisor of the number of sequences per process.

    Raises:
        UserError: the update size is not possible, or another option contradicts it.
    """
    per_update = cfg.task.get("sequences_per_update")
    world = cfg.distributed_training.distributed_world_size
    if per_update is None:
        return
    if per_update < 1 or per_update % world:
        wrong = f"an update cannot be divided among {world} processes; use a multiple of that number"
        raise UserError(f"--sequences-per-update {per_update}: {wrong}")
    if cfg.dataset.max_tokens is not None:
        raise UserError(
            f"--max-tokens {cfg.dataset.max_tokens}: conflicts with --sequences-per-update; set --batch-size instead"
        )
    share = per_update // world
    most = cfg.dataset.batch_size
    if not most or most < 1:
        raise UserError(f"--batch-size {most}: set the number of sequences per batch and process, at least 1")
    divisors = (size for size in range(min(most, share), 0, -1) if share % size == 0)
    batch = next(divisors)
    update_freq = share // batch
    if list(cfg.optimization.update_freq) not in ([1], [update_freq]):
        given = ",".join(map(str, cfg.optimization.update_freq))
        raise UserError(
            f"--update-freq {given}: already determined by --sequences-per-update {per_update}; omit one of the two"
        )
    cfg.dataset.batch_size = batch
    cfg.optimization.update_freq = [update_freq]
    _say(f"an update is {per_update} sequences: {world} processes x {batch} sequences x update-freq {update_freq}")


def apply_decay_from(cfg: DictConfig) -> None:
    """Make the run's first start continue from the ``--decay-from`` checkpoint, with its complete state.

    Raises:
        UserError: the checkpoint is in ``--save-dir``, or another option sets what the run starts from.
    """
    if (start := OmegaConf.select(cfg, "lr_scheduler.decay_from")) is None:
        return
    if Path(start).absolute().parent == Path(cfg.checkpoint.save_dir).absolute():
        raise UserError(f"--decay-from {start} is in --save-dir, where this run would resume; set a new --save-dir")
    for name in ("restore_file", "continue_once", "reset_optimizer"):
        if cfg.checkpoint[name] not in (None, False, "checkpoint_last.pt", start):
            raise UserError(f"--{name.replace('_', '-')}: not allowed with --decay-from {start}; omit one of the two")
    cfg.checkpoint.continue_once = start


@functools.cache
def _say(words: str) -> None:
    """Log a message only once, because hydra reads the settings twice."""
    logger.info(words)


def names_task_of_ours(settings: Any) -> bool:
    """Return whether settings select one of this package's tasks.

    Args:
        settings: parsed options with a task name as `task`, or fairseq's config with a task config as `task`.
    """
    task = getattr(settings, "task", None)
    if isinstance(task, str):
        name = task
    else:
        name = getattr(task, "_name", None)
    return is_task_of_ours(TASK_REGISTRY.get(name))


def is_task_of_ours(task: Any) -> bool:
    """Return whether a task class is one of ours or a subclass of one."""
    return any(base.__module__.startswith(f"{PACKAGE}.") for base in getattr(task, "__mro__", ()))


def starting_when_parsed(parse_args_and_arch, parser, input_args=None, *args, **kwargs):
    """Replace fairseq's parsing function: check options, and start the run if the task is ours.

    fairseq interprets ``--bf16`` as a request for a TPU; here only ``--tpu`` requests one.

    Args:
        parse_args_and_arch: fairseq's parsing function.
        parser: the argument parser.
        input_args: the command-line arguments; None for this process's arguments.
        args: additional arguments for fairseq's function.
        kwargs: additional keyword arguments for fairseq's function.

    Returns:
        The result of fairseq's function.

    Raises:
        UserError: an option is unknown or has an invalid value.
    """
    words = sys.argv[1:] if input_args is None else input_args
    given = options_by_name(words)
    task = given.get("task")
    is_unknown = task is not None and task not in TASK_REGISTRY
    if is_unknown or is_task_of_ours(TASK_REGISTRY.get(task)):
        parser.error = functools.partial(_refuse, parser, input_args is None)
        empty = {name: value for name, value in given.items() if not value.strip()}
        refuse_out_of_bounds(empty, BOUNDS)
    try:
        parsed = parse_args_and_arch(parser, input_args, *args, **kwargs)
    except SyntaxError as error:  # fairseq parses lists of numbers as Python
        refuse_out_of_bounds(given, BOUNDS)
        raise UserError(f"{error.text} is not a list of numbers") from error
    options = parsed[0] if isinstance(parsed, tuple) else parsed
    if not names_task_of_ours(options):
        data = Path(str(getattr(options, "data", None) or "."))
        if (data / "shard0").is_dir() and not list(data.glob("*.idx")):  # fairseq's own tasks do not support shards
            install(Stage.COMMAND_LINE)
            raise UserError(f"{data} is a sharded corpus; for --task {task} use {data / 'shard0'}")
    else:
        start_run(command_line=input_args is None)
        if "--tpu" not in words:
            options.tpu = False
        refuse_impossible(options)
        if not kwargs.get("suppress_defaults"):  # fairseq-validate parses again, without defaults
            _refuse_unfit_torch(options, options)
    return parsed


def _refuse(parser: ArgumentParser, command_line: bool, message: str) -> None:
    """Replace argparse's ``error``, which prints a page of usage: raise a UserError with the most similar names.

    Args:
        parser: the argument parser.
        command_line: whether the parsed arguments are those of this process's command line.
        message: argparse's message.
    """
    if command_line:
        start_run(command_line=True)
    if match := re.fullmatch(r"argument ([\w-]+)\S*: invalid choice: '(.*)' \(choose from (.*)\)", message):
        option, value, choices = match.groups()
        known = re.findall("'(.*?)'", choices)
        message = f"{option} {value}: unknown name{nearest(value, known)}"
    elif message.startswith("unrecognized arguments: "):
        words = message.removeprefix("unrecognized arguments: ").split(" ")
        option = next((word for word in words if word.startswith("-")), words[0])
        name = option.partition("=")[0]
        message = f"unknown option {name}{nearest(name, parser._option_string_actions)}"
    raise UserError(message.replace("<lambda> ", ""))


def importing_one_plugin(import_user_module: Callable, args: Any) -> None:
    """Import ``--user-dir`` as fairseq does.

    Raises:
        UserError: the folder is missing or contains another copy of this package.
    """
    ours = Path(__file__).parents[2]
    try:
        if Path(getattr(args, "user_dir", None) or ".").absolute() != ours:  # ours is already loaded
            import_user_module(args)
    except (ImportError, FileNotFoundError) as error:
        what = "no such folder"
        if isinstance(error, ImportError):
            if "not globally unique" not in str(error) or Path(args.user_dir).name != PACKAGE:
                raise
            what = f"{PACKAGE} is already loaded from a different folder; use {ours}"
        if "--user-dir" in sys.argv:
            install(Stage.COMMAND_LINE)
        raise UserError(f"--user-dir {args.user_dir}: {what}") from error


def starting_with_defaults(add_defaults, cfg):
    """Replace fairseq's ``add_defaults``: also start runs that do not use the parser.

    These are runs under hydra and fairseq's child processes.
    """
    add_defaults(cfg)
    if names_task_of_ours(cfg):
        start_run(command_line=HydraConfig.initialized())
        _keep_logging()
        refuse_impossible(cfg.checkpoint, cfg.task, cfg.model, cfg.dataset, cfg.optimization, cfg.common)
        refuse_impossible(cfg.optimizer, cfg.lr_scheduler, cfg.criterion)
        refuse_unfit(cfg)
        _refuse_unfit_torch(cfg.common, cfg.distributed_training)
        _claim_folder(cfg.checkpoint, cfg.distributed_training, cfg.task.get("log_seconds", 0))
        settle_update_size(cfg)
        apply_decay_from(cfg)


def _keep_logging() -> None:
    """Keep hydra's logging, because fairseq would otherwise set it up again without the run's log file."""
    if HydraConfig.initialized():
        with read_write(found := HydraConfig.get()), open_dict(found):
            found.job_logging = {"version": 1, "incremental": True}


def _refuse_unfit_torch(common: Any, distributed_training: Any) -> None:
    """Raise a UserError if this torch version cannot use the GPUs, unless ``--cpu`` is set."""
    if not common.cpu:
        refuse_unfit_torch(int(os.environ.get("LOCAL_WORLD_SIZE", distributed_training.distributed_world_size)))


def _claim_folder(checkpoint: Any, distributed_training: Any, log_seconds: float) -> None:
    """Lock ``--save-dir`` and open the log there, in the run's first process.

    Raises:
        UserError: another run is using the folder, or the log cannot be written; all processes raise this.
    """
    is_shared = torch.distributed.is_initialized()
    if checkpoint.no_save or (distributed_training.distributed_world_size > 1 and not is_shared):
        return
    problem = [None]
    if is_master(distributed_training):
        try:
            lock_for_process(Path(checkpoint.save_dir), f".training{checkpoint.checkpoint_suffix}.lock")
            log_to(Path(checkpoint.save_dir), log_seconds)
        except UserError as error:
            problem = [f"--save-dir {error}"]
    if is_shared:
        torch.distributed.broadcast_object_list(problem)
    if problem[0]:
        raise UserError(problem[0])
