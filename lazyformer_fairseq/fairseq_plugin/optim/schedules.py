"""The schedules of :mod:`lazyformer_fairseq.training.schedules`, registered with fairseq."""

import math
from typing import List  # noqa: UP035

from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from lazyformer_fairseq.fairseq_plugin.models.config import to_fairseq_dataclass
from lazyformer_fairseq.training import schedules

OF_THE_RUN = (
    ("max_update", int, II("optimization.max_update")),
    ("max_epoch", int, II("optimization.max_epoch")),
    ("lr", List[float], II("optimization.lr")),  # noqa: UP006  omegaconf reads the annotation
)
WarmupConfig = to_fairseq_dataclass(schedules.WarmupOptions, "WarmupConfig", OF_THE_RUN)
PolynomialWarmupConfig = to_fairseq_dataclass(
    schedules.PolynomialWarmupOptions,
    "PolynomialWarmupConfig",
    base=WarmupConfig,
)
WSDConfig = to_fairseq_dataclass(schedules.WSDOptions, "WSDConfig", base=WarmupConfig)


@register_lr_scheduler("linear_warmup", dataclass=WarmupConfig)
class LinearWarmupSchedule(schedules.LinearWarmupSchedule, FairseqLRScheduler):
    """:class:`~lazyformer_fairseq.training.schedules.LinearWarmupSchedule` as a fairseq schedule."""


@register_lr_scheduler("polynomial_warmup", dataclass=PolynomialWarmupConfig)
class PolynomialWarmupSchedule(schedules.PolynomialWarmupSchedule, FairseqLRScheduler):
    """:class:`~lazyformer_fairseq.training.schedules.PolynomialWarmupSchedule` as a fairseq schedule."""


@register_lr_scheduler("wsd", dataclass=WSDConfig)
class WSDSchedule(schedules.WSDSchedule, FairseqLRScheduler):
    """:class:`~lazyformer_fairseq.training.schedules.WSDSchedule` as a fairseq schedule."""


def set_updates_per_epoch(trainer, epoch: int) -> None:
    """Set the schedule's number of updates per epoch, because fairseq builds the schedule before it loads the data.

    Args:
        trainer: fairseq's trainer, with ``epoch_iterator`` set for the epoch.
        epoch: the epoch, counted from 1.
    """
    if hasattr(trainer.lr_scheduler, "set_updates_per_epoch"):
        frequencies = trainer.cfg.optimization.update_freq
        frequency = frequencies[min(epoch, len(frequencies)) - 1]
        trainer.lr_scheduler.set_updates_per_epoch(math.ceil(len(trainer.epoch_iterator) / frequency))
