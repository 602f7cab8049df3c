"""fairseq's trainer for our tasks: what keeps a run safe, in the order in which it happens.

fairseq makes a :class:`SafeTrainer` wherever its own Trainer is asked for with a task of ours (``replacements.py``):
in fairseq-train, fairseq-hydra-train, their processes, and in a script. Stock tasks keep fairseq's.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
from lazyformer_fairseq.evaluation.planning.fit import can_recompute
from lazyformer_fairseq.executors.nvidia_smi import precision_on
from lazyformer_fairseq.fairseq_plugin.optim.half_precision import EXACT_ENOUGH, FP16Optimizer
from lazyformer_fairseq.fairseq_plugin.optim.schedules import tell_updates_per_epoch
from lazyformer_fairseq.fairseq_plugin.record import RunRecorder
from lazyformer_fairseq.fairseq_plugin.reliability.bad_updates import TrainerGuard, can_be_guarded
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import LAST, NotSavedError, choose_for_all, listed_name
from lazyformer_fairseq.fairseq_plugin.reliability.options import is_task_of_ours, listed_updates
from lazyformer_fairseq.fairseq_plugin.reliability.preemption import Preemption, UpdateGivenUp
from lazyformer_fairseq.fairseq_plugin.replacements import start_run
from lazyformer_fairseq.fairseq_plugin.screen import Screen
from lazyformer_fairseq.modules.networks.stack import Stack
from lazyformer_fairseq.modules.shared_experts import SharedExperts, share_out
from lazyformer_fairseq.modules.timing import SELECTOR
from lazyformer_fairseq.storage.checkpoint_file import first_line
from lazyformer_fairseq.training.muon import mark_matrices

logger = logging.getLogger(__name__)

_FAIRSEQS_WORDS = "does not match; please reset the optimizer (--reset-optimizer). "


class SafeTrainer(fairseq_trainer.Trainer):
    """See the module. Every method that says ``@override`` does what fairseq's does, and what its docstring says.

    Attributes:
        preemption: takes signals, once training has loaded its checkpoint.
        takes_signals: whether it is to; a driver of several trainings takes them itself.
        guard: judges updates; None where processes see different gradients.
        screen: what the run shows, for ``--log-seconds``.
        recorder: writes ``run.json`` and ``metrics.jsonl``.
        epoch_iterator: the one in use, for whoever saves between epochs.
        not_saved: why the last save failed, or None.
        experts: those of the model, shared out over processes; None where each holds all.
        back_ends: that all processes know ``--attention-backend auto`` to have chosen.
    """

    takes_signals = True
    epoch_iterator: Any = None
    not_saved: Optional[str] = None

    @staticmethod
    def serves(cfg: Any = None, task: Any = None, *others: Any, **named: Any) -> bool:
        """Whether a run with these arguments of fairseq's Trainer is one of ours."""
        return is_task_of_ours(type(task))

    def __init__(self, cfg: Any, task: Any, model: Any, *args: Any, **kwargs: Any):
        """Starts a run, too: of a script that parses nothing."""
        start_run()
        self.experts = shared_experts(cfg, model)
        self._whole: Optional[tuple[dict, dict]] = None  # weights and optimizer, gathered for a checkpoint
        with refused_in_words(partial(before_training, model)):
            super().__init__(cfg, task, model, *args, **kwargs)
        SELECTOR.measures = self.is_data_parallel_master
        SELECTOR.waits = False
        self.back_ends: dict[str, Any] = {}
        self.preemption = Preemption(self)
        if can_be_guarded(self):
            self.guard = TrainerGuard(self)
        else:
            self.guard = None
        self.screen = Screen(self)
        self.recorder = RunRecorder(self)
        self._passes: Optional[tuple[int, int]] = None  # of the update under way: begun, and all

    @override
    def get_train_iterator(self, epoch, *args, **kwargs):
        """Tells the schedule, which is built before the data, how long an epoch is."""
        self.epoch_iterator = super().get_train_iterator(epoch, *args, **kwargs)
        tell_updates_per_epoch(self, epoch)
        return self.epoch_iterator

    @override
    def _build_optimizer(self):
        """Marks the matrices of sublayers first, for Muon."""
        if self.cfg.optimizer._name == "muon":
            mark_matrices(self._model)
        super()._build_optimizer()
        if self.experts is not None:
            load = self._optimizer.load_state_dict
            self._optimizer.load_state_dict = lambda state, *more: load(
                self.experts.own_optimizer(state, *self._updated()), *more
            )

    def _updated(self) -> tuple[list[dict], list[torch.Tensor]]:
        """The optimizer's groups, and the weights that it updates, in the model's order."""
        copies = getattr(self.optimizer, "fp32_params", None)
        return self.optimizer.optimizer.param_groups, copies or [p for p in self.model.parameters() if p.requires_grad]

    def forget_gathered(self) -> None:
        """After a checkpoint."""
        self._whole = None

    def gather_experts(self) -> None:
        """Before a checkpoint: all processes call it, the first one has the whole model then."""
        if self.experts is not None:
            with self.preemption.busy():
                optimizer = self.optimizer.state_dict()
            optimizer = self.experts.whole_optimizer(optimizer, *self._updated())
            self._whole = self.experts.whole_weights(self.model.state_dict()), optimizer

    # An update.

    @override
    def train_step(self, samples, raise_oom=False):
        """Ends a run that a signal asked to; skips the update if it is a bad one; saves it if it is a listed one."""
        self.preemption.end_if_saved()
        before = self.get_num_updates()
        if hasattr(self.task, "keep_memory") and not self.cuda:
            forget = self.task.keep_memory()
        else:
            forget = None
        try:
            with self.preemption.busy():
                update = partial(self._update, samples)
                if self.guard is None:
                    output = update()
                else:
                    output = self.guard.watch(update, samples)
                if self.get_num_updates() == before + 1:
                    self._share_back_ends()
                    self._save_if_listed()
        except UpdateGivenUp:
            self.epoch_iterator._cur_epoch_itr.n -= len(samples)
            if forget:
                forget()
            self.preemption.save_if_asked()
            self.preemption.end_if_saved()
            raise
        return output

    def _share_back_ends(self) -> None:
        """Tells the others what the first process has chosen, after updates 1, 2, 4, 8, and so on."""
        updates = self.get_num_updates()
        if self.data_parallel_world_size == 1:
            self.back_ends = SELECTOR.state_dict()
        elif updates & (updates - 1) == 0:
            group = self.data_parallel_process_group
            self.back_ends = distributed_utils.broadcast_object(SELECTOR.state_dict(), 0, group, self.device)
            SELECTOR.load_state_dict(self.back_ends)

    def _update(self, samples: list) -> Optional[dict]:
        """fairseq's, with exact sums of many batches. Where memory ends, so does the run, with what to change."""
        self._passes = 0, len(samples)
        try:
            with refused_in_words(partial(in_training, self, samples)), self._exact_sums(len(samples)):
                return super().train_step(samples, True)  # raise_oom
        finally:
            self._passes = None

    @override
    def _prepare_sample(self, sample, is_dummy=False):
        """Called before each pass of an update: the place to say how far it is, and on a processor to give it up.

        A batch that depends on the update is made that of this one.
        """
        if sample and not CHANGING.isdisjoint(sample) and not is_dummy:
            sample = self.task.at_update(sample, self.get_num_updates())
        if self._passes and not is_dummy:
            made, of = self._passes
            self.screen.tell(made, of)
            if not self.cuda:
                self.preemption.give_up_if_interrupted()
            self._passes = made + 1, of
        return super()._prepare_sample(sample, is_dummy)

    def _exact_sums(self, batches: int) -> Any:
        if batches <= EXACT_ENOUGH or self.guard is None or type(self.optimizer) is not FP16Optimizer:
            return nullcontext()
        if self.data_parallel_world_size > 1:
            groups = [self.data_parallel_process_group]
        else:
            groups = []
        return self.optimizer.summing_in_fp32(groups)

    @override
    def _aggregate_logging_outputs(self, logging_outputs, *extra_stats_to_sum, ignore=False):
        """Adds one number to the sums over processes, so that all agree when to stop. The guard hears the sums."""
        sums = (*extra_stats_to_sum, self.preemption.note())
        logging_outputs, (*sums, asked) = super()._aggregate_logging_outputs(logging_outputs, *sums, ignore=ignore)
        self.preemption.agree(asked)
        if self.guard is not None:
            self.guard.hear_all_processes(logging_outputs, sums[0])
        return logging_outputs, sums

    @override
    def clip_grad_norm(self, clip_norm):
        """The last call before the optimizer steps: the guard judges the update."""
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
        """Called after an update is logged, before validation: the place to save at, if a signal asked for it."""
        self.preemption.save_if_asked()
        return super().cumulative_training_time()

    @override
    def valid_step(self, sample, raise_oom=False):
        """Saves after a batch of validation, which may be long, if a signal asked for it."""
        with refused_in_words(partial(in_validation, self, sample)):
            output = super().valid_step(sample, raise_oom)
        self.preemption.save_if_asked()
        return output

    @override
    def _reduce_and_log_stats(self, *args, **kwargs):
        """Forgets contexts of meters that have ended.

        fairseq opens one under a new random name in each update, counts contexts by name and keeps the names: some 200
        bytes an update, and a dictionary that it copies in each validation.
        """
        output = super()._reduce_and_log_stats(*args, **kwargs)
        counts = metrics._active_aggregators_cnt
        for name in [name for name, count in counts.items() if not count]:
            del counts[name]
        return output

    @override
    def _build_ema(self):
        """Averages what is floating-point alone; of other things, such as ``dictionary_sha256``, takes the newest."""
        if self.cfg.ema.store_ema:
            integers = {name for name, value in self._model.state_dict().items() if not value.is_floating_point()}
            self._ema = EMA(self._model, self.cfg.ema, self.device, integers)
            logger.info("Exponential Moving Average Shadow Model is initialized.")

    # Checkpoints.

    @override
    def state_dict(self):
        """It asks for the time, which must not start another save. Experts are those that were gathered."""
        with self.preemption.busy():
            state = super().state_dict()
        if self._whole is not None:
            (state["model"], optimizer), self._whole = self._whole, None
            state |= {"last_optimizer_state": optimizer} if "last_optimizer_state" in state else {}
        return state

    @override
    def save_checkpoint(self, filename, extra_state):
        """Also saves what was skipped so far, the back ends that were chosen, and the count of ``--patience``.

        fairseq's crash.pt is left out where the user made a mistake. Of experts that are shared out, and were not
        gathered, there is no whole.
        """
        if Path(filename).name == "crash.pt" and isinstance(sys.exc_info()[1], UserError):
            return None
        if self.experts is not None and self._whole is None:
            return logger.warning("%s is not written: it would lack the experts of other processes", filename)
        extra_state = {**extra_state, "attention_back_ends": self.back_ends, "early_stopping": dict(_early_stopping())}
        if self.guard is not None:
            extra_state = {**extra_state, "bad_updates": self.guard.state_dict()}
        return super().save_checkpoint(filename, extra_state)

    @override
    def load_checkpoint(
        self,
        filename,
        reset_optimizer=False,
        reset_lr_scheduler=False,
        optimizer_overrides=None,
        reset_meters=False,
    ):
        """Also loads what was skipped so far and what the task carries; keeps what fairseq forgets of an epoch.

        Raises:
            UserError: the checkpoint is of another model, optimizer or criterion, or is damaged.
        """
        resets = (reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters)
        with _named_where_it_does_not_fit(filename):
            with _the_clock_running():
                extra_state = super().load_checkpoint(filename, *resets)
            if self.guard is not None:
                self.guard.load(extra_state, reset_optimizer)
            if extra_state is None:
                return None
            self.recorder.rewind(self.get_num_updates())
            self.back_ends = SELECTOR.load_state_dict(extra_state.get("attention_back_ends", {}))
            if not (reset_optimizer or reset_meters):
                _resume_early_stopping(extra_state.get("early_stopping"))
            if hasattr(self.task, "take_from_checkpoint"):  # fairseq sends the state to all processes, not to the task
                self.task.take_from_checkpoint(extra_state)
        if extra_state["train_iterator"]["iterations_in_epoch"]:
            return extra_state
        # The epoch was over. The log's averages over the last updates continue from epoch to epoch; only those of the
        # whole epoch start anew. The schedule would have received its validation next.
        if not reset_meters and (meter := extra_state.get("metrics", {}).get("train_inner")) is not None:
            metrics.load_state_dict({"train_inner": meter})
        if not (reset_optimizer or reset_lr_scheduler):
            self.lr_step(extra_state["train_iterator"]["epoch"] - 1, extra_state.get("val_loss"))
        return extra_state

    def _save_if_listed(self) -> None:
        """For ``--keep-updates-list``: saves what fairseq's ``save_checkpoint`` does, as ``checkpoint_update_N.pt``."""
        cfg = self.cfg.checkpoint
        task = self.task
        updates = self.get_num_updates()
        if updates not in listed_updates(getattr(task.cfg, "keep_updates_list", None)) or cfg.no_save:
            return
        if hasattr(task, "gather_memory"):
            task.gather_memory()
        self.gather_experts()
        self.consolidate_optimizer()
        extra_state = {"train_iterator": self.epoch_iterator.state_dict(), "val_loss": None}
        if hasattr(task, "get_checkpoint_dict"):
            extra_state |= task.get_checkpoint_dict()
        if hasattr(checkpoint_utils.save_checkpoint, "best"):
            extra_state["best"] = checkpoint_utils.save_checkpoint.best
        path = Path(cfg.save_dir) / listed_name(updates, self.checkpoint_suffix)
        try:
            self.save_checkpoint(str(path), extra_state)
        except NotSavedError as error:
            logger.warning("%s\nThe run trains on; --keep-updates-list has lost update %d", error, updates)

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
    """Shares a model's experts out over all processes; None, and each has all, with what shares weights out itself."""
    how = cfg.distributed_training
    others = cfg.optimization.use_bmuf or cfg.ema.store_ema
    others = others or how.zero_sharding != "none" or how.ddp_backend in ("slowmo", "fully_sharded") or cfg.common.tpu
    if how.distributed_world_size == 1 or others:
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


