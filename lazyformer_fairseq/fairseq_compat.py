"""What the plugin changes in fairseq and torch, and why; ``reliability/hooks.py`` has what makes a run safe."""

import argparse
import functools
import logging
import math
import os
import sys
import warnings
from pathlib import Path

import torch
from fairseq import options, trainer
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
from lazyformer_fairseq.reliability.signals.user_error_note import note_user_error

logger = logging.getLogger(__name__)

# For --user-dir. Not resolved: fairseq compares it with the path, links and all, that the package was imported by.
USER_DIR = Path(__file__).absolute().parent


def install() -> None:
    """Applies all of it; called once, when the package is imported."""
    silence_warnings_nobody_can_act_on()
    allow_fairseq_checkpoints()
    train_on_cpu_under_torchrun()
    share_objects_between_processes()
    let_bf16_run_on_gpus_and_cpus()
    let_fp16_run_on_cpus()
    tell_schedules_the_length_of_an_epoch()
    see_no_shared_parameter_where_there_is_none()
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


def see_no_shared_parameter_where_there_is_none() -> None:
    """fairseq takes all linear maps without a bias to share one, the parameter None, and logs a line for each."""
    original = trainer._catalog_shared_params

    @functools.wraps(original)
    def catalog_shared_params(module, memo=None, prefix=""):
        shared = original(module, memo, prefix)
        if memo is not None:  # it calls itself for each submodule
            return shared
        return [names for names in shared if trainer._get_module_by_path(module, names[0]) is not None]

    trainer._catalog_shared_params = catalog_shared_params


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
            note_user_error()
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
