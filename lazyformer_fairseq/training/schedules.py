"""The learning-rate schedules ``linear_warmup``, ``polynomial_warmup``, ``wsd`` and ``cosine``.

All of them warm the learning rate up over the first updates. It then decays immediately or, with ``wsd``, only over the
last updates.
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
    """Options for :class:`WarmupSchedule`."""

    warmup_ratio: float = option(
        0.01,
        "fraction of all updates over which the learning rate warms up from zero",
        bounds=PROPORTION_OR_ALL,
    )


class Schedule:
    """Base class for learning-rate schedules.

    Args:
        cfg: the schedule's options, `lr` (a sequence; only the first entry is used), `max_update` and `max_epoch`.
        optimizer: an optimizer with `set_lr` and `get_lr`.

    Attributes:
        NAME: the value of ``--lr-scheduler``.
        peak: the peak learning rate.
        num_updates: the number of updates completed so far.
        best: the lowest validation loss, which fairseq's schedules store; it is not used here.
    """

    NAME = ""

    def __init__(self, cfg: Any, optimizer: Any):
        self.cfg = cfg
        self.optimizer = optimizer
        self.best = None
        self.peak = cfg.lr[0]
        self.num_updates = 0

    def rate(self, update: int) -> float:
        """Return the learning rate for update `update`, counting from 1."""
        raise NotImplementedError

    def step_update(self, num_updates: int) -> float:
        """Set the learning rate for the update after `num_updates` updates, and return it."""
        self.num_updates = num_updates
        self.optimizer.set_lr(self.rate(num_updates + 1))
        return self.optimizer.get_lr()

    def state_dict(self) -> dict:
        """Return the state to store in checkpoints."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore the state from a checkpoint."""
        self.best = state_dict["best"]