def _resume_early_stopping(saved: Any) -> None:
    """Take the count over, of a run that had one; anything else in its place is left alone."""
    if isinstance(saved, dict) and type(saved.get("num_runs")) is int and isinstance(saved.get("best"), (int, float)):
        _early_stopping().update(num_runs=saved["num_runs"], best=saved["best"])


@contextmanager
def _named_where_it_does_not_fit(filename: str) -> Iterator[None]:
    """Raises a UserError in place of what fairseq and torch raise for a checkpoint of other options, or a damaged one.

    Errors between processes, and of memory, are not the file's.
    """
    try:
        yield
    except (UserError, torch.distributed.DistError):
        raise
    except AssertionError as error:
        what, found, names = str(error).partition(_FAIRSEQS_WORDS)
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


@contextmanager
def _the_clock_running() -> Iterator[None]:
    """Keeps ``wall`` in the log the time since this process began to train; fairseq loads it stopped, at 0."""
    before = metrics.get_meter("default", "wall")
    yield
    loaded = metrics.get_meter("default", "wall")
    if before is not None and loaded is not None:
        loaded.start_time = before.start_time


# Functions that stand in for fairseq's; replacements.py says which.


def with_a_steady_clock(time: ModuleType) -> SimpleNamespace:
    """Return the ``time`` that fairseq's trainer sees, which asks for nothing but the clock."""
    return SimpleNamespace(time=time.monotonic)


