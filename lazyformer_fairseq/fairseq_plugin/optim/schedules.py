"""Schedules ``linear_warmup`` and ``polynomial_warmup``: the rate grows over a share of all updates, then falls."""

import logging
import math
from dataclasses import dataclass
from typing import List, Optional  # noqa: UP035

from fairseq.dataclass import FairseqDataclass
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.options import option

logger = logging.getLogger(__name__)


@dataclass
class WarmupConfig(FairseqDataclass):
    warmup_ratio: float = option(0.01, "share of all updates over which the rate grows from zero")
    max_update: int = II("optimization.max_update")
    max_epoch: int = II("optimization.max_epoch")
    lr: List[float] = II("optimization.lr")  # noqa: UP006  omegaconf reads it


class WarmupSchedule(FairseqLRScheduler):
    """The rate of each of T updates.

    T is ``--max-update``, or with ``--max-epoch`` the epochs times the updates of the first, whichever is smaller. The
    checkpoint keeps it, so that a resumed run continues the same schedule. Shards of unequal size need
    ``--max-update``.

    Attributes:
        NAME: the value of ``--lr-scheduler``.
    """

    NAME = ""

    def __init__(self, cfg: WarmupConfig, optimizer):
        super().__init__(cfg, optimizer)
        if not 0 <= cfg.warmup_ratio <= 1:
            raise UserError(f"--warmup-ratio {cfg.warmup_ratio}: must lie in [0, 1]")
        if not cfg.max_update and not cfg.max_epoch:
            raise UserError(f"--lr-scheduler {self.NAME} needs --max-update or --max-epoch to know where zero is")
        self.peak = cfg.lr[0]
        self.num_updates = 0
        self.updates_from_epochs: Optional[int] = None

    @property
    def total_updates(self) -> Optional[int]:
        """T, or None as long as only a number of epochs is known."""
        if self.cfg.max_epoch and self.updates_from_epochs is None:
            return None
        return min(filter(None, (self.cfg.max_update, self.updates_from_epochs)))

    def set_updates_per_epoch(self, updates: int) -> None:
        """Called when the data of the first epoch is known; a resumed run has the total from its checkpoint."""
        if self.cfg.max_epoch and self.updates_from_epochs is None:
            self.updates_from_epochs = updates * self.cfg.max_epoch
            logger.info("%s: %d updates in all, %d of them warm-up", self.NAME, self.total_updates, self.warmup_updates)
            self.step_update(self.num_updates)

    @property
    def warmup_updates(self) -> int:
        return math.ceil(self.cfg.warmup_ratio * self.total_updates)

    def rate(self, update: int) -> float:
        """Learning rate of update number `update`, from 1."""
        raise NotImplementedError

    def step_update(self, num_updates: int) -> float:
        """Sets the rate of the update that follows `num_updates` finished ones."""
        self.num_updates = num_updates
        if self.total_updates is not None:
            self.optimizer.set_lr(self.rate(num_updates + 1))
        return self.optimizer.get_lr()

    def state_dict(self) -> dict:
        return {**super().state_dict(), "updates_from_epochs": self.updates_from_epochs}

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self.updates_from_epochs = state_dict.get("updates_from_epochs")


def tell_updates_per_epoch(trainer, epoch: int) -> None:
    """The schedule, built before the data, hears how long the epoch is whose iterator fairseq has made."""
    if hasattr(trainer.lr_scheduler, "set_updates_per_epoch"):
        frequencies = trainer.cfg.optimization.update_freq
        frequency = frequencies[min(epoch, len(frequencies)) - 1]
        trainer.lr_scheduler.set_updates_per_epoch(math.ceil(len(trainer.epoch_iterator) / frequency))


@register_lr_scheduler("linear_warmup", dataclass=WarmupConfig)
class LinearWarmupSchedule(WarmupSchedule):
    """The rate of update n (from 1) of T, W of them warm-up: peak n / W, then peak (T - n + 1) / (T - W)."""

    NAME = "linear_warmup"

    def rate(self, update: int) -> float:
        """Learning rate of update number `update`, from 1."""
        total, warmup = self.total_updates, self.warmup_updates
        if update <= warmup:
            return self.peak * update / warmup
        if update > total:
            return 0.0
        return self.peak * (total - update + 1) / (total - warmup)


@dataclass
class PolynomialWarmupConfig(WarmupConfig):
    power: float = option(0.5, "of the share of updates that are left, times which the rate is its peak")


@register_lr_scheduler("polynomial_warmup", dataclass=PolynomialWarmupConfig)
class PolynomialWarmupSchedule(WarmupSchedule):
    """The rate of update n (from 1) of T, a share r of them warm-up: peak (n / T) / r, then peak (1 - n / T)^power.

    The decay counts from update 0, so the rate drops where the warm-up ends: with r = 0.2843 and power 0.5, as in the
    first phase of NVIDIA's BERT, to 0.846 of its peak. The rate of the last update is 0. Both are as in NVIDIA's
    DeepLearningExamples, PyTorch/LanguageModeling/BERT/schedulers.py, PolyWarmUpScheduler; fairseq's
    ``polynomial_decay`` counts from the warm-up's end, and does not drop.
    """

    NAME = "polynomial_warmup"

    def __init__(self, cfg: PolynomialWarmupConfig, optimizer):
        super().__init__(cfg, optimizer)
        if not cfg.power > 0:
            raise UserError(f"--power {cfg.power}: must be above 0")

    def rate(self, update: int) -> float:
        """Learning rate of update number `update`, from 1."""
        done = update / self.total_updates
        if done < self.cfg.warmup_ratio:
            return self.peak * done / self.cfg.warmup_ratio
        return self.peak * max(0.0, 1 - done) ** self.cfg.power