class WarmupSchedule(Schedule):
    """Base class for schedules that depend on the total number of updates T.

    T is ``--max-update`` or, if smaller, ``--max-epoch`` times the number of updates in the first epoch. Since this
    product assumes epochs of equal length, shards of unequal size need ``--max-update``. T is stored in checkpoints, so
    a resumed run continues the same schedule.
    """

    def __init__(self, cfg: Any, optimizer: Any):
        super().__init__(cfg, optimizer)
        if not 0 <= cfg.warmup_ratio <= 1:
            raise UserError(f"--warmup-ratio {cfg.warmup_ratio}: must be in [0, 1]")
        if not cfg.max_update and not cfg.max_epoch:
            raise UserError(
                f"--lr-scheduler {self.NAME} requires --max-update or --max-epoch to determine when the decay ends"
            )
        self.updates_from_epochs: Optional[int] = None

    @property
    def knows_total(self) -> bool:
        """True if T is known; with ``--max-epoch``, T is unknown until the epoch length is set."""
        return not self.cfg.max_epoch or self.updates_from_epochs is not None

    @property
    def total_updates(self) -> int:
        """The total number of updates T, which must be known."""
        assert self.knows_total
        return min(filter(None, (self.cfg.max_update, self.updates_from_epochs)))

    def set_updates_per_epoch(self, updates: int) -> None:
        """Set the number of updates per epoch, unless T is already known, as it is after loading a checkpoint."""
        if not self.knows_total:
            self.updates_from_epochs = updates * self.cfg.max_epoch
            logger.info("%s: %d updates, including %d for warm-up", self.NAME, self.total_updates, self.warmup_updates)
            self.step_update(self.num_updates)

    @property
    def warmup_updates(self) -> int:
        """The number of warm-up updates W."""
        return math.ceil(self.cfg.warmup_ratio * self.total_updates)

    def step_update(self, num_updates: int) -> float:
        """Set the learning rate for the update after `num_updates` updates, if T is known; return the current rate."""
        self.num_updates = num_updates
        if not self.knows_total:
            return self.optimizer.get_lr()
        return super().step_update(num_updates)

    def state_dict(self) -> dict:
        """Return the state to store in checkpoints."""
        return {**super().state_dict(), "updates_from_epochs": self.updates_from_epochs}

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore the state from a checkpoint."""
        super().load_state_dict(state_dict)
        self.updates_from_epochs = state_dict.get("updates_from_epochs")


class LinearWarmupSchedule(WarmupSchedule):
    """Warm-up, then linear decay.

    In update n of T, counting from 1, the learning rate is peak n / W during the W warm-up updates, and
    peak (T - n + 1) / (T - W) afterwards.
    """

    NAME = "linear_warmup"

    def rate(self, update: int) -> float:
        """Return the learning rate for update `update`, counting from 1."""
        total = self.total_updates
        warmup = self.warmup_updates
        if update <= warmup:
            return self.peak * update / warmup
        if update > total:
            return 0.0
        return self.peak * (total - update + 1) / (total - warmup)


@dataclass
class PolynomialWarmupOptions(WarmupOptions):
    """Options for :class:`PolynomialWarmupSchedule`."""

    power: float = option(
        0.5,
        "exponent p of the decay: the learning rate is peak * (1 - fraction of updates completed)^p",
        bounds=AMOUNT,
    )


class PolynomialWarmupSchedule(WarmupSchedule):
    """Warm-up, then polynomial decay.

    In update n of T, counting from 1, the learning rate is peak (n / T) / r during the warm-up, which takes a fraction
    r of all updates, and peak (1 - n / T)^power afterwards.

    The decay is computed from update 0, so the learning rate drops at the end of the warm-up. With r = 0.2843 and power
    0.5, as in the first phase of NVIDIA's BERT, it drops to 0.846 of its peak. The last update's learning rate is 0.
    PolyWarmUpScheduler in NVIDIA's DeepLearningExamples, PyTorch/LanguageModeling/BERT/schedulers.py, has the same two
    properties. fairseq's ``polynomial_decay`` counts from the end of the warm-up and does not drop.
    """

    NAME = "polynomial_warmup"

    def __init__(self, cfg: Any, optimizer: Any):
        super().__init__(cfg, optimizer)
        if not cfg.power > 0:
            raise UserError(f"--power {cfg.power}: must be greater than 0")

    def rate(self, update: int) -> float:
        """Return the learning rate for update `update`, counting from 1."""
        done = update / self.total_updates
        if done < self.cfg.warmup_ratio:
            return self.peak * done / self.cfg.warmup_ratio
        return self.peak * max(0.0, 1 - done) ** self.cfg.power


# The learning rate as a fraction of its peak, given the fraction of the decay that has passed.
DECAYS = {"1-sqrt": lambda progress: 1 - math.sqrt(progress), "linear": lambda progress: 1 - progress}


@dataclass
class WSDOptions(WarmupOptions):
    """Options for :class:`WSDSchedule`."""

    warmup_updates: int = option(0, "number of warm-up updates; 0: use --warmup-ratio", bounds=COUNT_OR_NONE)
    decay: str = option("1-sqrt", "shape of the decay to zero: 1-sqrt or linear", choices=tuple(DECAYS))
    decay_share: float = option(
        0.1,
        "fraction of all updates, at the end of the run, over which the learning rate decays; 0: no decay",
        bounds=PROPORTION_OR_ALL,
    )
    decay_from: Optional[str] = option(
        None,
        "checkpoint to start from, saved in another run's constant phase; ignored if --save-dir contains a checkpoint",
    )


class WSDSchedule(WarmupSchedule):
    """Warm-up, a constant learning rate, then decay (MiniCPM, Hu et al., 2024, arXiv 2404.06395, section 4).

    Of T updates, the first W are warm-up and the last D are decay. In update n, counting from 1, the learning rate is
    peak n / W during the warm-up and then stays at the peak. During the decay, it is the peak times 1 - x
    or 1 - sqrt(x), where x = (n - 1 - (T - D)) / D (Haegele et al., 2024, arXiv 2405.18392).

    Nothing depends on T until the decay begins. A run can therefore start from any checkpoint of another run and decay
    earlier or later, with exactly the same result as if it had performed all updates itself. W is read from the
    checkpoint, and a peak that differs from the checkpoint's triggers a warning. A checkpoint is rejected if its own
    decay has begun, or if it was saved later than the start of this run's decay. The same checks apply to resumed runs.
    """

    NAME = "wsd"

    def __init__(self, cfg: Any, optimizer: Any):
        if not cfg.max_update:
            raise UserError("--lr-scheduler wsd requires --max-update to determine when the decay begins")
        if cfg.max_epoch:
            raise UserError(
                f"--max-epoch {cfg.max_epoch}: not supported by --lr-scheduler wsd; omit --max-epoch and set only "
                "--max-update"
            )
        super().__init__(cfg, optimizer)
        if not 0 <= cfg.decay_share <= 1:
            raise UserError(f"--decay-share {cfg.decay_share}: must be in [0, 1]")
        self.warmup = cfg.warmup_updates or math.ceil(cfg.warmup_ratio * cfg.max_update)
        self.decay_options = f"--max-update {cfg.max_update} with --decay-share {cfg.decay_share}"
        self._refuse_overlap("")

    def _refuse_overlap(self, warmup_owner: str) -> None:
        if self.warmup > self.decay_start:
            raise UserError(
                f"{self.decay_options}: the decay would begin after update {self.decay_start}, during the "
                f"{self.warmup} updates of {warmup_owner}warm-up; use a larger --max-update"
            )

    @property
    def decay_start(self) -> int:
        """The number of updates before the decay, computed from the current ``max_update``."""
        return self.cfg.max_update - math.ceil(self.cfg.decay_share * self.cfg.max_update)

    @property
    def warmup_updates(self) -> int:
        """The number of warm-up updates W."""
        return self.warmup

    def rate(self, update: int) -> float:
        """Return the learning rate for update `update`, counting from 1."""
        if update <= self.warmup:
            return self.peak * update / self.warmup
        if update <= self.decay_start or not self.cfg.decay_share:
            return self.peak
        progress = (update - 1 - self.decay_start) / (self.cfg.max_update - self.decay_start)
        decay = DECAYS[str(self.cfg.decay)]
        return self.peak * decay(min(1.0, progress))

    def state_dict(self) -> dict:
        """Return the state to store in checkpoints."""
        return {
            **super().state_dict(),
            "warmup": self.warmup,
            "decay": self._decay,
            "num_updates": self.num_updates,
            "peak": self.peak,
        }

    @property
    def _decay(self) -> list:
        """The settings that determine the learning rates during the decay."""
        return [self.decay_start, self.cfg.max_update, str(self.cfg.decay)]

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore the state from a checkpoint.

        Raises:
            UserError: the checkpoint's updates used different learning rates than this run would have used.
        """
        super().load_state_dict(state_dict)
        checkpoint = "the checkpoint"
        if self.cfg.decay_from:
            checkpoint = f"--decay-from {self.cfg.decay_from}"
        if "decay" not in state_dict:
            raise UserError(
                f"{checkpoint} was not trained with --lr-scheduler wsd, so its learning rate may not have been "
                "constant; to continue from this checkpoint anyway, add --reset-lr-scheduler"
            )

        made = state_dict["num_updates"]
        if made > self.cfg.max_update:
            raise UserError(
                f"--max-update {self.cfg.max_update}: {checkpoint} was saved after {made} updates; use {made} or more"
            )

        saved_decay_start = state_dict["decay"][0]
        first_decay_start = min(saved_decay_start, self.decay_start)
        if made > first_decay_start and state_dict["decay"] != self._decay:
            decay_owner = self.decay_options
            remedy = ", or a larger --max-update"
            if made > saved_decay_start:
                decay_owner = "its own run"
                remedy = ""
            raise UserError(
                f"{checkpoint} was saved after {made} updates, but the decay set by {decay_owner} begins "
                f"after {first_decay_start}; use an earlier checkpoint{remedy}"
            )

        self.warmup = state_dict["warmup"]
        self._refuse_overlap(f"{checkpoint}'s ")
        if state_dict["peak"] != self.peak:
            logger.warning(
                "--lr %g: the %d updates of %s used a peak learning rate of %g",
                self.peak,
                made,
                checkpoint,
                state_dict["peak"],
            )


@dataclass
class CosineOptions:
    """Options for :class:`CosineSchedule`."""

    warmup_updates: int = option(0, "number of linear warm-up updates", bounds=COUNT_OR_NONE)
    warmup_init_lr: float = option(0.0, "learning rate at the start of the warm-up", bounds=Bounds(-1))
    min_lr: float = option(0.0, "learning rate at the end of the decay", bounds=AMOUNT)


class CosineSchedule(Schedule):
    """Warm-up, then cosine decay to ``--min-lr``: fairseq's ``cosine`` schedule with a single period."""

    NAME = "cosine"

    def rate(self, update: int) -> float:
        """Return the learning rate for update `update`, counting from 1."""
        cfg = self.cfg
        done = update - 1 - cfg.warmup_updates
        if done < 0:
            step = (self.peak - cfg.warmup_init_lr) / cfg.warmup_updates
            return cfg.warmup_init_lr + (update - 1) * step
        progress = 1
        if cfg.max_update > cfg.warmup_updates:
            progress = min(1, done / (cfg.max_update - cfg.warmup_updates))
        cosine = math.cos(math.pi * progress)
        return cfg.min_lr + 0.5 * (self.peak - cfg.min_lr) * (1 + cosine)
