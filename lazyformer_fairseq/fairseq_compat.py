"""The only place that changes what fairseq and torch do around the plugin. Each function says what and why."""

import argparse
import functools
import logging
import math
import os
import pickle
import sys
import warnings
from pathlib import Path

import torch
from fairseq import checkpoint_utils, options
from fairseq.distributed import utils as distributed_utils
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
)
from fairseq.optim import FP16Optimizer
from fairseq.trainer import Trainer
from torch.multiprocessing.spawn import ProcessRaisedException

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.reliability import hooks

logger = logging.getLogger(__name__)

# For --user-dir. Not resolved: fairseq compares it with the path, links and all, that the package was imported by.
USER_DIR = Path(__file__).absolute().parent


def install() -> None:
    """Applies all of it; called once, when the package is imported."""
    silence_warnings_nobody_can_act_on()
    allow_fairseq_checkpoints()
    name_broken_checkpoints()
    train_on_cpu_under_torchrun()
    share_objects_between_processes()
    let_bf16_run_on_gpus_and_cpus()
    let_fp16_run_on_cpus()
    tell_schedules_the_length_of_an_epoch()
    print_user_errors_plainly()
    hooks.install()


def release_arch_name(name: str) -> None:
    """Frees an arch name that fairseq has taken: its legacy masked_lm model calls a preset ``bert_base``.

    Called by our own registration, which would else be refused.
    """
    model = ARCH_MODEL_NAME_REGISTRY.pop(name, None)
    if model is not None:
        del ARCH_MODEL_REGISTRY[name], ARCH_CONFIG_REGISTRY[name]
        ARCH_MODEL_INV_REGISTRY[model].remove(name)


def silence_warnings_nobody_can_act_on() -> None:
    """fairseq calls hydra and torch in ways they deprecate; each run would start with a page of warnings about it."""
    for module in (r"hydra\.", r"fairseq\.", r"torch\.utils\.data\.dataloader"):
        for category in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=module)
    warnings.filterwarnings("ignore", message=r"\n'config' is validated against ConfigStore schema")


def allow_fairseq_checkpoints() -> None:
    """Lets torch's safe unpickler read what fairseq puts into checkpoints, and nothing that could run code.

    torch >= 2.6 loads with ``weights_only=True`` and then knows tensors and containers alone.
    """
    torch.serialization.add_safe_globals([argparse.Namespace])


def name_broken_checkpoints() -> None:
    """Turns what torch says of truncated and unsafe checkpoints into an error that names the file and what to do."""
    original = checkpoint_utils.load_checkpoint_to_cpu

    @functools.wraps(original)
    def load_checkpoint_to_cpu(path, *args, **kwargs):
        try:
            return original(path, *args, **kwargs)
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such checkpoint") from error
        except pickle.UnpicklingError as error:
            raise UserError(_unreadable(path, error)) from error
        except (OSError, RuntimeError, EOFError, KeyError, UnicodeDecodeError, AttributeError) as error:
            raise UserError(f"{path}: truncated, damaged or no checkpoint ({_first_line(error)})") from error

    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu


def _unreadable(path, error: Exception) -> str:
    """torch's own message recommends to switch the protection off; this one does not."""
    refused = "GLOBAL" in str(error) or "Unsupported" in str(error)
    if refused:
        return (
            f"{path}: refused, nothing of it was run. It holds Python objects beyond weights and settings, which could "
            f"run code when loaded ({_first_line(error.__context__ or error)}). Do not use it if you do not trust "
            "where it comes from; save weights and plain settings alone if it is yours"
        )
    return f"{path}: truncated, damaged or no checkpoint ({_first_line(error)})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def train_on_cpu_under_torchrun() -> None:
    """Lets torchrun start processes on machines without a GPU, where fairseq divides by the number of GPUs."""
    original = distributed_utils.infer_init_method

    @functools.wraps(original)
    def infer_init_method(cfg, *args, **kwargs):
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if torch.cuda.device_count() > 0 or cfg.distributed_init_method is not None or world_size == 1:
            return original(cfg, *args, **kwargs)
        cfg.distributed_init_method = "env://"
        cfg.distributed_world_size = world_size
        cfg.distributed_rank = int(os.environ["RANK"])
        cfg.distributed_no_spawn = True

    distributed_utils.infer_init_method = infer_init_method


