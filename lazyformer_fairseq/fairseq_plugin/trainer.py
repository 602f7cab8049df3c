"""The trainer of this package's tasks: fairseq's trainer plus guarded updates, safe checkpoints and signal handling.

Because of ``replacements.py``, fairseq creates a :class:`SafeTrainer` wherever its own Trainer is constructed with one
of this package's tasks: in fairseq-train, fairseq-hydra-train, their child processes, and scripts. Stock tasks keep
fairseq's Trainer.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq import checkpoint_utils
from fairseq import trainer as fairseq_trainer
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq.models.ema import EMA
from typing_extensions import override

from lazyformer_fairseq.data.datasets.masked_blocks import UPDATE_DEPENDENT_KEYS
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim.half_precision import EXACT_ENOUGH, FP16Optimizer
from lazyformer_fairseq.fairseq_plugin.optim.schedules import set_updates_per_epoch
from lazyformer_fairseq.fairseq_plugin.record import RunRecorder
from lazyformer_fairseq.fairseq_plugin.reliability import out_of_memory
from lazyformer_fairseq.fairseq_plugin.reliability.bad_updates import TrainerGuard, can_be_guarded
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import (
    LAST,
    NotSavedError,
    choose_for_all,
    listed_name,
    save_whole,
)
from lazyformer_fairseq.fairseq_plugin.reliability.options import is_task_of_ours, listed_updates
from lazyformer_fairseq.fairseq_plugin.reliability.preemption import Preemption, UpdateAbandoned
from lazyformer_fairseq.fairseq_plugin.reliability.words import refuse_beyond_budget, word_counter
from lazyformer_fairseq.fairseq_plugin.replacements import start_run
from lazyformer_fairseq.fairseq_plugin.screen import Screen
from lazyformer_fairseq.modules.shared_experts import SharedExperts, distribute_experts
from lazyformer_fairseq.modules.timing import SELECTOR
from lazyformer_fairseq.storage.checkpoint_file import first_line, on_cpu
from lazyformer_fairseq.training.muon import mark_matrices
from lazyformer_fairseq.training.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

FAIRSEQS_MISMATCH = "does not match; please reset the optimizer (--reset-optimizer). "


class SafeTrainer(fairseq_trainer.Trainer):
    """fairseq's trainer with guarded updates, safe checkpoints and signal handling.

    Methods marked ``@override`` extend fairseq's methods; their docstrings describe only the additions.

    Attributes:
        preemption: the stop-signal handler, which becomes active just before the checkpoint is loaded.
        takes_signals: whether `preemption` handles signals; False if a script that drives several runs handles them.
        guard: the guard against bad updates; None if processes see different gradients.
        screen: the screen output for ``--log-seconds``.
        recorder: the writer of ``run.json`` and ``metrics.jsonl``.
        epoch_iterator: the current iterator over the training data, which is also needed to save between epochs.
        not_saved: the reason the last save failed; None if it succeeded.
        experts: the model's experts, distributed over processes; None if each process has all of them.
        back_ends: the back ends selected by ``--attention-backend auto``, the same in all processes.
        word_counter: the counter of words that the model has read.
    """

    takes_signals = True
    epoch_iterator: Any = None
    not_saved: Optional[str] = None

    @staticmethod
    def serves(cfg: Any = None, task: Any = None, *others: Any, **named: Any) -> bool:
        """Return whether a Trainer constructed with these arguments is for one of this package's tasks."""
        return is_task_of_ours(type(task))

    def __init__(self, cfg: Any, task: Any, model: Any, *args: Any, **kwargs: Any):
        start_run()  # for a script that has not parsed a command line
        self.experts = shared_experts(cfg, model)
        self._whole: Optional[tuple[dict, dict]] = None  # model and optimizer states, gathered for a checkpoint
        with out_of_memory.explained(partial(out_of_memory.before_training, model)):
            super().__init__(cfg, task, model, *args, **kwargs)
        self._began = time.monotonic()
        SELECTOR.measures = self.is_data_parallel_master
        SELECTOR.waits = False
        self.back_ends: dict[str, Any] = {}
        self.preemption = Preemption(self)
        self.guard: Optional[TrainerGuard] = None
        if can_be_guarded(self):
            self.guard = TrainerGuard(self)
        self.screen = Screen(self)
        self.recorder = RunRecorder(self)
        task.after_validation = self.recorder.add_validation
        self._passes: Optional[tuple[int, int]] = None  # (passes begun, passes in total) in the current update
        self._tokens = 0  # tokens in the current update: first this process's, then the sum over processes
        self.word_counter = word_counter(cfg)

    @override
    def get_train_iterator(self, epoch, *args, **kwargs):
        """Also set the learning-rate schedule's epoch length, which is unknown until the data is loaded."""
        self.epoch_iterator = super().get_train_iterator(epoch, *args, **kwargs)
        set_updates_per_epoch(self, epoch)
        return self.epoch_iterator

    @override
    def get_valid_iterator(self, subset, *args, **kwargs):
        """Store the split's name for the run record."""
        self.recorder.held_out = subset
        return super().get_valid_iterator(subset, *args, **kwargs)

    @override
    def _build_optimizer(self):
        """Mark the sublayers' matrices for Muon, and make the optimizer load only this process's experts."""
        if self.cfg.optimizer._name == "muon":
            mark_matrices(self._model)
        super()._build_optimizer()
        if self.experts is None:
            return
        load = self._optimizer.load_state_dict
        self._optimizer.load_state_dict = lambda state, *more: load(
            self.experts.own_optimizer(state, *self._updated()),
            *more,
        )

    def _updated(self) -> tuple[list[dict], list[torch.Tensor]]:
        """Return the optimizer's parameter groups, and the weights that the optimizer updates, in the model's order."""
        groups = self.optimizer.optimizer.param_groups
        copies = getattr(self.optimizer, "fp32_params", None)
        if copies:
            return groups, copies
        return groups, [weight for weight in self.model.parameters() if weight.requires_grad]

    # Updates.

    @override
    def train_step(self, samples, raise_oom=False):
        """Exit if a signal requested it, skip the update if it is bad, record it, and save permanent checkpoints."""
        self.preemption.end_if_saved()
        before = self.get_num_updates()
        self._tokens = sum(int(sample.get("ntokens", 0)) for sample in samples if sample)
        bring_memory_back = None
        if not self.cuda:
            bring_memory_back = self.task.keep_memory()
        try:
            with self.preemption.busy():
                update = partial(self._update, samples)
                if self.guard is None:
                    output = update()
                else:
                    output = self.guard.watch(update, samples)
                if self.get_num_updates() == before + 1:
                    self._share_back_ends()
                    self._save_for_good()
        except UpdateAbandoned:
            self.epoch_iterator._cur_epoch_itr.n -= len(samples)
            if bring_memory_back:
                bring_memory_back()
            self.preemption.save_if_asked()
            self.preemption.end_if_saved()
            raise
        if output is not None:
            self.recorder.add_update()
        return output

    def _share_back_ends(self) -> None:
        """Broadcast the back ends that the first process selected, after updates 1, 2, 4, 8 and so on."""
        updates = self.get_num_updates()
        if self.data_parallel_world_size == 1:
            self.back_ends = SELECTOR.state_dict()
        elif updates & (updates - 1) == 0:
            group = self.data_parallel_process_group
            self.back_ends = distributed_utils.broadcast_object(SELECTOR.state_dict(), 0, group, self.device)
            SELECTOR.load_state_dict(self.back_ends)

    def _update(self, samples: list) -> Optional[dict]:
        """Run fairseq's update, accumulating gradients in fp32 if the update has many batches."""
        sums = nullcontext()
        if len(samples) > EXACT_ENOUGH and self.guard is not None and type(self.optimizer) is FP16Optimizer:
            groups = [self.data_parallel_process_group] if self.data_parallel_world_size > 1 else []
            sums = self.optimizer.summing_in_fp32(groups)
        self._passes = (0, len(samples))
        try:
            with out_of_memory.explained(partial(out_of_memory.in_training, self, samples)), sums:
                return super().train_step(samples, True)  # raise_oom
        finally:
            self._passes = None

    @override
    def _prepare_sample(self, sample, is_dummy=False):
        """Adapt the batch to the current update, show progress, and abandon the update after Ctrl-C.

        fairseq calls this before each pass of an update.
        """
        if sample and not UPDATE_DEPENDENT_KEYS.isdisjoint(sample) and not is_dummy:
            sample = self.task.at_update(sample, self.get_num_updates())
        if self._passes and not is_dummy:
            made, of = self._passes
            self.screen.show_progress(made, of)
            if not self.cuda:
                self.preemption.give_up_if_interrupted()
            self._passes = (made + 1, of)
        return super()._prepare_sample(sample, is_dummy)

    @override
    def _aggregate_logging_outputs(self, logging_outputs, *extra_stats_to_sum, ignore=False):
        """Also sum the stop requests and token counts over processes, and pass the logged values to the guard."""
        sums = (*extra_stats_to_sum, self.preemption.note(), self._tokens)
        logging_outputs, sums = super()._aggregate_logging_outputs(logging_outputs, *sums, ignore=ignore)
        *sums, asked, tokens = sums
        self.preemption.agree(asked)
        self._tokens = int(tokens)
        if self.guard is not None:
            self.guard.hear_all_processes(logging_outputs, sums[0])
        return logging_outputs, sums

    @override
    def clip_grad_norm(self, clip_norm):
        """Have the guard check the update, because this is the last call before the optimizer step."""
        clip = partial(super().clip_grad_norm, clip_norm)
        if self.experts is not None:
            clip = partial(self.optimizer.clip_grad_norm, clip_norm, self._norm_with_experts)
        if self.guard is None:
            return clip()
        return self.guard.watch_clipping(clip)

    def _norm_with_experts(self, norm: torch.Tensor) -> torch.Tensor:
        groups, _ = self._updated()
        return self.experts.norm(norm, (weight for group in groups for weight in group["params"]))

    @override
    def cumulative_training_time(self):
        """Save if a signal requested it; fairseq calls this after logging an update and before validation."""
        self.preemption.save_if_asked()
        return super().cumulative_training_time()

    @override
    def _local_cumulative_training_time(self):
        """Measure with a monotonic clock, because fairseq's clock can jump."""
        return time.monotonic() - self._began + self._previous_training_time

    @override
    def valid_step(self, sample, raise_oom=False):
        """Save after a validation batch if a signal requested it, because a full validation may take long."""
        with out_of_memory.explained(partial(out_of_memory.in_validation, self, sample)):
            output = super().valid_step(sample, raise_oom)
        self.preemption.save_if_asked()
        return output

    @override
    def _reduce_and_log_stats(self, *args, **kwargs):
        """Remove closed metric contexts, which fairseq would keep.

        fairseq opens a context with a new random name in each update and never removes the name from its counts. This
        leaks about 200 bytes per update into a dictionary that each validation copies.
        """
        output = super()._reduce_and_log_stats(*args, **kwargs)
        counts = metrics._active_aggregators_cnt
        for name in [name for name, count in counts.items() if not count]:
            del counts[name]
        return output

    @override
    def _build_ema(self):
        """Average only floating-point weights, and copy all other tensors, such as ``dictionary_sha256``."""
        if self.cfg.ema.store_ema:
            integers = {name for name, value in self._model.state_dict().items() if not value.is_floating_point()}
            self._ema = EMA(self._model, self.cfg.ema, self.device, integers)
            logger.info("Exponential Moving Average Shadow Model is initialized.")

    # Checkpoints.

    def gather(self) -> None:
        """Gather the state that is distributed over processes: stream memories and shared experts.

        All processes must call this.
        """
        self.task.gather_memory()
        if self.experts is None:
            return
        with self.preemption.busy():
            optimizer = self.optimizer.state_dict()
        optimizer = self.experts.whole_optimizer(optimizer, *self._updated())
        self._whole = (self.experts.whole_weights(self.model.state_dict()), optimizer)

    def forget_gathered(self) -> None:
        """Release the gathered experts after a checkpoint is written."""
        self._whole = None

    @override
    def state_dict(self):
        """Include the gathered experts."""
        with self.preemption.busy():  # fairseq reads the training time, which must not trigger another save
            state = super().state_dict()
        if self._whole is not None:
            state["model"], optimizer = self._whole
            self._whole = None
            if "last_optimizer_state" in state:
                state["last_optimizer_state"] = optimizer
        return state

    @override
    def save_checkpoint(self, filename, extra_state, with_optimizer=True):
        """Save atomically, with additional state.

        The additional state consists of the selected back ends and the counters for skipped updates, ``--patience``
        and tokens read. fairseq's crash.pt is not saved after a user error, and nothing is saved if shared experts have
        not been gathered.

        Returns:
            The path of the file; None if it was not saved.
        """
        if not self.should_save_checkpoint_on_current_rank:
            return None
        if Path(filename).name == "crash.pt" and isinstance(sys.exc_info()[1], UserError):
            return None
        if self.experts is not None and self._whole is None:
            logger.warning("not writing %s, because it would lack the other processes' experts", filename)
            return None
        state = self.state_dict()
        if not with_optimizer:
            state.pop("last_optimizer_state", None)
        state = on_cpu(state)
        state["extra_state"] |= {
            **extra_state,
            "attention_back_ends": self.back_ends,
            "early_stopping": dict(_early_stopping()),
            "tokens_read": self.word_counter.tokens,
        }
        if self.guard is not None:
            state["extra_state"]["bad_updates"] = self.guard.state_dict()
        save_whole(state, filename)
        logger.info("saved %s", os.path.abspath(filename))
        return os.path.abspath(filename)

    @override
    def load_checkpoint(
        self,
        filename,
        reset_optimizer=False,
        reset_lr_scheduler=False,
        optimizer_overrides=None,
        reset_meters=False,
    ):
        """Also restore the additional state, the task's memory, and state that fairseq drops at the end of an epoch.

        Raises:
            UserError: the checkpoint is for a different model, optimizer or criterion, or is damaged.
        """
        resets = (reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters)
        with _checkpoint_errors_named(filename):
            wall = metrics.get_meter("default", "wall")
            extra_state = super().load_checkpoint(filename, *resets)
            loaded_wall = metrics.get_meter("default", "wall")
            if wall is not None and loaded_wall is not None:  # fairseq restores this meter as stopped at 0
                loaded_wall.start_time = wall.start_time
            if self.guard is not None:
                self.guard.load(extra_state, reset_optimizer)
            if extra_state is None:
                return None
            self._began = time.monotonic()
            self.recorder.rewind(self.get_num_updates())
            self.back_ends = SELECTOR.load_state_dict(extra_state.get("attention_back_ends", {}))
            self.word_counter.tokens = _count_of_tokens(extra_state.get("tokens_read"))
            if not (reset_optimizer or reset_meters):
                _resume_early_stopping(extra_state.get("early_stopping"))
            self.task.take_from_checkpoint(extra_state)  # fairseq sends the state to all processes, but not to the task
        if extra_state["train_iterator"]["iterations_in_epoch"]:
            return extra_state
        # The checkpoint was written at the end of an epoch. Averages over the last updates continue across epochs,
        # whereas averages over an epoch restart. The run's next step would have been to pass the validation loss to
        # the schedule.
        if not reset_meters:
            meter = extra_state.get("metrics", {}).get("train_inner")
            if meter is not None:
                metrics.load_state_dict({"train_inner": meter})
        if not (reset_optimizer or reset_lr_scheduler):
            self.lr_step(extra_state["train_iterator"]["epoch"] - 1, extra_state.get("val_loss"))
        return extra_state

    def _save_for_good(self) -> None:
        """Save the ``--keep-updates-list`` and ``--checkpoint-words`` checkpoints that are due after this update."""
        due = self.word_counter.add(self._tokens)
        if self.cfg.checkpoint.no_save:
            return
        suffix = self.checkpoint_suffix
        updates = self.get_num_updates()
        if updates in listed_updates(getattr(self.task.cfg, "keep_updates_list", None)):
            self._save_apart(listed_name(updates, suffix), f"the checkpoint of update {updates} is lost")
        for name in due:
            self._save_apart(f"{name}{suffix}.pt", f"the checkpoint {name} is lost", with_optimizer=False)

    def _save_apart(self, name: str, lost: str, with_optimizer: bool = True) -> None:
        """Save a complete checkpoint under a file name that fairseq neither resumes from nor removes.

        Args:
            name: the file name.
            lost: the end of the warning that is logged if the file cannot be saved.
            with_optimizer: whether to include the optimizer state.
        """
        self.gather()
        self.consolidate_optimizer()
        extra_state = {
            "train_iterator": self.epoch_iterator.state_dict(),
            "val_loss": None,
            **self.task.get_checkpoint_dict(),
        }
        if hasattr(checkpoint_utils.save_checkpoint, "best"):
            extra_state["best"] = checkpoint_utils.save_checkpoint.best
        path = Path(self.cfg.checkpoint.save_dir) / name
        try:
            self.save_checkpoint(str(path), extra_state, with_optimizer)
        except NotSavedError as error:
            logger.warning("%s\nThe run continues; %s", error, lost)

    def limit_reached(self, epoch_itr: Any, seconds: float) -> str:
        """Return the limit that the run has reached, such as "--max-epoch 10"; "" if it has reached none.

        Args:
            epoch_itr: the training data iterator.
            seconds: the run's training time in seconds, summed over all its starts.
        """
        limits = self.cfg.optimization
        patience = self.cfg.checkpoint.patience
        if 0 < (limits.max_update or 0) <= self.get_num_updates():
            return f"--max-update {limits.max_update}"
        if 0 < (limits.max_epoch or 0) < epoch_itr.next_epoch_idx:
            return f"--max-epoch {limits.max_epoch}"
        if 0 < limits.stop_time_hours < seconds / 3600:
            return f"--stop-time-hours {limits.stop_time_hours:g}"
        if 0 < patience <= _early_stopping().get("num_runs", 0):
            return f"--patience {patience}"
        return ""

    def ends_here(self, epoch_itr: Any, checkpoint: Path) -> bool:
        """Return whether the run was already finished before this start; if so, keep fairseq from training.

        Stock fairseq would perform one more update and write all checkpoints again.

        Args:
            epoch_itr: the training data iterator, at the checkpoint's position.
            checkpoint: the loaded file.

        Raises:
            UserError: the checkpoint was written by a different run, so this run would end without writing one.
        """
        limit = self.limit_reached(epoch_itr, self._previous_training_time)
        if not limit or not self.get_num_updates():  # fine-tuning starts at update 0
            return False
        made = f"{checkpoint} has completed {self.get_num_updates():,} updates"
        if checkpoint.absolute().parent != Path(self.cfg.checkpoint.save_dir).absolute():
            raise UserError(f"{limit}: {made} already, so nothing is left to train; set a higher limit")
        if self.is_data_parallel_master:
            self.screen.report_finished(f"{made}, and {limit} ends the run; to continue, set a higher limit")
        self.cfg.optimization.max_epoch = -1  # fairseq checks this next, and treats 0 as no limit
        return True