def loading_the_intact_one(load_checkpoint, cfg, trainer, **kwargs):
    """For ``checkpoint_utils.load_checkpoint``, which training alone calls, once, before the first update.

    Signals are heard from here on.
    """
    if not isinstance(trainer, SafeTrainer):
        return load_checkpoint(cfg, trainer, **kwargs)
    if trainer.takes_signals:
        trainer.preemption.listen()
    _early_stopping().clear()  # of an earlier run in this process
    cfg, chosen = choose_for_all(cfg, trainer)
    with refused_in_words(partial(before_training, trainer.get_model())):
        extra_state, epoch_itr = load_checkpoint(cfg, trainer, **kwargs)
    is_over = extra_state is not None and trainer.ends_here(epoch_itr, chosen or Path(cfg.save_dir) / LAST)
    if not is_over:
        with refused_in_words(partial(in_training, trainer, [trainer._dummy_batch])):
            trainer.screen.introduce()  # which times a pass
        trainer.recorder.begin()
    return extra_state, epoch_itr


def saving_if_there_is_room(save_checkpoint, cfg, trainer, epoch_itr, val_loss):
    """For ``checkpoint_utils.save_checkpoint``, which all processes call, though only the first one writes.

    What a task carries from batch to batch (see ``tasks/stream_language_modeling.py``) is gathered while all are here.
    Where a file cannot be written it warns and returns None, and the next save tries again.

    Raises:
        UserError: it cannot be written, and there is no next save.
    """
    if not isinstance(trainer, SafeTrainer):
        return save_checkpoint(cfg, trainer, epoch_itr, val_loss)
    if hasattr(trainer.task, "gather_memory") and not cfg.no_save:
        trainer.task.gather_memory()
    if not cfg.no_save:
        trainer.gather_experts()
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


