"""NaN, Inf and loss spikes in fairseq's trainer: the adapter of :mod:`lazyformer_fairseq.training.update_guard`.

fairseq raises FloatingPointError at the first NaN in full precision and bf16, and the run is over. Here a bad update
leaves ``train_step`` by an exception unknown to fairseq: weights, optimizer, EMA and meters stay untouched.

fairseq still handles an overflow of fp16's loss scaler: the scaler halves its scale and fairseq tries the update
again. An overflow is about the scale, not the numbers, until the scale is at its minimum; only then is the update bad.
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
    """fairseq's OverflowError under a name that it does not catch: its handler needs a GPU."""


class TrainerGuard(UpdateGuard):
    """Guard of one of fairseq's trainers.

    Raises:
        UserError: ``--loss-spike`` is out of range.
    """

    def __init__(self, trainer):
        # Other tasks have no such options: the defaults then apply.
        max_in_a_row, max_rollbacks, spike = (
            getattr(trainer.cfg.task, name, getattr(ReliabilityConfig, name))
            for name in ("max_skipped_updates", "max_rollbacks", "loss_spike")
        )
        if spike and not spike > 1:
            raise UserError(f"--loss-spike {spike}: must be more than 1, or 0 for never")
        super().__init__(max_in_a_row, max_rollbacks, spike)
        self.trainer = trainer
        self.checkpoints = GoodCheckpoints(trainer.cfg.checkpoint.save_dir, trainer.checkpoint_suffix)
        self.begin_update()
        trainer.get_criterion().register_forward_hook(self.hear_batch)

    def begin_update(self) -> None:
        """Forget the numbers of the update before."""
        self.logs: list[dict] = []
        self.sample_sizes: list = []
        self.loss: Optional[float] = None
        self.gradient_norm: Optional[float] = None

    def hear_batch(self, criterion, _, output: tuple) -> None:
        """Keep what the criterion logs for a batch, and the sample size, still on the device: its forward hook."""
        if criterion.training:
            _, sample_size, log = output
            self.logs.append(log)
            self.sample_sizes.append(sample_size)

    def hear_all_processes(self, logs: list[dict], sample_size) -> None:
        """Keep the sums of the whole update instead, where several processes share it."""
        self.begin_update()
        self.logs = list(logs)
        self.sample_sizes = [sample_size]

    def watch(self, make: Callable[[], Any], samples: list) -> Any:
        """Have fairseq make an update, of which nothing but its number is left where it is a bad one."""
        trainer = self.trainer
        output = None
        before = trainer.get_num_updates()
        self.begin_update()
        try:
            with _aggregators_left_behind():
                output = make()
        except BadUpdateError as bad:
            if trainer.cfg.common.amp:
                trainer.optimizer.scaler.update()  # it has unscaled the gradients and expects a step
            self.skip_update(bad, samples)
        except ScalerOverflowError as overflow:
            logger.info("NOTE: gradient overflow detected, ignoring gradient, %s", overflow)
            trainer.zero_grad()
        else:
            if trainer.get_num_updates() > before:
                self.accept(self.loss)
        # fairseq's own type of meter, so that a run without the plugin can read the checkpoint.
        metrics.log_scalar("skipped", self.skipped, weight=0, priority=710)
        metrics.log_scalar("rollbacks", self.rollbacks, weight=0, priority=711)
        return output

    def watch_clipping(self, clip: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Have fairseq clip the gradient, the last thing before the optimizer steps; return its norm.

        Raises:
            BadUpdateError: the optimizer must not step.
        """
        trainer = self.trainer
        amp = self.trainer.cfg.common.amp
        try:
            norm = clip()
            if amp and not norm.isfinite():
                return norm  # an overflow, which torch's scaler handles within the optimizer's step
            return self.judge_on_host(norm)
        except OverflowError as overflow:
            if trainer.cuda:
                raise
            raise ScalerOverflowError(str(overflow)) from overflow
        except FloatingPointError as error:
            self.read_numbers(torch.tensor(math.nan))
            if not amp:
                trainer.optimizer.scaler._iter += 1  # as its own skipping does; the next overflow divides by it
            raise BadUpdateError("the gradient is NaN or Inf at the smallest loss scale") from error

    def judge_on_host(self, gradient_norm: torch.Tensor) -> torch.Tensor:
        """Raise BadUpdateError, or return the gradient's norm, moved to the CPU.

        One copy brings norm, sample size and all logged values to the host. Right after this fairseq checks that the
        norm is finite and reads the others for its meters; each read would wait for the GPU.
        """
        on_host = self.read_numbers(gradient_norm)
        self.judge(self.loss, self.gradient_norm)
        return on_host

    def read_numbers(self, gradient_norm: torch.Tensor) -> torch.Tensor:
        """Set the update's norm and loss; the loss is None if there was nothing to predict or the criterion logs none.

        The logged values move to the host, where fairseq will look for them.

        Raises:
            UserError: there is a bound on the loss, but no loss to compare.
        """
        losses = [log["loss"] for log in self.logs if "loss" in log]
        if self.spike and not losses:
            raise UserError("--loss-spike: this --criterion logs no loss; leave the option out")
        every = ((log, name, value) for log in self.logs for name, value in log.items())
        logged = [(log, name) for log, name, value in every if torch.is_tensor(value) and value.numel() == 1]
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
        """Return the unit of losses for the user, as in the training log."""
        if getattr(self.trainer.get_criterion(), "is_regression", False):
            return "squared error"
        return "bits"

    def in_unit(self, loss: Optional[float]) -> Optional[float]:
        """Return a loss in that unit."""
        if loss is not None and self.unit == "bits":
            return loss / math.log(2)
        return loss

    def skip_update(self, reason: BadUpdateError, samples: list) -> None:
        """Count the update, whose gradient nobody will use; after too many in a row roll back, or stop the run.

        A skipped update counts as one of the run's, so schedule, data and checkpoints continue as without the skip.

        Raises:
            UserError: there were too many rollbacks already, or there is no checkpoint yet.
        """
        trainer = self.trainer
        update = trainer.get_num_updates()
        skipped = SkippedUpdate(
            update=update + 1,
            epoch=getattr(trainer.epoch_iterator, "epoch", None),
            reason=str(reason),
            loss=self.in_unit(self.loss),
            gradient_norm=self.gradient_norm,
            learning_rate=trainer.get_lr(),
            samples=[torch.as_tensor(sample["id"]).tolist() for sample in samples if sample and "id" in sample],
        )
        reaction = self.skip(skipped)
        self._warn(
            f"update {update + 1} is skipped: {reason} (loss {skipped.loss} {self.unit}, gradient norm "
            f"{self.gradient_norm}); {self.skipped_in_a_row} in a row, {self.skipped} in all"
        )
        trainer.zero_grad()
        if getattr(trainer.optimizer, "_multiply_factor", None) is not None and trainer.optimizer.scaler is None:
            trainer.optimizer._multiply_factor = 1.0  # fairseq expects that bf16 never skips a step
        if reaction is Reaction.CONTINUE:
            trainer.set_num_updates(update + 1)
        elif reaction is Reaction.ROLL_BACK:
            self._roll_back()
        else:
            self._stop(f"after {self.rollbacks} rollbacks (--max-rollbacks)")
        trainer.task.forget_memory()  # activations that the next update would have started from

    def _roll_back(self) -> None:
        counts = self.state_dict()
        path = roll_back(self.trainer, self.checkpoints, self.first_bad)
        if path is None:
            self._stop("and there is no checkpoint yet to go back to")
        self.load_state_dict(counts)
        self.rollbacks += 1
        self.skipped_in_a_row = 0
        self._warn(
            f"{self.max_in_a_row} updates in a row were bad: back to {path}, update {self.trainer.get_num_updates()}, "
            f"and other data follow; rollback {self.rollbacks} of {self.max_rollbacks}"
        )

    def _stop(self, why: str) -> None:
        folder = write_report(self)
        raise UserError(
            f"stopped at update {self.trainer.get_num_updates() + 1}: {self.skipped_in_a_row} updates in a row had bad "
            f"numbers ({self.bad[-1].reason}), {why}. {folder / REPORT} says which batches, and what to try"
        )

    def _warn(self, message: str) -> None:
        """Warn once, not once per process."""
        if self.trainer.is_data_parallel_master:
            logger.warning(message)

    def load(self, extra_state: Optional[dict[str, Any]], starts_anew: bool) -> None:
        """Load counts from a checkpoint, if there is one. A run that starts from another's weights counts anew."""
        if extra_state is not None and not starts_anew and "bad_updates" in extra_state:
            self.load_state_dict(extra_state["bad_updates"])
        if self.trainer.is_data_parallel_master:
            self.checkpoints.leave_behind(self.trainer.get_num_updates())


def can_be_guarded(trainer) -> bool:
    """Return False where processes see different gradients (BMUF, SlowMo, sharded weights), and on a TPU."""
    cfg = trainer.cfg
    local_steps = cfg.optimization.use_bmuf or cfg.distributed_training.ddp_backend == "slowmo"
    return not (local_steps or trainer.is_fsdp or trainer.tpu)


def _on_host(like: torch.Tensor, *others) -> torch.Tensor:
    """Return numbers and tensors of one element as a float64 vector, by one copy from the device of `like`."""
    on_device = [
        value.detach().double().reshape(())
        if torch.is_tensor(value) and value.device == like.device
        # A fill, not a copy: it need not wait.
        else like.new_full((), float(value), dtype=torch.float64)
        for value in (like, *others)
    ]
    return torch.stack(on_device).cpu()


@contextmanager
def _aggregators_left_behind() -> Iterator[None]:
    """Leave fairseq's contexts of meters, which do not end themselves when an exception passes through them."""
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
    """Checkpoints of a folder that a run can go back to.

    Args:
        folder: where the run saves, ``--save-dir``.
        suffix: ``--checkpoint-suffix``, which tells runs in one folder apart.
    """

    def __init__(self, folder: str, suffix: str = ""):
        self.folder = folder
        self.suffix = suffix
        self.left_behind: dict[tuple[Path, int], int] = {}

    def leave_behind(self, updates: int) -> None:
        """Ignore checkpoints of more than `updates`, which the run has abandoned; one saved again counts again."""
        for path in checkpoints_in(self.folder, self.suffix):
            version = path, path.stat().st_mtime_ns
            self.left_behind[version] = min(updates, self.left_behind.get(version, updates))

    def choose(self, first_bad: int) -> Optional[Path]:
        """Choose the newest whole checkpoint whose weights then made a good update; failing that, the newest whole one.

        All files are read to see that they are whole.

        Args:
            first_bad: updates made before the first bad one. A checkpoint saved there or later holds the weights that
                gave the bad numbers.
        """
        found = {}
        for path in checkpoints_in(self.folder, self.suffix):
            try:
                updates, has_optimizer = look_into(path)
            except UserError as error:
                logger.warning("not gone back to: %s", error)
                continue
            if has_optimizer and updates <= self.left_behind.get((path, path.stat().st_mtime_ns), updates):
                found[path] = updates
        return max(found, key=lambda path: (found[path] < first_bad, found[path]), default=None)


def roll_back(trainer, checkpoints: GoodCheckpoints, first_bad: int) -> Optional[Path]:
    """Load weights, optimizer, schedule and the number of updates; the data continues from where it is, as in PaLM.

    Chowdhery et al., 2022 (arXiv 2204.02311), section 5.1: the same weights on other batches do not spike again. Every
    process takes the file that the first one chooses. Meters and the time spent stay.

    Returns:
        The checkpoint's path; None where there is none.
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
    """Write ``bad_updates.json`` into the folder of checkpoints, and return the folder. Every process must call it."""
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