def share_objects_between_processes() -> None:
    """Lets the processes of one run exchange what is no tensor: a loaded checkpoint's settings, GLUE's predictions.

    fairseq sends the former through ``torch.load``, which since torch 2.6 refuses them, so that no run of several
    processes could be resumed; the latter through GPU memory, even where there is no GPU.
    """

    def broadcast_object(obj, src_rank, group, dist_device):
        objects = [obj]
        torch.distributed.broadcast_object_list(objects, src=src_rank, group=group, device=dist_device)
        return objects[0]

    distributed_utils._broadcast_object_slow = broadcast_object

    def all_gather_list(data, group=None, max_size=None):
        group = group or distributed_utils.get_global_group()
        gathered = [None] * distributed_utils.get_world_size(group)
        torch.distributed.all_gather_object(gathered, data, group=group)
        return gathered

    if not torch.cuda.is_available():
        distributed_utils.all_gather_list = all_gather_list


def let_bf16_run_on_gpus_and_cpus() -> None:
    """fairseq takes ``--bf16`` on the command line for the wish to run on a TPU, and then looks for one."""
    original = options.parse_args_and_arch

    @functools.wraps(original)
    def parse_args_and_arch(parser, input_args=None, *args, **kwargs):
        parsed = original(parser, input_args, *args, **kwargs)
        namespace = parsed[0] if isinstance(parsed, tuple) else parsed
        if "--tpu" not in (sys.argv if input_args is None else input_args):
            namespace.tpu = False
        return parsed

    options.parse_args_and_arch = parse_args_and_arch


def let_fp16_run_on_cpus() -> None:
    """Joining all weights to one vector, fairseq asks for the current GPU; without one they stay apart."""
    original = FP16Optimizer.build_optimizer.__func__

    @functools.wraps(original)
    def build_optimizer(cls, cfg, params, **kwargs):
        if not torch.cuda.is_available():
            cfg.common.fp16_no_flatten_grads = True
        return original(cls, cfg, params, **kwargs)

    FP16Optimizer.build_optimizer = classmethod(build_optimizer)


def tell_schedules_the_length_of_an_epoch() -> None:
    """fairseq builds schedules before data; ``linear_warmup`` with ``--max-epoch`` needs the updates of an epoch."""
    original = Trainer.get_train_iterator

    @functools.wraps(original)
    def get_train_iterator(self, epoch, *args, **kwargs):
        iterator = original(self, epoch, *args, **kwargs)
        if hasattr(self.lr_scheduler, "set_updates_per_epoch"):
            frequencies = self.cfg.optimization.update_freq
            frequency = frequencies[min(epoch, len(frequencies)) - 1]
            self.lr_scheduler.set_updates_per_epoch(math.ceil(len(iterator) / frequency))
        return iterator

    Trainer.get_train_iterator = get_train_iterator


def print_user_errors_plainly() -> None:
    """A user's mistake ends a command line with its message and exit code 1, without a traceback; Ctrl-C with a line.

    fairseq wraps some errors in its own, so the whole chain is searched. All else goes to the hook that was there.
    hydra would print a traceback of its own, but with HYDRA_FULL_ERROR it leaves errors alone.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    original = sys.excepthook

    def hook(kind, error, traceback):
        user_error = find_user_error(error)
        if user_error is not None:
            message = f"error: {user_error}"
        elif issubclass(kind, KeyboardInterrupt):
            message = "interrupted; the same command goes on from the last checkpoint"
        else:
            return original(kind, error, traceback)
        sys.stdout.flush()
        print(message, file=sys.stderr)

    sys.excepthook = hook


def find_user_error(error):
    """The UserError that led to `error`, itself included, or None."""
    while error is not None and not isinstance(error, UserError):
        if isinstance(error, ProcessRaisedException):
            return _user_error_in_text(str(error))
        error = error.__cause__ or error.__context__
    return error


def _user_error_in_text(traceback: str):
    """Where fairseq starts a process for each GPU, all that reaches the first one is a traceback's text."""
    _, name, after = traceback.rpartition(f"{UserError.__module__}.{UserError.__qualname__}: ")
    return UserError(after.split("\n\n")[0].rstrip()) if name else None