def shared_experts(cfg: Any, model: Any) -> Optional[SharedExperts]:
    """Distribute a model's experts over all processes; return None if the settings do not allow this."""
    how = cfg.distributed_training
    shares_weights_out = how.zero_sharding != "none" or how.ddp_backend in ("slowmo", "fully_sharded")
    if how.distributed_world_size == 1 or shares_weights_out:
        return None
    if cfg.optimization.use_bmuf or cfg.ema.store_ema or cfg.common.tpu:
        return None
    model.shared_experts = distribute_experts(model, distributed_utils.get_data_parallel_group())
    return model.shared_experts


def _early_stopping() -> dict[str, Any]:
    """Return fairseq's ``--patience`` state: `num_runs` (validations without improvement) and `best` (the best metric).

    fairseq stores both as attributes of a function, whose module is ``__main__`` if fairseq was started with
    ``python -m``.
    """
    for name in ("__main__", "fairseq_cli.train"):
        if counter := getattr(sys.modules.get(name), "should_stop_early", None):
            return vars(counter)
    return {}


def _count_of_tokens(saved: Any) -> int:
    """Validate a checkpoint's token count; return 0 if it is missing or invalid."""
    if type(saved) is int:
        return max(0, saved)
    return 0


def _resume_early_stopping(saved: Any) -> None:
    """Restore the early-stopping counter from a checkpoint; ignore an invalid value."""
    if not isinstance(saved, dict):
        return
    num_runs = saved.get("num_runs")
    best = saved.get("best")
    if type(num_runs) is int and isinstance(best, (int, float)):
        _early_stopping().update(num_runs=num_runs, best=best)


