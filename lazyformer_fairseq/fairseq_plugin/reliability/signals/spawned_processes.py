"""Runs of several processes: they end with whoever starts them, and where fairseq does, signals reach them."""

import multiprocessing
import os
import signal
import threading

from torch.multiprocessing import _prctl_pr_set_pdeathsig
from torch.multiprocessing.spawn import ProcessExitedException

from lazyformer_fairseq.fairseq_plugin.reliability.installing import start_run
from lazyformer_fairseq.fairseq_plugin.reliability.our_runs import names_task_of_ours
from lazyformer_fairseq.fairseq_plugin.reliability.signals import EXIT_CODE, FORWARDED, INTERRUPTED, SIGNALS


def forward_signals(call_main, cfg, main, **kwargs):
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
