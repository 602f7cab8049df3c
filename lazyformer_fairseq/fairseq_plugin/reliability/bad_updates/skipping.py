"""Wrappers of fairseq's Trainer that let a run live through NaN, Inf and loss spikes; see ``update_guard``.

fairseq raises FloatingPointError at the first NaN in full precision and bf16, and the run is over. Here the guard
judges an update once its gradient has been summed over all processes, before the optimizer steps. A bad update leaves
``train_step`` by an exception unknown to fairseq: weights, optimizer, EMA and meters stay untouched.

fairseq still handles an overflow of fp16's loss scaler: the scaler halves its scale and fairseq tries the update
again. An overflow is about the scale, not the numbers, until the scale is at its minimum; only then is the update bad.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from fairseq.logging import metrics

from lazyformer_fairseq.fairseq_plugin.reliability.bad_updates.update_guard import BadUpdate, UpdateGuard

logger = logging.getLogger(__name__)


class ScalerOverflow(Exception):
    """fairseq's OverflowError under a name that it does not catch: its handler needs a GPU."""


def guard_of(trainer) -> UpdateGuard:
    """The trainer's guard; the first call makes it and hooks it to every batch's loss."""
    if not hasattr(trainer, "update_guard"):
        trainer.update_guard = UpdateGuard(trainer)
        trainer.get_criterion().register_forward_hook(trainer.update_guard.hear_batch)
    return trainer.update_guard


def is_guarded(trainer) -> bool:
    """False where processes see different gradients (BMUF, SlowMo, sharded weights), and on a TPU."""
    cfg = trainer.cfg
    local_steps = cfg.optimization.use_bmuf or cfg.distributed_training.ddp_backend == "slowmo"
    return not (local_steps or trainer.is_fsdp or trainer.tpu)


def skip_bad_updates(original, self, samples, *args, **kwargs):
    """For ``Trainer.train_step``."""
    if not is_guarded(self):
        return original(self, samples, *args, **kwargs)
    guard, updates, output = guard_of(self), self.get_num_updates(), None
    guard.begin_update()
    try:
        with _aggregators_left_behind():
            output = original(self, samples, *args, **kwargs)
    except BadUpdate as bad:
        if self.cfg.common.amp:
            self.optimizer.scaler.update()  # it has unscaled the gradients and expects a step
        guard.skip(bad, samples)
    except ScalerOverflow as overflow:
        logger.info("NOTE: gradient overflow detected, ignoring gradient, %s", overflow)
        self.zero_grad()
    else:
        if self.get_num_updates() > updates:
            guard.note_good_update()
    guard.log_counts()
    return output


def find_bad_updates(original, self, *args, **kwargs):
    """For ``Trainer.clip_grad_norm``: the last thing before the optimizer steps."""
    if not is_guarded(self):
        return original(self, *args, **kwargs)
    guard, amp = guard_of(self), self.cfg.common.amp
    try:
        norm = original(self, *args, **kwargs)
        if amp and not norm.isfinite():
            return norm  # an overflow, which torch's scaler handles within the optimizer's step
        return guard.judge(norm)
    except OverflowError as overflow:
        if self.cuda:
            raise
        raise ScalerOverflow(str(overflow)) from overflow
    except FloatingPointError as error:
        guard.read_numbers(torch.tensor(math.nan))
        if not amp:
            self.optimizer.scaler._iter += 1  # as its own skipping does; the next overflow divides by it
        raise BadUpdate("the gradient is NaN or Inf at the smallest loss scale") from error


def hear_all_processes(original, self, *args, **kwargs):
    """For ``Trainer._aggregate_logging_outputs``, where losses and sample sizes of all processes are summed anyway."""
    logs, sums = original(self, *args, **kwargs)
    if is_guarded(self):
        guard_of(self).hear_all_processes(logs, sums[0])
    return logs, sums


def save_counts(original, self, filename, extra_state):
    """For ``Trainer.save_checkpoint``."""
    if is_guarded(self):
        extra_state = {**extra_state, "bad_updates": guard_of(self).state_dict()}
    return original(self, filename, extra_state)


def load_counts(original, self, filename, reset_optimizer=False, *args, **kwargs):
    """For ``Trainer.load_checkpoint``. A run that starts from another's weights starts to count anew."""
    extra_state = original(self, filename, reset_optimizer, *args, **kwargs)
    if is_guarded(self):
        guard = guard_of(self)
        if extra_state is not None and not reset_optimizer and "bad_updates" in extra_state:
            guard.load_state_dict(extra_state["bad_updates"])
        if self.is_data_parallel_master:
            guard.checkpoints.leave_behind(self.get_num_updates())
    return extra_state


@contextmanager
def _aggregators_left_behind() -> Iterator[None]:
    """Leaves fairseq's contexts of meters, which do not end themselves when an exception passes through them."""
    active, counts = metrics._active_aggregators.copy(), metrics._active_aggregators_cnt.copy()
    try:
        yield
    except (BadUpdate, ScalerOverflow):
        for changed, before in ((metrics._active_aggregators, active), (metrics._active_aggregators_cnt, counts)):
            changed.clear()
            changed.update(before)
        raise
