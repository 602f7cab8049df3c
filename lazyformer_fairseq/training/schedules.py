"""The learning-rate schedules ``linear_warmup``, ``polynomial_warmup``, ``wsd`` and ``cosine``.

In all of them the learning rate grows over the first updates. Then it decays at once or, with ``wsd``, only in the last
updates.
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
        "share of all updates, at the start, over which the learning rate grows from zero",
        bounds=PROPORTION_OR_ALL,
    )


class Schedule:
    """The base class of schedules, which set the learning rate of each update.

    Args:
        cfg: the schedule's options, and `lr` (a sequence whose first entry is used), `max_update` and `max_epoch`.
        optimizer: an optimizer with `set_lr` and `get_lr`.

    Attributes:
        NAME: the value of ``--lr-scheduler``.
        peak: the peak learning rate.
        num_updates: the number of updates made so far.
        best: the lowest validation loss, which fairseq's schedules keep too; nothing here depends on it.
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
        """Set the learning rate for the update after `num_updates` updates, and return it."""
        self.num_updates = num_updates
        self.optimizer.set_lr(self.rate(num_updates + 1))
        return self.optimizer.get_lr()

    def state_dict(self) -> dict:
        """Return the state that checkpoints store."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore the state from a checkpoint."""
        self.best = state_dict["best"]


class WarmupSchedule(Schedule):
    """The base class of schedules whose warm-up and decay depend on the total number of updates T.

    T is ``--max-update`` or ``--max-epoch`` times the number of updates in the first epoch, whichever is smaller. Since
    the latter assumes epochs of equal length, shards of unequal size need ``--max-update``. Checkpoints store T, so
    that a resumed run continues the same schedule.
    """

    def __init__(self, cfg: Any, optimizer: Any):
        super().__init__(cfg, optimizer)
        if not 0 <= cfg.warmup_ratio <= 1:
            raise UserError(f"--warmup-ratio {cfg.warmup_ratio}: must lie in [0, 1]")
        if not cfg.max_update and not cfg.max_epoch:
            raise UserError(
                f"--lr-scheduler {self.NAME} needs --max-update or --max-epoch to know when the learning rate is zero"
            )
        self.updates_from_epochs: Optional[int] = None

    @property
    def knows_total(self) -> bool:
        """True if T is known; with ``--max-epoch`` it is known only once the length of an epoch is."""
        return not self.cfg.max_epoch or self.updates_from_epochs is not None

    @property
    def total_updates(self) -> int:
        """The total number of updates T, which must be known."""
        assert self.knows_total
        return min(filter(None, (self.cfg.max_update, self.updates_from_epochs)))

    def set_updates_per_epoch(self, updates: int) -> None:
        """Set the number of updates per epoch, unless T is known already, as from a checkpoint."""
        if not self.knows_total:
            self.updates_from_epochs = updates * self.cfg.max_epoch
            logger.info("%s: %d updates in all, %d of them warm-up", self.NAME, self.total_updates, self.warmup_updates)
            self.step_update(self.num_updates)

    @property
    def warmup_updates(self) -> int:
        """The number of warm-up updates W."""
        return math.ceil(self.cfg.warmup_ratio * self.total_updates)

    def step_update(self, num_updates: int) -> float:
        """Set the learning rate for the update after `num_updates` updates if T is known, and return it."""
        self.num_updates = num_updates
        if not self.knows_total:
            return self.optimizer.get_lr()
        return super().step_update(num_updates)

    def state_dict(self) -> dict:
        """Return the state that checkpoints store."""
        return {**super().state_dict(), "updates_from_epochs": self.updates_from_epochs}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore the state from a checkpoint."""
        super().load_state_dict(state_dict)
        self.updates_from_epochs = state_dict.get("updates_from_epochs")


class LinearWarmupSchedule(WarmupSchedule):
    """Warm-up, then linear decay.

    In update n (from 1) of T, the learning rate is peak n / W during the W warm-up updates, and
    peak (T - n + 1) / (T - W) afterwards.
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

    power: float = option(
        0.5,
        "exponent p of the decay: the learning rate is peak (1 - share of updates made)^p",
        bounds=AMOUNT,
    )