def seeing_no_shared_parameter_where_there_is_none(catalog_shared_params, module, memo=None, prefix=""):
    """For ``_catalog_shared_params(module)``, which calls itself for each submodule."""
    shared = catalog_shared_params(module, memo, prefix)
    if memo is not None:
        return shared
    return [names for names in shared if fairseq_trainer._get_module_by_path(module, names[0]) is not None]


# Memory that ends: the run ends with the numbers and what to change, in place of a traceback or of silence. If one
# process trains, fairseq leaves a batch out that did not fit: where none fits, a run goes through its epochs without an
# update. Of several processes, the others go on without this one's gradients. On a processor fairseq does not know the
# error.
# Of torch on a GPU and on a processor (c10/core/impl/alloc_cpu.cpp, on Linux and elsewhere), and of cuBLAS and cuDNN.
SIGNS = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory",
         "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")  # fmt: skip
GIB = 2**30
_KEPT = "Nothing is saved now; what was saved before is whole, and a rerun resumes from it."


class OutOfMemoryInTrainingError(UserError):
    """Says what did not fit, and what to change."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in torch or in a library that it calls."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS)


@contextmanager
def refused_in_words(words: Callable[[BaseException], str]) -> Iterator[None]:
    """Around an update, or a batch of validation; `words` are :func:`in_training` or :func:`in_validation`.

    Raises:
        OutOfMemoryInTrainingError: it did not fit.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryInTrainingError(words(error)) from error


