"""Where fairseq itself starts a process for each GPU: signals reach them, and their exit code is the run's."""

import multiprocessing
import os
import signal
import threading

from torch.multiprocessing.spawn import ProcessExitedException

from lazyformer_fairseq.reliability.installing import start_run
from lazyformer_fairseq.reliability.our_runs import names_task_of_ours
from lazyformer_fairseq.reliability.signals import EXIT_CODE, SIGNALS


def forward_signals(call_main, cfg, main, **kwargs):
    """For ``distributed_utils.call_main``, which waits for the processes that it starts, or becomes the only one."""
    if not names_task_of_ours(cfg):
        return call_main(cfg, main, **kwargs)
    start_run()  # of a script that has not parsed a command line
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, _forward) for number in SIGNALS} if in_main_thread else {}
    try:
        return call_main(cfg, main, **kwargs)
    except ProcessExitedException as error:
        if error.exit_code == EXIT_CODE:
            raise SystemExit(EXIT_CODE) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _forward(number: int, frame) -> None:
    children = multiprocessing.active_children()
    for child in children:
        os.kill(child.pid, number)
    if not children:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
