"""Preemption: on SIGTERM, SIGUSR1 or Ctrl-C, a run saves after the current update and exits with code 75 (Ctrl-C: 130).

The details depend on when the signal arrives:

- During an update, or while the run waits for data: the run finishes the update and writes the checkpoint before doing
  anything else. On a CPU, where an update may have many passes and take half an hour, Ctrl-C ends it before the next
  pass. The run then loses only that update, and saves the state from before it.
- During validation: the run saves after the current batch. The validation then continues, and the run also writes the
  checkpoint with the validation score, as if it had not been stopped. A kill during this time loses the score.
- While a checkpoint is being written: the handler only records the signal, so the write finishes and then the run ends.
- Before the first update, while data is being read: the run performs the first update and saves it. An even earlier
  signal, before fairseq looks for a checkpoint, kills the process, which has nothing to lose.
- After another signal: there is no effect, because a stop is already requested. The exception is Ctrl-C, which ends the
  process immediately.
"""

import gc
import logging
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from contextlib import contextmanager
from multiprocessing.util import Finalize, get_temp_dir
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data.iterators import BufferedIterator
from fairseq.distributed import utils as distributed_utils
from fairseq.utils import split_paths
from torch.multiprocessing import _prctl_pr_set_pdeathsig
from torch.multiprocessing.spawn import ProcessExitedException

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import FORWARDED
from lazyformer_fairseq.fairseq_plugin.reliability.options import names_task_of_ours, refuse_no_batch
from lazyformer_fairseq.fairseq_plugin.replacements import start_run
from lazyformer_fairseq.training.stop_signals import EXIT_CODE, INTERRUPTED, MANY, SIGNALS, StopRequest

logger = logging.getLogger(__name__)


WORKER_SECONDS = 60  # how long a data worker continues after a SIGTERM


class UpdateAbandoned(BaseException):
    """Ctrl-C during an update; not a subclass of Exception, because fairseq would save a crash.pt for it."""


