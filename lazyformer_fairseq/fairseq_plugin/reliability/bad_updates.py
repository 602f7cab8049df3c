"""Handles NaN, Inf and loss spikes in fairseq's trainer, based on ``training/update_guard.py``.

In full precision and in bf16, fairseq raises FloatingPointError at the first NaN, which ends the run. Here a bad update
leaves ``train_step`` through an exception that fairseq does not catch, so the weights, optimizer, EMA and meters stay
untouched.

Overflows of the fp16 loss scaler are still left to fairseq: the scaler halves its scale, and fairseq repeats the
update. While the scale is above its minimum, an overflow only means that the scale is too large. At the minimum the
gradient itself is wrong, so the update is bad.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import checkpoints_in
from lazyformer_fairseq.fairseq_plugin.reliability.options import ReliabilityConfig
from lazyformer_fairseq.storage.checkpoint_file import look_into
from lazyformer_fairseq.training.update_guard import REPORT, BadUpdateError, Reaction, SkippedUpdate, UpdateGuard

logger = logging.getLogger(__name__)


class ScalerOverflowError(Exception):
    """A loss scaler overflow on a CPU; fairseq would catch OverflowError, but its handler requires a GPU."""


class TrainerGuard(UpdateGuard):
    """The guard of a fairseq trainer, which skips bad updates.

    Attributes:
        loss: the current update's loss per prediction, in nats or the criterion's own unit; None if it is not known yet
            or if there is no loss.
        gradient_norm: the current update's gradient norm; None if it is not known yet.
        logs, sample_sizes: the current update's logged values and sample sizes, from which the loss is computed.

    Raises:
        UserError: ``--loss-spike`` is out of range.
    """

    def __init__(self, trainer):
        # Other packages' tasks do not have these options and get the defaults.
        max_in_a_row, max_rollbacks, spike = (
            getattr(trainer.cfg.task, name, getattr(ReliabilityConfig, name))
            for name in ("max_skipped_updates", "max_rollbacks", "loss_spike")
        )
        if spike and not spike > 1:
            raise UserError(f"--loss-spike {spike}: must be greater than 1, or 0 to disable the check")
        super().__init__(max_in_a_row, max_rollbacks, spike)
        self.trainer = trainer
        self.checkpoints = GoodCheckpoints(trainer.cfg.checkpoint.save_dir, trainer.checkpoint_suffix)
        self.begin_update()
        trainer.get_criterion().register_forward_hook(self.hear_batch)

    def begin_update(self) -> None:
        """Reset the numbers of the previous update."""
        self.logs: list[dict] = []
        self.sample_sizes: list = []
        self.loss: Optional[float] = None
        self.gradient_norm: Optional[float] = None

    def hear_batch(self, criterion, _, output: tuple) -> None:
        """Store a batch's logged values and sample size without copying them to the host; this is a forward hook."""
        if criterion.training:
            _, sample_size, log = output
            self.logs.append(log)
            self.sample_sizes.append(sample_size)

    def hear_all_processes(self, logs: list[dict], sample_size) -> None:
        """Replace this process's numbers with the sums over all processes that share the update."""
        self.begin_update()
        self.logs = list(logs)
        self.sample_sizes = [sample_size]

    def watch(self, make: Callable[[], Any], samples: list) -> Any:
        """Run a fairseq update; if it is bad, undo everything but the update count.

        Args:
            make: runs the update and returns fairseq's logging output.
            samples: the update's batches, for the report.

        Returns:
            The output of `make`; None if the update was skipped.
        """
        trainer = self.trainer
        output = None
        before = trainer.get_num_updates()
        self.begin_update()
        try:
            with _restored_metric_contexts():
                output = make()
        except BadUpdateError as bad:
            if trainer.cfg.common.amp:
                trainer.optimizer.scaler.update()  # the scaler has unscaled the gradients and expects a step
            self.skip_update(bad, samples)
        except ScalerOverflowError as overflow:
            logger.info("NOTE: gradient overflow detected, ignoring gradient, %s", overflow)
            trainer.zero_grad()
        else:
            if trainer.get_num_updates() > before:
                self.accept(self.loss)
        # fairseq's own meter type lets a run without the plugin read the checkpoint.
        metrics.log_scalar("skipped", self.skipped, weight=0, priority=710)
        metrics.log_scalar("rollbacks", self.rollbacks, weight=0, priority=711)
        return output

    def watch_clipping(self, clip: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Have fairseq clip the gradient, then check the update; the optimizer step follows directly.

        Returns:
            The gradient norm before clipping.

        Raises:
            BadUpdateError: the update is bad, so the optimizer must not step.
            ScalerOverflowError: the fp16 gradient overflowed on a CPU.
        """
        trainer = self.trainer
        amp = self.trainer.cfg.common.amp
        try:
            norm = clip()
            if amp and not norm.isfinite():
                return norm  # an overflow, which torch's scaler handles in the optimizer step
            return self.judge_on_host(norm)
        except OverflowError as overflow:
            if trainer.cuda:
                raise
            raise ScalerOverflowError(str(overflow)) from overflow
        except FloatingPointError as error:
            self.read_numbers(torch.tensor(math.nan))
            if not amp:
                # fairseq's scaler also counts skipped updates, and divides by the count at the next overflow.
                trainer.optimizer.scaler._iter += 1
            raise BadUpdateError("the gradient is NaN or Inf at the smallest loss scale") from error

    def judge_on_host(self, gradient_norm: torch.Tensor) -> torch.Tensor:
        """Check the update and return its gradient norm on the CPU.

        A single copy moves the norm, the sample size and all logged values to the host. Right afterwards fairseq checks
        that the norm is finite and reads the other values for its meters, and each of these reads would otherwise wait
        for the GPU.

        Raises:
            BadUpdateError: the update is bad, so the optimizer must not step.
        """
        on_host = self.read_numbers(gradient_norm)
        self.judge(self.loss, self.gradient_norm)
        return on_host

    def read_numbers(self, gradient_norm: torch.Tensor) -> torch.Tensor:
        """Set the update's gradient norm and loss, and move all logged values to the host for fairseq.

        The loss is None if there was nothing to predict or if the criterion logs no loss.

        Returns:
            The gradient norm on the CPU.

        Raises:
            UserError: ``--loss-spike`` is set, but the criterion logs no loss.
        """
        losses = [log["loss"] for log in self.logs if "loss" in log]
        if self.spike and not losses:
            raise UserError("--loss-spike: this --criterion logs no loss; omit --loss-spike")
        logged = []
        for log in self.logs:
            for name, value in log.items():
                if torch.is_tensor(value) and value.numel() == 1:
                    logged.append((log, name))
        norm, loss, sample_size, *values = _on_host(
            gradient_norm,
            sum(losses),
            sum(self.sample_sizes),
            *(log[name] for log, name in logged),
        )
        for (log, name), value in zip(logged, values, strict=True):
            log[name] = value.to(log[name].dtype)
        self.gradient_norm = norm.item()
        if losses and sample_size:
            self.loss = (loss / sample_size).item()
        else:
            self.loss = None
        return norm.float()

    @property
    def unit(self) -> str:
        """The unit of reported losses, the same as in the training log."""
        if getattr(self.trainer.get_criterion(), "is_regression", False):
            return "squared error"
        return "bits"

    def in_unit(self, loss: Optional[float]) -> Optional[float]:
        """Convert a loss from nats or the criterion's own unit to :attr:`unit`."""
        if loss is not None and self.unit == "bits":
            return loss / math.log(2)
        return loss

    def skip_update(self, reason: BadUpdateError, samples: list) -> None:
        """Drop an update's gradient but count the update; if too many are skipped in a row, roll back or stop the run.

        Because a skipped update counts, the schedule, data and checkpoints continue as if it had been performed.

        Args:
            reason: why the update is bad.
            samples: the update's batches, for the report.

        Raises:
            UserError: the run has no rollbacks left, or there is no checkpoint yet to roll back to.
        """
        trainer = self.trainer
        update = trainer.get_num_updates()
        with_ids = [sample for sample in samples if sample and "id" in sample]
        skipped = SkippedUpdate(
            update=update + 1,
            epoch=getattr(trainer.epoch_iterator, "epoch", None),
            reason=str(reason),
            loss=self.in_unit(self.loss),
            gradient_norm=self.gradient_norm,
            learning_rate=trainer.get_lr(),
            samples=[torch.as_tensor(sample["id"]).tolist() for sample in with_ids],
        )
        reaction = self.skip(skipped)
        self._warn(
            f"update {update + 1} is skipped: {reason} (loss {skipped.loss} {self.unit}, gradient norm "
            f"{self.gradient_norm}); {self.skipped_in_a_row} in a row, {self.skipped} in total"
        )
        trainer.zero_grad()
        if getattr(trainer.optimizer, "_multiply_factor", None) is not None and trainer.optimizer.scaler is None:
            # fairseq resets the factor only in a step, because it assumes that bf16 never skips one.
            trainer.optimizer._multiply_factor = 1.0
        if reaction is Reaction.CONTINUE:
            trainer.set_num_updates(update + 1)
        elif reaction is Reaction.ROLL_BACK:
            self._roll_back()
        else:
            self._stop(f"after {self.rollbacks} rollbacks (--max-rollbacks)")
        trainer.task.forget_memory()  # contains the bad update's activations

    def _roll_back(self) -> None:
        counts = self.state_dict()
        path = roll_back(self.trainer, self.checkpoints, self.first_bad)
        if path is None:
            self._stop("and there is no checkpoint yet to roll back to")
        self.load_state_dict(counts)
        self.rollbacks += 1
        self.skipped_in_a_row = 0
        self._warn(
            f"{self.max_in_a_row} updates in a row were bad: the run rolls back to {path} (update "
            f"{self.trainer.get_num_updates()}) and continues on different data; rollback {self.rollbacks} of "
            f"{self.max_rollbacks}"
        )

    def _stop(self, why: str) -> None:
        folder = write_report(self)
        raise UserError(
            f"stopped at update {self.trainer.get_num_updates() + 1}: {self.skipped_in_a_row} updates in a row were "
            f"bad ({self.bad[-1].reason}), {why}. {folder / REPORT} lists the batches and possible remedies"
        )

    def _warn(self, message: str) -> None:
        """Log a warning once, not once per process."""
        if self.trainer.is_data_parallel_master:
            logger.warning(message)

    def load(self, extra_state: Optional[dict[str, Any]], starts_anew: bool) -> None:
        """Restore the counts of skipped updates and rollbacks, and ignore checkpoints newer than the loaded one.

        Args:
            extra_state: the loaded checkpoint's extra state; None if there was no checkpoint.
            starts_anew: whether the run uses only the checkpoint's weights, in which case it counts from zero.
        """
        if extra_state is not None and not starts_anew and "bad_updates" in extra_state:
            self.load_state_dict(extra_state["bad_updates"])
        if self.trainer.is_data_parallel_master:
            self.checkpoints.leave_behind(self.trainer.get_num_updates())


def can_be_guarded(trainer) -> bool:
    """Return whether all of a run's processes see the same gradients; False for BMUF, SlowMo, FSDP and TPUs."""
    cfg = trainer.cfg
    local_steps = cfg.optimization.use_bmuf or cfg.distributed_training.ddp_backend == "slowmo"
    return not (local_steps or trainer.is_fsdp or trainer.tpu)


def _on_host(like: torch.Tensor, *others) -> torch.Tensor:
    """Return numbers and one-element tensors as a float64 CPU vector, using a single copy from `like`'s device."""
    on_device = [
        value.detach().double().reshape(())
        if torch.is_tensor(value) and value.device == like.device
        # Filling a tensor does not wait for the GPU, while copying a number to the device would.
        else like.new_full((), float(value), dtype=torch.float64)
        for value in (like, *others)
    ]
    return torch.stack(on_device).cpu()


@contextmanager
def _restored_metric_contexts() -> Iterator[None]:
    """Close fairseq's metric contexts if the update raises an exception, which would otherwise leave them open."""
    active = metrics._active_aggregators.copy()
    counts = metrics._active_aggregators_cnt.copy()
    try:
        yield
    except (BadUpdateError, ScalerOverflowError):
        for changed, before in ((metrics._active_aggregators, active), (metrics._active_aggregators_cnt, counts)):
            changed.clear()
            changed.update(before)
        raise


class GoodCheckpoints:
    """The checkpoints that a run can roll back to.

    Args:
        folder: the run's ``--save-dir``.
        suffix: the run's ``--checkpoint-suffix``, which distinguishes runs that share a folder.

    Attributes:
        left_behind: maps a checkpoint's path and modification time to the number of updates above which the checkpoint
            is ignored.
    """

    def __init__(self, folder: str, suffix: str = ""):
        self.folder = folder
        self.suffix = suffix
        self.left_behind: dict[tuple[Path, int], int] = {}

    def leave_behind(self, updates: int) -> None:
        """Ignore existing checkpoints with more than `updates` updates, which the run has abandoned.

        A checkpoint that is later saved under the same name is not ignored.
        """
        for path in checkpoints_in(self.folder, self.suffix):
            version = path, path.stat().st_mtime_ns
            self.left_behind[version] = min(updates, self.left_behind.get(version, updates))

    def choose(self, first_bad: int) -> Optional[Path]:
        """Choose the newest intact checkpoint that was followed by a good update, or else the newest intact one.

        This reads all files to check that they are intact.

        Args:
            first_bad: the number of updates before the first bad one. A checkpoint with at least this many updates
                contains the weights that caused the bad update.

        Returns:
            The path of the checkpoint; None if no checkpoint is intact.
        """
        found = {}
        for path in checkpoints_in(self.folder, self.suffix):
            try:
                updates, has_optimizer = look_into(path)
            except UserError as error:
                logger.warning("the rollback skips a checkpoint: %s", error)
                continue
            if not has_optimizer:
                continue
            version = path, path.stat().st_mtime_ns
            if updates <= self.left_behind.get(version, updates):
                found[path] = updates

        def preference(path: Path) -> tuple[bool, int]:
            is_before_bad = found[path] < first_bad
            return is_before_bad, found[path]

        return max(found, key=preference, default=None)


def roll_back(trainer, checkpoints: GoodCheckpoints, first_bad: int) -> Optional[Path]:
    """Roll a run back to a checkpoint without rewinding the data.

    This restores the weights, optimizer, schedule and number of updates; meters and the training time are kept. All
    processes load the file that the first process chooses. Source: PaLM (Chowdhery et al., 2022, arXiv 2204.02311,
    section 5.1), where the same weights did not spike again on different batches.

    Args:
        trainer: the run's trainer.
        checkpoints: the run's checkpoints.
        first_bad: the number of updates before the first bad one.

    Returns:
        The path of the checkpoint; None if there is none.
    """
    if trainer.is_data_parallel_master:
        path = checkpoints.choose(first_bad)
    else:
        path = None
    if trainer.data_parallel_world_size > 1:
        path = distributed_utils.broadcast_object(path, 0, trainer.data_parallel_process_group, trainer.device)
    if path is not None:
        time_spent = trainer._local_cumulative_training_time()
        trainer.load_checkpoint(str(path), reset_meters=True)
        trainer._previous_training_time = time_spent
    return path


def write_report(guard: TrainerGuard) -> Path:
    """Write ``bad_updates.json`` to ``--save-dir`` and return the folder; all processes must call this."""
    trainer = guard.trainer
    folder = Path(trainer.cfg.checkpoint.save_dir)
    bad_of_processes = [list(guard.bad)]
    processes = trainer.data_parallel_world_size
    if processes > 1:
        bad_of_processes = [None] * processes
        torch.distributed.all_gather_object(bad_of_processes, list(guard.bad))
    if trainer.is_data_parallel_master:
        losses = [guard.in_unit(loss) for loss in guard.losses]
        guard.write_report(folder, bad_of_processes, losses, guard.unit)
    return folder
