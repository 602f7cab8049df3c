"""Runs of several processes: they find each other, end with whoever starts them, and hear of signals."""

import multiprocessing
import os
import signal
import threading
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from torch.multiprocessing import _prctl_pr_set_pdeathsig
from torch.multiprocessing.spawn import ProcessExitedException

from lazyformer_fairseq.fairseq_plugin.reliability.command_line import EXIT_CODE, FORWARDED, INTERRUPTED, SIGNALS
from lazyformer_fairseq.fairseq_plugin.reliability.our_runs import names_task_of_ours
from lazyformer_fairseq.fairseq_plugin.replacements import start_run


def forwarding_signals(call_main, cfg, main, **kwargs):
    """For ``distributed_utils.call_main``, which waits for the processes that it starts, or becomes the only one."""
    if not names_task_of_ours(cfg):
        return call_main(cfg, main, **kwargs)
    start_run()  # of a script that has not parsed a command line
    _end_with_launcher()
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, _forward) for number in SIGNALS} if in_main_thread else {}
    if before:
        os.environ[FORWARDED] = str(os.getpid())
    try:
        return call_main(cfg, main, **kwargs)
    except ProcessExitedException as error:
        ended_by = {EXIT_CODE: EXIT_CODE, INTERRUPTED: INTERRUPTED, -signal.SIGINT: INTERRUPTED}
        if error.exit_code in ended_by:
            raise SystemExit(ended_by[error.exit_code]) from None
        raise
    finally:
        os.environ.pop(FORWARDED, None)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_launcher() -> None:
    """A process of torchrun's is sent SIGTERM when torchrun dies, however it dies; on Linux."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _prctl_pr_set_pdeathsig(signal.SIGTERM)
    try:
        os.kill(int(os.environ.get(FORWARDED, os.getppid())), 0)
    except ProcessLookupError:  # before this process asked for the signal
        raise SystemExit(EXIT_CODE) from None


def _forward(number: int, frame) -> None:
    children = multiprocessing.active_children()
    for child in children:
        os.kill(child.pid, number)
    if not children:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.raise_signal(number)


def training_on_cpu_under_torchrun(infer_init_method, cfg, *args, **kwargs):
    """``infer_init_method(cfg)``: follows torchrun where there is no GPU."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.device_count() > 0 or cfg.distributed_init_method is not None or world_size == 1:
        return infer_init_method(cfg, *args, **kwargs)
    cfg.distributed_init_method = "env://"
    cfg.distributed_world_size = world_size
    cfg.distributed_rank = int(os.environ["RANK"])
    cfg.distributed_no_spawn = True


def broadcast_object(_, obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """fairseq's ``_broadcast_object_slow``, by torch's own."""
    objects = [obj]
    torch.distributed.broadcast_object_list(objects, src=src_rank, group=group, device=dist_device)
    return objects[0]


def gathering_without_gpu(all_gather_list, data, group=None, max_size=16384):
    """``all_gather_list(data)``, by torch's own where there is no GPU."""
    if torch.cuda.is_available():
        return all_gather_list(data, group, max_size)
    group = group or distributed_utils.get_global_group()
    gathered = [None] * distributed_utils.get_world_size(group)
    torch.distributed.all_gather_object(gathered, data, group=group)
    return gathered