def in_training(trainer: Any, samples: list[Any], error: BaseException) -> str:
    """What an update met, and which options make it fit."""
    advice = [_smaller_batches(trainer.cfg)]
    if _can_recompute(trainer.get_model()):
        advice.append("--attention-backend recompute keeps no distributions")
    if not (trainer.cfg.common.fp16 or trainer.cfg.common.bf16):
        if trainer.cuda:
            precision = precision_on("cuda")
        else:
            precision = "bf16"
        advice.append(f"--{precision} halves activations")
    advice.append("`lazyformer plan` counts what fits")
    where = f"update {trainer.get_num_updates() + 1}: batches of {_sizes(samples)}"
    return f"out of memory in {where}. {_memory(trainer, error)}. {_KEPT} To fit: {'; '.join(advice)}"


def before_training(model: torch.nn.Module, error: BaseException) -> str:
    """What the weights met on their way to the device, the optimizer when it was made, or a checkpoint."""
    weights = sum(weight.numel() for weight in model.parameters())
    advice = "a smaller model, or more GPUs with --zero-sharding os; `lazyformer plan` counts what fits"
    return f"out of memory before the first update: {weights:,} parameters; {first_line(error)}. To fit: {advice}"


def _can_recompute(model: torch.nn.Module) -> bool:
    """Return whether ``--attention-backend recompute`` can take the place of one that keeps distributions, or may."""
    stacks = [each for each in model.modules() if isinstance(each, Stack)]
    for stack in stacks:
        if not all(can_recompute(sublayer) for sublayer in stack.plan if sublayer.kind.computes_scores):
            return False
    return any(stack.attention_backend not in ("recompute", "fused") for stack in stacks)


