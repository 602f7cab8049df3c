"""Schedules ``linear_warmup``, ``polynomial_warmup``, ``wsd`` and ``cosine``: the rate grows over the first updates.

Then it falls: at once, or with ``wsd`` in the last updates alone.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import AMOUNT, COUNT_OR_NONE, PROPORTION_OR_ALL, Bounds, option

logger = logging.getLogger(__name__)


@dataclass
class WarmupOptions:
    """Options of :class:`WarmupSchedule`."""

    warmup_ratio: float = option(
        0.01,
        "share of all updates over which the rate grows from zero",
        bounds=PROPORTION_OR_ALL,
    )


class Schedule:
    """A learning rate for each update.

    Args:
        cfg: the schedule's options, and beside them `lr` (several, the first counts), `max_update` and `max_epoch`.
        optimizer: has `set_lr` and `get_lr`.

    Attributes:
        NAME: the value of ``--lr-scheduler``.
        peak: the highest rate.
        num_updates: the updates that were made.
        best: as fairseq's schedules have it, the least loss in validation; nothing here depends on it.
    """

    NAME = ""

    def __init__(self, cfg: Any, optimizer: Any):
        self.cfg = cfg
        self.optimizer = optimizer
        self.best = None
        self.peak = cfg.lr[0]
        self.num_updates = 0

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, from 1."""
        raise NotImplementedError

    def step_update(self, num_updates: int) -> float:
        """Set the rate of the update that follows `num_updates` finished ones."""
        self.num_updates = num_updates
        self.optimizer.set_lr(self.rate(num_updates + 1))
        return self.optimizer.get_lr()

    def state_dict(self) -> dict:
        """Return what checkpoints keep."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore what a checkpoint kept."""
        self.best = state_dict["best"]


class WarmupSchedule(Schedule):
    """A learning rate for each of T updates.

    T is ``--max-update``, or with ``--max-epoch`` the epochs times the updates of the first, whichever is smaller. The
    checkpoint keeps it, so that a resumed run continues the same schedule. Shards of unequal size need
    ``--max-update``.
    """

    def __init__(self, cfg: Any, optimizer: Any):
        super().__init__(cfg, optimizer)
        if not 0 <= cfg.warmup_ratio <= 1:
            raise UserError(f"--warmup-ratio {cfg.warmup_ratio}: must lie in [0, 1]")
        if not cfg.max_update and not cfg.max_epoch:
            raise UserError(f"--lr-scheduler {self.NAME} needs --max-update or --max-epoch to know where zero is")
        self.updates_from_epochs: Optional[int] = None

    @property
    def knows_total(self) -> bool:
        """False as long as only a number of epochs is known."""
        return not self.cfg.max_epoch or self.updates_from_epochs is not None

    @property
    def total_updates(self) -> int:
        """Return T, once it is known."""
        assert self.knows_total
        return min(filter(None, (self.cfg.max_update, self.updates_from_epochs)))

    def set_updates_per_epoch(self, updates: int) -> None:
        """Learn how long an epoch is; a resumed run has the total from its checkpoint."""
        if not self.knows_total:
            self.updates_from_epochs = updates * self.cfg.max_epoch
            logger.info("%s: %d updates in all, %d of them warm-up", self.NAME, self.total_updates, self.warmup_updates)
            self.step_update(self.num_updates)

    @property
    def warmup_updates(self) -> int:
        """Return W."""
        return math.ceil(self.cfg.warmup_ratio * self.total_updates)

    def step_update(self, num_updates: int) -> float:
        """Set the rate, once the total is known."""
        self.num_updates = num_updates
        if not self.knows_total:
            return self.optimizer.get_lr()
        return super().step_update(num_updates)

    def state_dict(self) -> dict:
        """Return what checkpoints keep."""
        return {**super().state_dict(), "updates_from_epochs": self.updates_from_epochs}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore what a checkpoint kept."""
        super().load_state_dict(state_dict)
        self.updates_from_epochs = state_dict.get("updates_from_epochs")


class LinearWarmupSchedule(WarmupSchedule):
    """Warm-up and a linear decay.

    The rate of update n (from 1) of T, W of them warm-up, is peak n / W, then peak (T - n + 1) / (T - W).
    """

    NAME = "linear_warmup"

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, from 1."""
        total = self.total_updates
        warmup = self.warmup_updates
        if update <= warmup:
            return self.peak * update / warmup
        if update > total:
            return 0.0
        return self.peak * (total - update + 1) / (total - warmup)