class PolynomialWarmupSchedule(WarmupSchedule):
    """Warm-up, then polynomial decay.

    In update n (from 1) of T, the learning rate is peak (n / T) / r during the warm-up, which is the share r of all
    updates, and peak (1 - n / T)^power afterwards.

    The decay counts from update 0, so the learning rate drops at the end of the warm-up. With r = 0.2843 and power 0.5,
    as in the first phase of NVIDIA's BERT, it drops to 0.846 of its peak. The learning rate of the last update is 0.
    Both properties are those of PolyWarmUpScheduler in NVIDIA's DeepLearningExamples,
    PyTorch/LanguageModeling/BERT/schedulers.py. fairseq's ``polynomial_decay`` counts from the end of the warm-up and
    does not drop.
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

    warmup_updates: int = option(0, "number of warm-up updates, in place of --warmup-ratio", bounds=COUNT_OR_NONE)
    decay: str = option("1-sqrt", "shape of the decay to zero: 1-sqrt or linear", choices=tuple(DECAYS))
    decay_share: float = option(
        0.1,
        "share of all updates, at the end, in which the learning rate decays; 0: no decay",
        bounds=PROPORTION_OR_ALL,
    )
    decay_from: Optional[str] = option(
        None,
        "checkpoint of a run whose learning rate is still constant, to start from unless --save-dir has one",
    )


class WSDSchedule(WarmupSchedule):
    """Warm-up, a constant learning rate, then decay (MiniCPM, Hu et al., 2024, arXiv 2404.06395, section 4).

    Of T updates, the first W are warm-up and the last D are decay. In update n (from 1), the learning rate is
    peak n / W during the warm-up, then the peak, and during the decay the peak times 1 - x or 1 - sqrt(x), with
    x = (n - 1 - (T - D)) / D (Haegele et al., 2024, arXiv 2405.18392).

    Nothing depends on T until the decay begins. A run can therefore start from any checkpoint of another run and decay
    earlier or later, with exactly the result of a run that made all updates itself. The checkpoint determines W; a peak
    that differs from the checkpoint's causes a warning. A checkpoint is rejected if its own decay has begun, or if it
    was made after the decay begins in this run. The same holds for every resumed run.
    """

    NAME = "wsd"

    def __init__(self, cfg: Any, optimizer: Any):
        if not cfg.max_update:
            raise UserError("--lr-scheduler wsd needs --max-update to know when to decay")
        if cfg.max_epoch:
            raise UserError(f"--max-epoch {cfg.max_epoch}: --lr-scheduler wsd counts only updates; leave it out")
        super().__init__(cfg, optimizer)
        if not 0 <= cfg.decay_share <= 1:
            raise UserError(f"--decay-share {cfg.decay_share}: must lie in [0, 1]")
        self.warmup = cfg.warmup_updates or math.ceil(cfg.warmup_ratio * cfg.max_update)
        self.whole = f"--max-update {cfg.max_update} with --decay-share {cfg.decay_share}"
        self._refuse_overlap("")

    def _refuse_overlap(self, whose: str) -> None:
        if self.warmup > self.decay_start:
            raise UserError(
                f"{self.whole}: the decay would begin after update {self.decay_start}, during the {self.warmup} "
                f"updates of {whose}warm-up; give a larger --max-update"
            )

    @property
    def decay_start(self) -> int:
        """The number of updates before the decay, from the current ``max_update``."""
        return self.cfg.max_update - math.ceil(self.cfg.decay_share * self.cfg.max_update)

    @property
    def warmup_updates(self) -> int:
        """The number of warm-up updates W."""
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
        """Return the state that checkpoints store."""
        return {
            **super().state_dict(),
            "warmup": self.warmup,
            "decay": self._decay,
            "num_updates": self.num_updates,
            "peak": self.peak,
        }

    @property
    def _decay(self) -> list:
        """All settings on which the learning rates of the decay depend."""
        return [self.decay_start, self.cfg.max_update, str(self.cfg.decay)]

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore the state from a checkpoint.

        Raises:
            UserError: the checkpoint's updates had other learning rates than this run would have used.
        """
        super().load_state_dict(state_dict)
        what = "the checkpoint"
        if self.cfg.decay_from:
            what = f"--decay-from {self.cfg.decay_from}"
        if "decay" not in state_dict:
            raise UserError(
                f"{what}: was not trained with --lr-scheduler wsd, so its learning rate may not have been constant; to "
                "use it anyway, add --reset-lr-scheduler"
            )
        made = state_dict["num_updates"]
        if made > self.cfg.max_update:
            raise UserError(
                f"--max-update {self.cfg.max_update}: {what} was saved after {made} updates; give {made} or more"
            )
        own = state_dict["decay"][0]
        start = min(own, self.decay_start)
        if made > start and state_dict["decay"] != self._decay:
            whose = self.whole
            remedy = ", or a larger --max-update"
            if made > own:
                whose = "its own run"
                remedy = ""
            raise UserError(
                f"{what}: was saved after {made} updates, but the decay of {whose} begins after {start}; give an "
                f"earlier checkpoint{remedy}"
            )
        self.warmup = state_dict["warmup"]
        self._refuse_overlap(f"{what}'s ")
        if state_dict["peak"] != self.peak:
            logger.warning("--lr %g: the %d updates of %s used a peak of %g", self.peak, made, what, state_dict["peak"])


@dataclass
class CosineOptions:
    """Options of :class:`CosineSchedule`."""

    warmup_updates: int = option(0, "updates over which the learning rate grows linearly", bounds=COUNT_OR_NONE)
    warmup_init_lr: float = option(0.0, "learning rate at the start of the warm-up", bounds=Bounds(-1))
    min_lr: float = option(0.0, "learning rate at the end", bounds=AMOUNT)


class CosineSchedule(Schedule):
    """Warm-up, then half a cosine down to ``--min-lr``: fairseq's ``cosine`` schedule with a single period."""

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
