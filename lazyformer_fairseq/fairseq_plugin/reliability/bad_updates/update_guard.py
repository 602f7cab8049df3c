"""Decides which updates are bad, counts them, and rolls back or stops after many in a row."""

import logging
import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any, Optional

import torch
from fairseq.logging import metrics

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.bad_updates.report import REPORT, write_report
from lazyformer_fairseq.fairseq_plugin.reliability.bad_updates.rollback import GoodCheckpoints, roll_back
from lazyformer_fairseq.fairseq_plugin.reliability.options import ReliabilityConfig

logger = logging.getLogger(__name__)

RECENT = 100  # updates that the median loss is taken over
ENOUGH = 20  # updates before the median means something: in the first ones the loss falls fast


class BadUpdate(Exception):
    """The numbers of an update cannot be trusted; raised before the optimizer steps."""


class LossHistory:
    """Losses of the last good updates, in the criterion's own unit.

    Args:
        spike: a loss of more than this many times their median is a spike; 0 for never.
    """

    def __init__(self, spike: float):
        self.spike = spike
        self.losses: deque[float] = deque(maxlen=RECENT)

    def is_spike(self, loss: float) -> bool:
        if not self.spike or len(self.losses) < ENOUGH:
            return False
        return loss > self.spike * median(self.losses) > 0

    def add(self, loss: float) -> None:
        self.losses.append(loss)

    def replace(self, losses: Iterable[float]) -> None:
        self.losses = deque(losses, maxlen=RECENT)