class Preemption(StopRequest):
    """A trainer's stop request. All processes agree on it, and save and exit after the same update.

    Attributes:
        saved: whether the requested checkpoint has been written or, because of the run's options, never will be.
        exiting: one byte of memory shared with data workers, set to 1 when this process is about to exit.
    """

    def __init__(self, trainer):
        super().__init__()
        self._trainer = weakref.ref(trainer)
        self.saved = False
        self.exiting = mmap.mmap(-1, 1)
        self._arrived = None
        self._busy = False

    def listen(self) -> None:
        """Install the signal handlers, and set up what data workers need to survive the signals."""
        if threading.current_thread() is threading.main_thread():
            if os.environ.get(FORWARDED) == str(os.getppid()):
                os.setpgid(0, 0)  # otherwise Ctrl-C arrives twice: from the terminal, and from the parent process
            Finalize(None, self.exiting.__setitem__, (0, 1), exitpriority=10)  # before data workers are terminated
            # Create the folder for the workers' sockets here, because this process removes it at exit and workers would
            # not.
            get_temp_dir()
            super().listen()

    def _on_signal(self, number: int, frame) -> None:
        if self.signal is None:
            gc.collect()  # an unused trainer may still be part of a reference cycle
        if self._trainer() is None:  # training is over, so pass the signal to the previous handler
            signal.signal(number, self._handlers[number] or signal.SIG_DFL)
            signal.raise_signal(number)
        else:
            super()._on_signal(number, frame)

    def _acknowledge(self) -> None:
        if self._trainer().is_data_parallel_master:
            super()._acknowledge()

    def _under_way(self) -> str:
        if self._trainer().cuda:
            return "update"
        return "pass"

    @contextmanager
    def busy(self):
        """Prevent saving within a ``with`` block, such as during an update or while a checkpoint is being written."""
        before = self._busy
        self._busy = True
        try:
            yield
        finally:
            self._busy = before

    def agree(self, asked) -> None:
        """Store the sum of all processes' :meth:`note` values.

        A sum on a GPU is copied to the CPU in the background, so reading it does not wait for the optimizer step.
        """
        self._arrived = None
        if torch.is_tensor(asked) and asked.is_cuda:
            asked = asked.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.current_stream().record_event()
        super().agree(asked)

    def agreed_code(self) -> int:
        """Return the exit code for all processes, or 0 if no process has received a signal."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return super().agreed_code()

    def give_up_if_interrupted(self) -> None:
        """Abandon the update before its next pass if Ctrl-C was pressed; all processes must call this.

        Raises:
            UpdateAbandoned: Ctrl-C was pressed in any process.
        """
        asked = self.note()
        if self._trainer().data_parallel_world_size > 1:
            of_all = torch.tensor(asked)
            torch.distributed.all_reduce(of_all, group=self._trainer().data_parallel_process_group)
            asked = of_all.item()
        if asked >= MANY:
            self.agree(asked)
            raise UpdateAbandoned

    def save_if_asked(self) -> None:
        """Write the checkpoint if a signal has requested it and it is not written yet.

        All processes call this at the same time, between updates.

        Raises:
            UserError: the checkpoint could not be written.
        """
        trainer = self._trainer()
        if trainer.data_parallel_world_size == 1:
            self.agree(self.note())
        if self.saved or self._busy or not self.agreed_code():
            return
        self.saved = True
        who = "another process received a signal"
        if self.signal:
            who = self.signal.name
        if not trainer.get_num_updates():
            logger.warning("%s: the run ends before the first update, so there is nothing to save", who)
            return
        with self.busy():
            path = checkpoint_utils.save_checkpoint(trainer.cfg.checkpoint, trainer, trainer.epoch_iterator, None)
        if trainer.not_saved:
            raise UserError(trainer.not_saved)
        what = "saved"
        if not path:
            what = "nothing was saved (--no-save or --no-last-checkpoints)"
            path = "the last saved checkpoint, if any"
        level = logging.WARNING if trainer.is_data_parallel_master else logging.DEBUG
        logger.log(
            level,
            f"{who}: {what} at {trainer.get_num_updates()} updates; the run ends before the next update with exit code "
            f"{self.agreed_code()}, and the same command resumes from {path}",
        )

    def end_if_saved(self) -> None:
        """Exit if the requested checkpoint is written, once all processes have called this.

        Raises:
            SystemExit: the exit code is 75, or 130 after Ctrl-C.
        """
        if not self.saved:
            return
        trainer = self._trainer()
        # When the first process exits, torchrun ends the others, so the writing process must have finished.
        if trainer.data_parallel_world_size > 1:
            torch.distributed.barrier(distributed_utils.get_global_group())
        end_reader(trainer.epoch_iterator)
        if signal.SIGINT in self._handlers:
            signal.signal(signal.SIGINT, self._handlers[signal.SIGINT])
        sys.stdout.flush()
        raise SystemExit(self.agreed_code())


def end_reader(epoch_iterator) -> None:
    """Stop the prefetching thread.

    Otherwise the process could abort, if interpreter shutdown stopped the thread inside torch code.
    """
    reader = getattr(getattr(epoch_iterator, "_cur_epoch_itr", None), "_itr", None)
    if isinstance(reader, BufferedIterator) and reader._consumer is not None:
        reader._consumer._max_len = 0  # the thread ends after its current batch
        while not reader._queue.empty():
            reader._queue.get()
        reader._consumer.join(timeout=10)


def leaving_signals_to_the_run(set_worker_signal_handlers):
    """Keep a data worker alive after a signal to all processes, such as Slurm's, so the run can still save.

    The worker continues for at most a minute, or until the run exits and terminates it.
    """
    inherited = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    set_worker_signal_handlers()
    if not isinstance(inherited, Preemption):
        return

    def end_with_the_run(*_: Any) -> None:
        if inherited.exiting[0]:
            os._exit(0)
        else:
            signal.alarm(WORKER_SECONDS)

    for number in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.signal(signal.SIGTERM, end_with_the_run)


def forwarding_signals(call_main, cfg, main, **kwargs):
    """Replace ``call_main`` with a version that forwards signals to its child processes and returns their exit code.

    ``call_main`` starts one process per GPU and waits for all of them, or runs `main` in this process.

    Raises:
        UserError: a fairseq-validate option is missing, or the checkpoint in ``--path`` does not exist.
        SystemExit: a child process ended after a signal; the exit code is 75, or 130 after Ctrl-C.
    """
    if not names_task_of_ours(cfg):
        return call_main(cfg, main, **kwargs)
    start_run()  # for a script that has not parsed a command line
    if "override_args" in kwargs:  # only fairseq-validate passes it; other commands have a default batch size
        refuse_no_batch(cfg)
        if cfg.common_eval.path is None:
            raise UserError("--path: pass the checkpoint to validate")
    for path in split_paths(cfg.common_eval.path or ""):
        if path and "://" not in path and not os.path.isfile(path):
            raise UserError(f"--path {path}: no such checkpoint")
    _end_with_launcher()
    _follow_torchrun_without_gpu(cfg.distributed_training)
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, _forward) for number in SIGNALS}
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
    """If torchrun started this process, have Linux send it a SIGTERM when torchrun dies."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    _prctl_pr_set_pdeathsig(signal.SIGTERM)
    try:
        os.kill(int(os.environ.get(FORWARDED, os.getppid())), 0)
    except ProcessLookupError:  # torchrun died before this process requested the signal
        raise SystemExit(EXIT_CODE) from None


def _forward(number: int, frame) -> None:
    children = multiprocessing.active_children()
    for child in children:
        os.kill(child.pid, number)
    if not children:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.raise_signal(number)


def _follow_torchrun_without_gpu(cfg: Any) -> None:
    """Use torchrun's number of processes if there is no GPU, because fairseq would divide by the number of GPUs."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.device_count() > 0 or cfg.distributed_init_method is not None or world_size == 1:
        return
    cfg.distributed_init_method = "env://"
    cfg.distributed_world_size = world_size
    cfg.distributed_rank = int(os.environ["RANK"])
    cfg.distributed_no_spawn = True


def broadcast_object(_, obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """Replace fairseq's ``_broadcast_object_slow`` with torch's ``broadcast_object_list``."""
    objects = [obj]
    torch.distributed.broadcast_object_list(objects, src=src_rank, group=group, device=dist_device)
    return objects[0]


def gathering_without_gpu(all_gather_list, data, group=None, max_size=16384):
    """Replace ``all_gather_list`` with torch's ``all_gather_object`` if there is no GPU."""
    if torch.cuda.is_available():
        return all_gather_list(data, group, max_size)
    group = group or distributed_utils.get_global_group()
    gathered = [None] * distributed_utils.get_world_size(group)
    torch.distributed.all_gather_object(gathered, data, group=group)
    return gathered
