"""Schedule ``linear_warmup``: linear warm-up over a share of all updates, then linear decay to zero (Table 5)."""

from dataclasses import dataclass

from fairseq.optim.lr_scheduler import register_lr_scheduler

from lazyformer_fairseq.fairseq_plugin.optim.warmup import WarmupConfig, WarmupSchedule


@dataclass
class LinearWarmupConfig(WarmupConfig):
    pass


@register_lr_scheduler("linear_warmup", dataclass=LinearWarmupConfig)
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