class UpdateGuard:
    """The guard of one trainer. All processes of a run see the same numbers, so all decide the same.

    Attributes:
        skipped, rollbacks: counts over the whole run, saved with checkpoints.
        skipped_in_a_row: since the last good update or rollback.
        bad: the last bad updates, for the report.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self.max_in_a_row = _option(trainer, "max_skipped_updates")
        self.max_rollbacks = _option(trainer, "max_rollbacks")
        self.history = LossHistory(_option(trainer, "loss_spike"))
        self._check_options()
        self.checkpoints = GoodCheckpoints(trainer.cfg.checkpoint.save_dir, trainer.checkpoint_suffix)
        self.bad: deque[dict[str, Any]] = deque(maxlen=100)
        self.skipped = self.skipped_in_a_row = self.rollbacks = 0
        self.first_bad = 0
        self.begin_update()

    def _check_options(self) -> None:
        if self.max_in_a_row < 1:
            raise UserError(f"--max-skipped-updates {self.max_in_a_row}: must be 1 or more")
        if self.max_rollbacks < 0:
            raise UserError(f"--max-rollbacks {self.max_rollbacks}: must not be negative")
        if self.history.spike and not self.history.spike > 1:
            raise UserError(f"--loss-spike {self.history.spike}: must be more than 1, or 0 for never")

    def begin_update(self) -> None:
        self.logs: list[dict] = []
        self.sample_sizes: list = []
        self.loss = self.gradient_norm = None

    def hear_batch(self, criterion, _, output: tuple) -> None:
        """Forward hook of the criterion: keeps what it logs for a batch, and the sample size, still on the device."""
        if criterion.training:
            _, sample_size, log = output
            self.logs.append(log)
            self.sample_sizes.append(sample_size)

    def hear_all_processes(self, logs: list[dict], sample_size) -> None:
        """The same for the whole update, where several processes share it."""
        self.begin_update()
        self.logs, self.sample_sizes = list(logs), [sample_size]

    def judge(self, gradient_norm: torch.Tensor) -> torch.Tensor:
        """Raises BadUpdate, or returns the gradient's norm, moved to the CPU.

        One copy brings norm, sample size and all logged values to the host. Right after this fairseq checks that the
        norm is finite and reads the others for its meters; each read would wait for the GPU.
        """
        on_host = self.read_numbers(gradient_norm)
        if not math.isfinite(self.gradient_norm):
            raise BadUpdate("the gradient is NaN or Inf")
        if self.loss is not None and not math.isfinite(self.loss):
            raise BadUpdate("the loss is NaN or Inf")
        if self.loss is not None and self.history.is_spike(self.loss):
            raise BadUpdate(f"the loss is more than --loss-spike {self.history.spike:g} times the recent median")
        return on_host

    def read_numbers(self, gradient_norm: torch.Tensor) -> torch.Tensor:
        """Sets the update's norm and loss; the loss is None if there was nothing to predict or the criterion logs none.

        Puts the logged values on the host, where fairseq will look for them.

        Raises:
            UserError: there is a bound on the loss, but no loss to compare.
        """
        losses = [log["loss"] for log in self.logs if "loss" in log]
        if self.history.spike and not losses:
            raise UserError("--loss-spike: this --criterion logs no loss; leave the option out")
        logged = [(log, name) for log in self.logs for name, value in log.items() if _is_number(value)]
        norm, loss, sample_size, *values = _on_host(
            gradient_norm, sum(losses), sum(self.sample_sizes), *(log[name] for log, name in logged)
        )
        for (log, name), value in zip(logged, values, strict=True):
            log[name] = value.to(log[name].dtype)
        self.gradient_norm = norm.item()
        self.loss = (loss / sample_size).item() if losses and sample_size else None
        return norm.float()

    @property
    def unit(self) -> str:
        """Of losses for the user, as in the training log."""
        return "squared error" if getattr(self.trainer.get_criterion(), "is_regression", False) else "bits"

    def in_unit(self, loss: Optional[float]) -> Optional[float]:
        return loss / math.log(2) if loss is not None and self.unit == "bits" else loss

    def note_good_update(self) -> None:
        self.skipped_in_a_row = 0
        if self.loss is not None:
            self.history.add(self.loss)

    def skip(self, reason: BadUpdate, samples: list) -> None:
        """Counts the update, whose gradient nobody will use; after too many in a row rolls back, or stops the run.

        A skipped update counts as one of the run's, so schedule, data and checkpoints continue as without the skip.

        Raises:
            UserError: there were too many rollbacks already, or there is no checkpoint yet.
        """
        trainer, update = self.trainer, self.trainer.get_num_updates()
        if not self.skipped_in_a_row:
            self.first_bad = update
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.bad.append(self._describe(reason, update + 1, samples))
        self._warn(
            f"update {update + 1} is skipped: {reason} (loss {self.in_unit(self.loss)} {self.unit}, gradient norm "
            f"{self.gradient_norm}); "
            f"{self.skipped_in_a_row} in a row, {self.skipped} in all"
        )
        _drop_gradients(trainer)
        if self.skipped_in_a_row < self.max_in_a_row:
            trainer.set_num_updates(update + 1)
        elif self.rollbacks < self.max_rollbacks:
            self._roll_back()
        else:
            self._stop(f"after {self.rollbacks} rollbacks (--max-rollbacks)")
        if hasattr(trainer.task, "forget_memory"):  # activations that the next update would have started from
            trainer.task.forget_memory()

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
            f"numbers ({self.bad[-1]['reason']}), {why}. {folder / REPORT} says which batches, and what to try"
        )

    def _warn(self, message: str) -> None:
        """Warns once, not once per process."""
        if self.trainer.is_data_parallel_master:
            logger.warning(message)

    def _describe(self, reason: BadUpdate, update: int, samples: list) -> dict[str, Any]:
        trainer = self.trainer
        iterator = getattr(trainer, "epoch_iterator", None)
        return {
            "update": update,
            "epoch": iterator.epoch if iterator is not None else None,
            "reason": str(reason),
            "loss": self.in_unit(self.loss),
            "gradient_norm": self.gradient_norm,
            "learning_rate": trainer.get_lr(),
            "samples": [torch.as_tensor(sample["id"]).tolist() for sample in samples if sample and "id" in sample],
        }

    def log_counts(self) -> None:
        """fairseq's own kind of meter, so that a run without the plugin can read the checkpoint."""
        metrics.log_scalar("skipped", self.skipped, weight=0, priority=710)
        metrics.log_scalar("rollbacks", self.rollbacks, weight=0, priority=711)

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "rollbacks": self.rollbacks, "losses": list(self.history.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.rollbacks = state["skipped"], state["rollbacks"]
        self.history.replace(state["losses"])


def _option(trainer, name: str):
    """Other tasks have no such option: the default then applies."""
    return getattr(trainer.cfg.task, name, getattr(ReliabilityConfig, name))


def _drop_gradients(trainer) -> None:
    """Drops their multiplier too: fairseq expects that bf16 never skips a step."""
    trainer.zero_grad()
    if getattr(trainer.optimizer, "_multiply_factor", None) is not None and trainer.optimizer.scaler is None:
        trainer.optimizer._multiply_factor = 1.0


def _is_number(value) -> bool:
    return torch.is_tensor(value) and value.numel() == 1


def _on_host(like: torch.Tensor, *others) -> torch.Tensor:
    """Numbers and tensors of one element as a float64 vector on the CPU, by one copy from the device of `like`."""
    values = [like, *others]
    on_device = [
        value.detach().double().reshape(())
        if torch.is_tensor(value) and value.device == like.device
        # A fill, not a copy: it need not wait.
        else like.new_full((), float(value), dtype=torch.float64)
        for value in values
    ]
    return torch.stack(on_device).cpu()