@dataclass
class PolynomialWarmupOptions(WarmupOptions):
    """Options of :class:`PolynomialWarmupSchedule`."""

    power: float = option(0.5, "of the share of updates that are left, times which the rate is its peak", bounds=AMOUNT)


class PolynomialWarmupSchedule(WarmupSchedule):
    """Warm-up and a polynomial decay.

    The rate of update n (from 1) of T, a share r of them warm-up, is peak (n / T) / r, then peak (1 - n / T)^power.

    The decay counts from update 0, so the rate drops where the warm-up ends: with r = 0.2843 and power 0.5, as in the
    first phase of NVIDIA's BERT, to 0.846 of its peak. The rate of the last update is 0. Both are as in NVIDIA's
    DeepLearningExamples, PyTorch/LanguageModeling/BERT/schedulers.py, PolyWarmUpScheduler; fairseq's
    ``polynomial_decay`` counts from the warm-up's end, and does not drop.
    """

    NAME = "polynomial_warmup"

    def __init__(self, cfg: Any, optimizer: Any):
        super().__init__(cfg, optimizer)
        if not cfg.power > 0:
            raise UserError(f"--power {cfg.power}: must be above 0")

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, from 1."""
        done = update / self.total_updates
        if done < self.cfg.warmup_ratio:
            return self.peak * done / self.cfg.warmup_ratio
        return self.peak * max(0.0, 1 - done) ** self.cfg.power


DECAYS = {"1-sqrt": lambda share: 1 - math.sqrt(share), "linear": lambda share: 1 - share}


@dataclass
class WSDOptions(WarmupOptions):
    """Options of :class:`WSDSchedule`."""

    warmup_updates: int = option(0, "in place of --warmup-ratio", bounds=COUNT_OR_NONE)
    decay: str = option("1-sqrt", "to zero, or linear", choices=tuple(DECAYS))
    decay_share: float = option(0.1, "of all updates, the last; 0: none", bounds=PROPORTION_OR_ALL)
    decay_from: Optional[str] = option(None, "checkpoint of a constant run, to start from unless --save-dir has one")


class WSDSchedule(WarmupSchedule):
    """Warm-up, constant, decay (MiniCPM, Hu et al., 2024, arXiv 2404.06395, section 4).

    The rate of update n (from 1) of T, W of them warm-up, the last D decay: peak n / W; the peak; then the peak times
    1 - x or 1 - sqrt(x), x = (n - 1 - (T - D)) / D (Haegele et al., 2024, arXiv 2405.18392).

    Until the decay begins, nothing depends on T: a run may start from any checkpoint of another one, and decay at its
    own time, to the bit as if it had made all updates itself. The checkpoint keeps W, and another peak than its own is
    warned of. A checkpoint whose own decay has begun is no such start, nor is one that is past the decay's beginning
    here; this holds for every run that resumes.
    """

    NAME = "wsd"

    def __init__(self, cfg: Any, optimizer: Any):
        if not cfg.max_update:
            raise UserError("--lr-scheduler wsd needs --max-update to know when to decay")
        if cfg.max_epoch:
            raise UserError(f"--max-epoch {cfg.max_epoch}: --lr-scheduler wsd counts updates alone; leave it out")
        super().__init__(cfg, optimizer)
        if not 0 <= cfg.decay_share <= 1:
            raise UserError(f"--decay-share {cfg.decay_share}: must lie in [0, 1]")
        self.warmup = cfg.warmup_updates or math.ceil(cfg.warmup_ratio * cfg.max_update)
        self.whole = f"--max-update {cfg.max_update} with --decay-share {cfg.decay_share}"
        self._refuse_overlap("")

    def _refuse_overlap(self, whose: str) -> None:
        if self.warmup > self.decay_start:
            raise UserError(
                f"{self.whole}: the decay would begin after update {self.decay_start}, in the {self.warmup} of "
                f"{whose}warm-up; give a larger --max-update"
            )

    @property
    def decay_start(self) -> int:
        """Return the updates before the decay, for the ``max_update`` that is set now."""
        return self.cfg.max_update - math.ceil(self.cfg.decay_share * self.cfg.max_update)

    @property
    def warmup_updates(self) -> int:
        """Return W."""
        return self.warmup

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, from 1."""
        if update <= self.warmup:
            return self.peak * update / self.warmup
        if update <= self.decay_start or not self.cfg.decay_share:
            return self.peak
        share = (update - 1 - self.decay_start) / (self.cfg.max_update - self.decay_start)
        return self.peak * DECAYS[str(self.cfg.decay)](min(1.0, share))

    def state_dict(self) -> dict:
        """Return what checkpoints keep."""
        return {
            **super().state_dict(),
            "warmup": self.warmup,
            "decay": self._decay,
            "num_updates": self.num_updates,
            "peak": self.peak,
        }

    @property
    def _decay(self) -> list:
        """Return all that the rates of the decay depend on."""
        return [self.decay_start, self.cfg.max_update, str(self.cfg.decay)]

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore what a checkpoint kept.

        Raises:
            UserError: the rate so far was not the one that this run would have had.
        """
        super().load_state_dict(state_dict)
        what = "the checkpoint"
        if self.cfg.decay_from:
            what = f"--decay-from {self.cfg.decay_from}"
        if "decay" not in state_dict:
            raise UserError(
                f"{what}: was not trained with --lr-scheduler wsd, so its rate may not be constant; to take it anyway, "
                "add --reset-lr-scheduler"
            )
        made = state_dict["num_updates"]
        if made > self.cfg.max_update:
            raise UserError(f"--max-update {self.cfg.max_update}: {what} has made {made} updates; give {made} or more")
        own = state_dict["decay"][0]
        start = min(own, self.decay_start)
        if made > start and state_dict["decay"] != self._decay:
            whose = self.whole
            remedy = ", or a larger --max-update"
            if made > own:
                whose = "its own run"
                remedy = ""
            raise UserError(
                f"{what}: {made} updates are made, and the decay of {whose} begins after {start}: give an earlier "
                f"checkpoint{remedy}"
            )
        self.warmup = state_dict["warmup"]
        self._refuse_overlap(f"{what}'s ")
        if state_dict["peak"] != self.peak:
            logger.warning("--lr %g: the %d updates of %s had a peak of %g", self.peak, made, what, state_dict["peak"])


@dataclass
class CosineOptions:
    """Options of :class:`CosineSchedule`."""

    warmup_updates: int = option(0, "over which the rate grows linearly", bounds=COUNT_OR_NONE)
    warmup_init_lr: float = option(0.0, "where it begins", bounds=Bounds(-1))
    min_lr: float = option(0.0, "where the rate ends", bounds=AMOUNT)


class CosineSchedule(Schedule):
    """Warm-up, then half a cosine down to ``--min-lr``: fairseq's schedule of this name, of one period."""

    NAME = "cosine"

    def rate(self, update: int) -> float:
        """Return the learning rate of update number `update`, from 1."""
        cfg = self.cfg
        done = update - 1 - cfg.warmup_updates
        if done < 0:
            return cfg.warmup_init_lr + (update - 1) * ((self.peak - cfg.warmup_init_lr) / cfg.warmup_updates)
        share = 1
        if cfg.max_update > cfg.warmup_updates:
            share = min(1, done / (cfg.max_update - cfg.warmup_updates))
        return cfg.min_lr + 0.5 * (self.peak - cfg.min_lr) * (1 + math.cos(math.pi * share))