def in_validation(trainer: Any, sample: Any, error: BaseException) -> str:
    """The same for a batch of validation."""
    dataset = trainer.cfg.dataset
    option = "--batch-size-valid"
    given = dataset.batch_size_valid
    if not given and dataset.max_tokens_valid:
        option = "--max-tokens-valid"
        given = dataset.max_tokens_valid
    if given:
        smaller = f"give {option} {max(1, given // 2)} or less"
    else:
        smaller = f"give {option}"
    where = f"validation after update {trainer.get_num_updates()}: a batch of {_sizes([sample])}"
    return f"out of memory in {where}. {_memory(trainer, error)}. {_KEPT} To fit: {smaller}"


def _sizes(samples: list[Any]) -> str:
    """As "16 x 512 and 3 x 512 tokens", each size once, the largest first."""
    inputs = [sample.get("net_input", {}).get("src_tokens") for sample in samples if isinstance(sample, dict)]
    found = {tuple(tokens.shape) for tokens in inputs if tokens is not None and tokens.dim() == 2}
    ordered = sorted(found, key=lambda shape: -shape[0] * shape[1])
    if ordered:
        return f"{' and '.join(f'{rows:,} x {time:,}' for rows, time in ordered)} tokens"
    return "unknown size"


def _memory(trainer: Any, error: BaseException) -> str:
    """What was asked for, and what there is."""
    weights = sum(weight.numel() for weight in trainer.model.parameters())
    parts = [f"{weights:,} parameters"]
    if asked := re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error)):
        number, unit = asked[1].split()
        parts.append(f"{int(number) / GIB:.2f} GiB were asked for" if unit == "bytes" else f"{asked[1]} were asked for")
    if trainer.cuda:
        there = torch.cuda.get_device_properties(trainer.device).total_memory
        held = torch.cuda.max_memory_allocated(trainer.device)
        reserved = torch.cuda.memory_reserved(trainer.device)
        parts.append(f"tensors took {held / GIB:.2f} GiB at most, torch has reserved {reserved / GIB:.2f}")
        parts[-1] += f" of the GPU's {there / GIB:.2f} GiB"
    return "; ".join(parts)


def _smaller_batches(cfg: Any) -> str:
    """Half of the batch, and the update as large as before."""
    batch = cfg.dataset.batch_size
    tokens = cfg.dataset.max_tokens
    if batch == 1:
        if "tgt_len" in cfg.task:
            option = "--tgt-len"
        else:
            option = "--tokens-per-sample"
        return f"{option}, fewer than now: a batch is one sequence"
    if tokens and not batch:
        given = f"--max-tokens {tokens // 2}"
    else:
        given = f"--batch-size {(batch or 2) // 2}"
    if not cfg.task.get("sequences_per_update"):
        given += f" --update-freq {','.join(str(2 * each) for each in cfg.optimization.update_freq)}"
    return f"{given} (an update stays as large)"
