"""fairseq's trainer for our tasks: what keeps a run safe, in the order in which it happens.

fairseq makes a :class:`SafeTrainer` wherever its own Trainer is asked for with a task of ours (``replacements.py``):
in fairseq-train, fairseq-hydra-train, their processes, and in a script. Stock tasks keep fairseq's.
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

from lazyformer_fairseq.data.datasets.masked_blocks import CHANGING
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim.half_precision import EXACT_ENOUGH, FP16Optimizer
from lazyformer_fairseq.fairseq_plugin.optim.schedules import tell_updates_per_epoch
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
from lazyformer_fairseq.fairseq_plugin.reliability.preemption import Preemption, UpdateGivenUp
from lazyformer_fairseq.fairseq_plugin.reliability.words import refuse_beyond_budget, word_counter
from lazyformer_fairseq.fairseq_plugin.replacements import start_run
from lazyformer_fairseq.fairseq_plugin.screen import Screen
from lazyformer_fairseq.modules.shared_experts import SharedExperts, share_out
from lazyformer_fairseq.modules.timing import SELECTOR
from lazyformer_fairseq.storage.checkpoint_file import first_line, on_cpu
from lazyformer_fairseq.training.muon import mark_matrices
from lazyformer_fairseq.training.out_of_memory import is_out_of_memory

logger = logging.getLogger(__name__)

FAIRSEQS_MISMATCH = "does not match; please reset the optimizer (--reset-optimizer). "


class SafeTrainer(fairseq_trainer.Trainer):
    """fairseq's trainer with guarded updates and checkpoints.

    Every method that says ``@override`` does what fairseq's does, and what its docstring adds.

    Attributes:
        preemption: takes signals, once training has loaded its checkpoint.
        takes_signals: whether it is to; a driver of several trainings takes them itself.
        guard: judges updates; None where processes see different gradients.
        screen: shows the run, for ``--log-seconds``.
        recorder: writes ``run.json`` and ``metrics.jsonl``.
        epoch_iterator: the one in use, for whoever saves between epochs.
        not_saved: why the last save failed, or None.
        experts: the model's experts, shared out over processes; None where each holds all.
        back_ends: the back ends that ``--attention-backend auto`` has chosen, as all processes know them.
        words_read: counts what the model has read.
    """

    takes_signals = True
    epoch_iterator: Any = None
    not_saved: Optional[str] = None

    @staticmethod
    def serves(cfg: Any = None, task: Any = None, *others: Any, **named: Any) -> bool:
        """Return whether a run with these arguments of fairseq's Trainer is one of ours."""
        return is_task_of_ours(type(task))

    def __init__(self, cfg: Any, task: Any, model: Any, *args: Any, **kwargs: Any):
        start_run()  # of a script that parses nothing
        self.experts = shared_experts(cfg, model)
        self._whole: Optional[tuple[dict, dict]] = None  # weights and optimizer, gathered for a checkpoint
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
        self._passes: Optional[tuple[int, int]] = None  # of the update under way: begun, and all
        self._tokens = 0  # of the update under way: this process's, then those of all
        self.words_read = word_counter(cfg)

    @override
    def get_train_iterator(self, epoch, *args, **kwargs):
        """Tell the schedule, which is built before the data, how long an epoch is."""
        self.epoch_iterator = super().get_train_iterator(epoch, *args, **kwargs)
        tell_updates_per_epoch(self, epoch)
        return self.epoch_iterator

    @override
    def get_valid_iterator(self, subset, *args, **kwargs):
        """Remember which split is read, for the record."""
        self.recorder.held_out = subset
        return super().get_valid_iterator(subset, *args, **kwargs)

    @override
    def _build_optimizer(self):
        """Mark the matrices of sublayers for Muon, and load only this process's experts."""
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
        """Return the optimizer's groups, and the weights that it updates, in the model's order."""
        copies = getattr(self.optimizer, "fp32_params", None)
        return self.optimizer.optimizer.param_groups, copies or [p for p in self.model.parameters() if p.requires_grad]

    # An update.

    @override
    def train_step(self, samples, raise_oom=False):
        """End a run that a signal asked to; skip a bad update; record an interval; save what is kept for good."""
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
        except UpdateGivenUp:
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
        """Tell the other processes what the first one has chosen, after updates 1, 2, 4, 8, and so on."""
        updates = self.get_num_updates()
        if self.data_parallel_world_size == 1:
            self.back_ends = SELECTOR.state_dict()
        elif updates & (updates - 1) == 0:
            group = self.data_parallel_process_group
            self.back_ends = distributed_utils.broadcast_object(SELECTOR.state_dict(), 0, group, self.device)
            SELECTOR.load_state_dict(self.back_ends)

    def _update(self, samples: list) -> Optional[dict]:
        """Have fairseq make an update, with exact sums of many batches."""
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
        """Make a batch that depends on the update that of this one; say how far the update is, or give it up.

        fairseq calls this before each pass of an update.
        """
        if sample and not CHANGING.isdisjoint(sample) and not is_dummy:
            sample = self.task.at_update(sample, self.get_num_updates())
        if self._passes and not is_dummy:
            made, of = self._passes
            self.screen.tell(made, of)
            if not self.cuda:
                self.preemption.give_up_if_interrupted()
            self._passes = (made + 1, of)
        return super()._prepare_sample(sample, is_dummy)

    @override
    def _aggregate_logging_outputs(self, logging_outputs, *extra_stats_to_sum, ignore=False):
        """Add the note of signals and the tokens read to the sums over processes; tell the guard."""
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
        """Have the guard judge the update: this is the last call before the optimizer steps."""
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
        """Save, if a signal asked for it: fairseq calls this after an update is logged, before validation."""
        self.preemption.save_if_asked()
        return super().cumulative_training_time()

    @override
    def _local_cumulative_training_time(self):
        """Return seconds of a clock that never jumps, as fairseq's does."""
        return time.monotonic() - self._began + self._previous_training_time

    @override
    def valid_step(self, sample, raise_oom=False):
        """Save after a batch of validation, which may be long, if a signal asked for it."""
        with out_of_memory.explained(partial(out_of_memory.in_validation, self, sample)):
            output = super().valid_step(sample, raise_oom)
        self.preemption.save_if_asked()
        return output

    @override
    def _reduce_and_log_stats(self, *args, **kwargs):
        """Forget contexts of meters that have ended.

        fairseq opens one under a new random name in each update, counts contexts by name and keeps the names: some 200
        bytes per update, and a dictionary that it copies in each validation.
        """
        output = super()._reduce_and_log_stats(*args, **kwargs)
        counts = metrics._active_aggregators_cnt
        for name in [name for name, count in counts.items() if not count]:
            del counts[name]
        return output

    @override
    def _build_ema(self):
        """Average floating-point weights alone; take the newest of others, such as ``dictionary_sha256``."""
        if self.cfg.ema.store_ema:
            integers = {name for name, value in self._model.state_dict().items() if not value.is_floating_point()}
            self._ema = EMA(self._model, self.cfg.ema, self.device, integers)
            logger.info("Exponential Moving Average Shadow Model is initialized.")

    # Checkpoints.

    def gather(self) -> None:
        """Gather what only all processes together have: streams' memory and shared experts. All processes call it."""
        self.task.gather_memory()
        if self.experts is None:
            return
        with self.preemption.busy():
            optimizer = self.optimizer.state_dict()
        optimizer = self.experts.whole_optimizer(optimizer, *self._updated())
        self._whole = (self.experts.whole_weights(self.model.state_dict()), optimizer)

    def forget_gathered(self) -> None:
        """Drop the experts that were gathered, after a checkpoint."""
        self._whole = None

    @override
    def state_dict(self):
        """Use the experts that were gathered. Asking for the time must not start another save."""
        with self.preemption.busy():
            state = super().state_dict()
        if self._whole is not None:
            state["model"], optimizer = self._whole
            self._whole = None
            if "last_optimizer_state" in state:
                state["last_optimizer_state"] = optimizer
        return state

    @override
    def save_checkpoint(self, filename, extra_state, with_optimizer=True):
        """Save whole or not at all; also counts of skipped updates and of ``--patience``, and chosen back ends.

        fairseq's crash.pt is left out where the user made a mistake. Of experts that are shared out, and were not
        gathered, there is no whole.
        """
        if not self.should_save_checkpoint_on_current_rank:
            return None
        if Path(filename).name == "crash.pt" and isinstance(sys.exc_info()[1], UserError):
            return None
        if self.experts is not None and self._whole is None:
            logger.warning("%s is not written: it would lack the experts of other processes", filename)
            return None
        state = self.state_dict()
        if not with_optimizer:
            state.pop("last_optimizer_state", None)
        state = on_cpu(state)
        state["extra_state"] |= {
            **extra_state,
            "attention_back_ends": self.back_ends,
            "early_stopping": dict(_early_stopping()),
            "tokens_read": self.words_read.tokens,
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
        """Also load what was skipped so far and what the task carries; keep what fairseq forgets of an epoch.

        Raises:
            UserError: the checkpoint is of another model, optimizer or criterion, or is damaged.
        """
        resets = (reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters)
        with _named_where_it_does_not_fit(filename):
            wall = metrics.get_meter("default", "wall")
            extra_state = super().load_checkpoint(filename, *resets)
            loaded_wall = metrics.get_meter("default", "wall")
            if wall is not None and loaded_wall is not None:  # fairseq loads it stopped, at 0
                loaded_wall.start_time = wall.start_time
            if self.guard is not None:
                self.guard.load(extra_state, reset_optimizer)
            if extra_state is None:
                return None
            self._began = time.monotonic()
            self.recorder.rewind(self.get_num_updates())
            self.back_ends = SELECTOR.load_state_dict(extra_state.get("attention_back_ends", {}))
            self.words_read.tokens = _count_of_tokens(extra_state.get("tokens_read"))
            if not (reset_optimizer or reset_meters):
                _resume_early_stopping(extra_state.get("early_stopping"))
            self.task.take_from_checkpoint(extra_state)  # fairseq sends the state to all processes, not to the task
        if extra_state["train_iterator"]["iterations_in_epoch"]:
            return extra_state
        # The epoch was over. The log's averages over the last updates continue from epoch to epoch; only those of the
        # whole epoch start anew. The schedule would have received its validation next.
        if not reset_meters and (meter := extra_state.get("metrics", {}).get("train_inner")) is not None:
            metrics.load_state_dict({"train_inner": meter})
        if not (reset_optimizer or reset_lr_scheduler):
            self.lr_step(extra_state["train_iterator"]["epoch"] - 1, extra_state.get("val_loss"))
        return extra_state

    def _save_for_good(self) -> None:
        """Save what ``--keep-updates-list`` and ``--checkpoint-words`` keep after the update that was just made."""
        due = self.words_read.add(self._tokens)
        if self.cfg.checkpoint.no_save:
            return
        suffix = self.checkpoint_suffix
        updates = self.get_num_updates()
        if updates in listed_updates(getattr(self.task.cfg, "keep_updates_list", None)):
            self._save_apart(listed_name(updates, suffix), f"--keep-updates-list has lost update {updates}")
        for name in due:
            self._save_apart(f"{name}{suffix}.pt", f"--checkpoint-words has lost {name}", with_optimizer=False)

    def _save_apart(self, name: str, lost: str, with_optimizer: bool = True) -> None:
        """Save a checkpoint under a name that fairseq neither resumes from nor removes, with all that it saves.

        Args:
            name: the name of the file.
            lost: what a warning says is lost where there is no room for the file.
            with_optimizer: whether to save the state of the optimizer too.
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
            logger.warning("%s\nThe run trains on; %s", error, lost)

    def limit_reached(self, epoch_itr: Any, seconds: float) -> str:
        """Return the option that ends the run here, with its value; "" if the run has more to train.

        Args:
            epoch_itr: the iterator of the training data.
            seconds: the time that the run has trained, over all its starts.
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
        """Return whether the run had ended before it was started again, and leave it as it is then.

        fairseq would make one more update, and write all checkpoints anew.

        Args:
            epoch_itr: the iterator of the training data, at the place where the checkpoint left it.
            checkpoint: the file that was loaded.

        Raises:
            UserError: the checkpoint is another run's, so that this run would end without a checkpoint of its own.
        """
        limit = self.limit_reached(epoch_itr, self._previous_training_time)
        if not limit or not self.get_num_updates():  # fine-tuning begins with none
            return False
        made = f"{checkpoint} has made {self.get_num_updates():,} updates"
        if checkpoint.absolute().parent != Path(self.cfg.checkpoint.save_dir).absolute():
            raise UserError(f"{limit}: {made} already, so nothing is left to train; give a larger limit")
        if self.is_data_parallel_master:
            self.screen.say_nothing_is_left(f"{made}, and {limit} ends the run; to train on, give a larger limit")
        self.cfg.optimization.max_epoch = -1  # fairseq looks at it next, and takes 0 for no limit
        return True


def shared_experts(cfg: Any, model: Any) -> Optional[SharedExperts]:
    """Share a model's experts out over all processes; return None, and leave all to each, where they cannot be."""
    how = cfg.distributed_training
    shares_weights_out = how.zero_sharding != "none" or how.ddp_backend in ("slowmo", "fully_sharded")
    if how.distributed_world_size == 1 or shares_weights_out:
        return None
    if cfg.optimization.use_bmuf or cfg.ema.store_ema or cfg.common.tpu:
        return None
    model.shared_experts = share_out(model, distributed_utils.get_data_parallel_group())
    return model.shared_experts


def _early_stopping() -> dict[str, Any]:
    """Return what fairseq counts for ``--patience``: `num_runs`, validations without progress, and the `best` score.

    fairseq keeps both at its function, whose module is ``__main__`` where it was started by ``python -m``.
    """
    for name in ("__main__", "fairseq_cli.train"):
        if counter := getattr(sys.modules.get(name), "should_stop_early", None):
            return vars(counter)
    return {}


def _count_of_tokens(saved: Any) -> int:
    """Return the tokens that a checkpoint's model has read; 0 where it does not say."""
    if type(saved) is int:
        return max(0, saved)
    return 0


def _resume_early_stopping(saved: Any) -> None:
    """Take the count over, of a run that had one; leave anything else in its place alone."""
    if isinstance(saved, dict) and type(saved.get("num_runs")) is int and isinstance(saved.get("best"), (int, float)):
        _early_stopping().update(num_runs=saved["num_runs"], best=saved["best"])


@contextmanager
def _named_where_it_does_not_fit(filename: str) -> Iterator[None]:
    """Raise a UserError in place of what fairseq and torch raise for a checkpoint of other options, or a damaged one.

    Errors between processes, and of memory, are not the file's.
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
            f"{filename}: was trained with the {what.strip().lower()} {there}, not {here}: give the options that it "
            "was trained with, another --save-dir, or --reset-optimizer to go on with fresh moments"
        ) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        cause = error.__context__ or error  # fairseq hides what is wrong with the weights
        raise UserError(
            f"{filename}: does not fit this run, or is damaged ({type(cause).__name__}: {first_line(cause)}): give the "
            "options that it was trained with, another --save-dir, or --reset-optimizer to go on with fresh moments"
        ) from error


# Functions that stand in for fairseq's; replacements.py says which.


def loading_the_intact_one(load_checkpoint, cfg, trainer, **kwargs):
    """Stand in for ``checkpoint_utils.load_checkpoint``, which training calls once, before the first update.

    Signals are heard from here on.
    """
    if not isinstance(trainer, SafeTrainer):
        return load_checkpoint(cfg, trainer, **kwargs)
    if trainer.takes_signals:
        trainer.preemption.listen()
    _early_stopping().clear()  # of an earlier run in this process
    cfg, chosen = choose_for_all(cfg, trainer)
    with out_of_memory.explained(partial(out_of_memory.before_training, trainer.get_model())):
        extra_state, epoch_itr = load_checkpoint(cfg, trainer, **kwargs)
    is_over = extra_state is not None and trainer.ends_here(epoch_itr, chosen or Path(cfg.save_dir) / LAST)
    if not is_over:
        refuse_beyond_budget(trainer.cfg, trainer.get_num_updates(), trainer.words_read)
        with out_of_memory.explained(partial(out_of_memory.in_training, trainer, [trainer._dummy_batch])):
            trainer.screen.introduce()  # which times a pass
        trainer.recorder.begin()
    return extra_state, epoch_itr


def saving_if_there_is_room(save_checkpoint, cfg, trainer, epoch_itr, val_loss):
    """Stand in for ``checkpoint_utils.save_checkpoint``, which all processes call, though only the first one writes.

    Where a file cannot be written it warns and returns None, and the next save tries again.

    Raises:
        UserError: it cannot be written, and there is no next save.
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
            raise UserError(f"{error}\nThe run is at its end; make room and run it again") from error
        logger.warning("%s\nThe run trains on; the next save tries again", error)
        return None
    finally:
        trainer.forget_gathered()
