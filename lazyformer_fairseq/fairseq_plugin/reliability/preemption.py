"""SIGTERM, SIGUSR1, Ctrl-C: the run saves after the update under way and ends with exit code 75 (130 for Ctrl-C).

What a signal meets:

- An update, or the wait for its data: the run finishes the update and writes the checkpoint before anything else. On a
  processor, where an update may be many passes and half an hour, Ctrl-C ends it before the next pass: the run loses
  that update alone, and saves what was before it.
- Validation: the run saves after the batch under way. Validation that was due then continues, so that the run also
  writes the checkpoint with its score, as if nobody stopped it; a kill in the middle of it loses the score.
- A checkpoint being written: the handler only takes a note, so the write finishes, and then the run ends.
- Time before the first update, data being read: the run makes the first update and saves it. Time before fairseq looks
  for a checkpoint: the process dies of the signal, as it has nothing to lose.
- Another signal: nothing, the note is there already. A Ctrl-C after any other signal ends the process at once.
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


WORKER_SECONDS = 60  # that a data worker lives after a SIGTERM


class UpdateGivenUp(BaseException):
    """Ctrl-C ended an update before its last pass; no Exception, for which fairseq would save a whole crash.pt."""


class Preemption(StopRequest):
    """The note of signals of one trainer, by which all processes of the run save and end after the same update.

    Attributes:
        saved: the checkpoint is written, if the run's options leave it one.
        exiting: a byte that data workers see too: 1 when this process is about to exit.
    """

    def __init__(self, trainer):
        super().__init__()
        self._trainer = weakref.ref(trainer)
        self.saved = False
        self.exiting = mmap.mmap(-1, 1)
        self._arrived = None
        self._busy = False

    def listen(self) -> None:
        """Take the signals over, and prepare what data workers need to outlive them."""
        if threading.current_thread() is threading.main_thread():
            if os.environ.get(FORWARDED) == str(os.getppid()):
                os.setpgid(0, 0)  # else a terminal's Ctrl-C comes twice
            Finalize(None, self.exiting.__setitem__, (0, 1), exitpriority=10)  # before data workers are terminated
            get_temp_dir()  # for the workers' sockets, and removed at exit; one of their own they would leave behind
            super().listen()

    def _hear(self, number: int, frame) -> None:
        if self.signal is None:
            gc.collect()  # trainers are part of cycles
        if self._trainer() is None:  # training is over: the signal means what it meant before
            signal.signal(number, self._handlers[number] or signal.SIG_DFL)
            signal.raise_signal(number)
        else:
            super()._hear(number, frame)

    def _acknowledge(self) -> None:
        if self._trainer().is_data_parallel_master:
            super()._acknowledge()

    def _under_way(self) -> str:
        if self._trainer().cuda:
            return "update"
        return "pass"

    @contextmanager
    def busy(self):
        """Mark an update under way, or a checkpoint being written: no place to save."""
        before = self._busy
        self._busy = True
        try:
            yield
        finally:
            self._busy = before

    def agree(self, asked) -> None:
        """Take the sum of all processes' notes.

        From a GPU it comes in the background: what is to be waited for is over by then, the optimizer's step need not.
        """
        self._arrived = None
        if torch.is_tensor(asked) and asked.is_cuda:
            asked = asked.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.current_stream().record_event()
        super().agree(asked)

    def agreed_code(self) -> int:
        """Return the exit code that all processes end with; 0 as long as none was sent a signal."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return super().agreed_code()

    def give_up_if_interrupted(self) -> None:
        """Give the update up before its next pass. All processes come here, and agree.

        Raises:
            UpdateGivenUp: Ctrl-C was pressed.
        """
        asked = self.note()
        if self._trainer().data_parallel_world_size > 1:
            of_all = torch.tensor(asked)
            torch.distributed.all_reduce(of_all, group=self._trainer().data_parallel_process_group)
            asked = of_all.item()
        if asked >= MANY:
            self.agree(asked)
            raise UpdateGivenUp

    def save_if_asked(self) -> None:
        """Write the checkpoint, once; between updates, in all processes at the same time."""
        trainer = self._trainer()
        if trainer.data_parallel_world_size == 1:
            self.agree(self.note())
        if self.saved or self._busy or not self.agreed_code():
            return
        self.saved = True
        who = "another process was sent a signal"
        if self.signal:
            who = self.signal.name
        if not trainer.get_num_updates():
            logger.warning("%s: ends before the first update, with nothing to save", who)
            return
        with self.busy():
            path = checkpoint_utils.save_checkpoint(trainer.cfg.checkpoint, trainer, trainer.epoch_iterator, None)
        if trainer.not_saved:
            raise UserError(trainer.not_saved)
        what = "saved"
        if not path:
            what = "nothing is saved (--no-save or --no-last-checkpoints)"
            path = "what was saved before, if anything was"
        level = logging.WARNING if trainer.is_data_parallel_master else logging.DEBUG
        logger.log(
            level,
            f"{who}: {what} at {trainer.get_num_updates()} updates; before the next one the run ends with exit code "
            f"{self.agreed_code()}, and the same command resumes from {path}",
        )

    def end_if_saved(self) -> None:
        """End the process if its checkpoint is written, once all have come here.

        Raises:
            SystemExit: with code 75, or 130 after Ctrl-C.
        """
        if not self.saved:
            return
        trainer = self._trainer()
        if trainer.data_parallel_world_size > 1:  # the first one to go would have torchrun end the one that writes
            torch.distributed.barrier(distributed_utils.get_global_group())
        end_reader(trainer.epoch_iterator)
        if signal.SIGINT in self._handlers:
            signal.signal(signal.SIGINT, self._handlers[signal.SIGINT])
        sys.stdout.flush()
        raise SystemExit(self.agreed_code())