@contextmanager
def _checkpoint_errors_named(filename: str) -> Iterator[None]:
    """Convert fairseq and torch errors about a damaged or incompatible checkpoint to a UserError that names the file.

    Communication and out-of-memory errors propagate unchanged, because they are not about the file.
    """
    try:
        yield
    except (UserError, torch.distributed.DistError):
        raise
    except AssertionError as error:
        what, found, names = str(error).partition(FAIRSEQS_MISMATCH)
        if not found:
            raise
        there, _, here = names.partition(" vs ")
        raise UserError(
            f"{filename} was trained with the {what.strip().lower()} {there}, not {here}; use the options that it was "
            "trained with, a different --save-dir, or --reset-optimizer to continue with a new optimizer state"
        ) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        cause = error.__context__ or error  # fairseq's own error hides what is wrong with the weights
        raise UserError(
            f"{filename} does not match this run, or is damaged ({type(cause).__name__}: {first_line(cause)}); use "
            "the options that it was trained with, a different --save-dir, or --reset-optimizer to continue with a new "
            "optimizer state"
        ) from error


# Replacements for fairseq's functions; replacements.py installs them.


def loading_the_intact_one(load_checkpoint, cfg, trainer, **kwargs):
    """Replace ``checkpoint_utils.load_checkpoint``: load the newest intact checkpoint and prepare the run.

    fairseq calls this once, before the first update. Signals are handled from here on.
    """
    if not isinstance(trainer, SafeTrainer):
        return load_checkpoint(cfg, trainer, **kwargs)
    if trainer.takes_signals:
        trainer.preemption.listen()
    _early_stopping().clear()  # an earlier run in this process may have left state behind
    cfg, chosen = choose_for_all(cfg, trainer)
    with out_of_memory.explained(partial(out_of_memory.before_training, trainer.get_model())):
        extra_state, epoch_itr = load_checkpoint(cfg, trainer, **kwargs)
    checkpoint = chosen or Path(cfg.save_dir) / LAST
    is_over = extra_state is not None and trainer.ends_here(epoch_itr, checkpoint)
    if not is_over:
        refuse_beyond_budget(trainer.cfg, trainer.get_num_updates(), trainer.word_counter)
        with out_of_memory.explained(partial(out_of_memory.in_training, trainer, [trainer._dummy_batch])):
            trainer.screen.introduce()  # also times a pass, which may run out of memory
        trainer.recorder.begin()
    return extra_state, epoch_itr


def saving_if_there_is_room(save_checkpoint, cfg, trainer, epoch_itr, val_loss):
    """Replace ``checkpoint_utils.save_checkpoint``: continue the run if the checkpoint cannot be written.

    All processes call this, although only the first one writes. If a file cannot be written, this logs a warning and
    returns None, and saving is retried at the next checkpoint.

    Raises:
        UserError: the file cannot be written, and training has finished, so there is no later checkpoint.
    """
    if not isinstance(trainer, SafeTrainer):
        return save_checkpoint(cfg, trainer, epoch_itr, val_loss)
    if not cfg.no_save:
        trainer.gather()
    trainer.not_saved = None
    try:
        return save_checkpoint(cfg, trainer, epoch_itr, val_loss)
    except NotSavedError as error:
        trainer.not_saved = str(error)
        if trainer.limit_reached(epoch_itr, trainer.cumulative_training_time()):
            raise UserError(
                f"{error}\nTraining has finished; free up disk space and run the same command again"
            ) from error
        logger.warning("%s\nThe run continues, and saving is retried at the next checkpoint", error)
        return None
    finally:
        trainer.forget_gathered()
