"""Schedule ``polynomial_warmup``: linear warm-up, then a power of what is left of all updates, as in NVIDIA's BERT."""

from dataclasses import dataclass

from fairseq.optim.lr_scheduler import register_lr_scheduler

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.optim.warmup import WarmupConfig, WarmupSchedule
from lazyformer_fairseq.fairseq_plugin.reliability.options import option


@dataclass
class PolynomialWarmupConfig(WarmupConfig):
    power: float = option(
        0.5, "after the warm-up the rate is its peak times this power of the share of updates that are left"
    )


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