def end_reader(epoch_iterator) -> None:
    """End the thread that reads ahead: stopped by Python's exit in the middle of torch's code, it would abort it."""
    reader = getattr(getattr(epoch_iterator, "_cur_epoch_itr", None), "_itr", None)
    if isinstance(reader, BufferedIterator) and reader._consumer is not None:
        reader._consumer._max_len = 0  # it ends after the batch that it has at hand
        while not reader._queue.empty():
            reader._queue.get()
        reader._consumer.join(timeout=10)


def leaving_signals_to_the_run(set_worker_signal_handlers):
    """Keep a data worker alive after a signal to all processes, as Slurm sends: else the run ends before it has saved.

    The worker lives on for at most a minute, or until its run exits and terminates it.
    """
    inherited = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    set_worker_signal_handlers()
    if isinstance(inherited, Preemption):
        for number in (signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if inherited.exiting[0] else signal.alarm(WORKER_SECONDS))


def forwarding_signals(call_main, cfg, main, **kwargs):
    """Stand in for ``call_main``, which waits for the processes that it starts, or becomes the only one."""
    if not names_task_of_ours(cfg):
        return call_main(cfg, main, **kwargs)
    start_run()  # of a script that has not parsed a command line
    if "override_args" in kwargs:  # fairseq-validate; other commands have a default
        refuse_no_batch(cfg)
        if cfg.common_eval.path is None:
            raise UserError("--path: give the checkpoint")
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
    """Have Linux send a process of torchrun's a SIGTERM when torchrun dies, however it dies."""
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


def _follow_torchrun_without_gpu(cfg: Any) -> None:
    """Share the work as torchrun says where there is no GPU: fairseq divides by the number of GPUs, 0 perhaps."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.device_count() > 0 or cfg.distributed_init_method is not None or world_size == 1:
        return
    cfg.distributed_init_method = "env://"
    cfg.distributed_world_size = world_size
    cfg.distributed_rank = int(os.environ["RANK"])
    cfg.distributed_no_spawn = True


def broadcast_object(_, obj: Any, src_rank: int, group: Any, dist_device: torch.device) -> Any:
    """Stand in for fairseq's ``_broadcast_object_slow``, by torch's own."""
    objects = [obj]
    torch.distributed.broadcast_object_list(objects, src=src_rank, group=group, device=dist_device)
    return objects[0]


def gathering_without_gpu(all_gather_list, data, group=None, max_size=16384):
    """Stand in for ``all_gather_list(data)``, by torch's own where there is no GPU."""
    if torch.cuda.is_available():
        return all_gather_list(data, group, max_size)
    group = group or distributed_utils.get_global_group()
    gathered = [None] * distributed_utils.get_world_size(group)
    torch.distributed.all_gather_object(gathered, data, group=group)
    return gathered
