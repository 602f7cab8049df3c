"""A run's optimization settings, and the optimizers and schedules by their names in fairseq-train."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import select_options
from lazyformer_fairseq.training import muon, optimizers, schedules

# Each value of ``--optimizer`` and ``--lr-scheduler`` maps to a class and the dataclass of its options.
OPTIMIZERS = {
    "fused_adam": (optimizers.FusedAdam, optimizers.AdamOptions),
    "nvlamb": (optimizers.NvLamb, optimizers.LambOptions),
    "muon": (muon.MuonAndAdam, muon.MuonOptions),
}
SCHEDULES = {
    "linear_warmup": (schedules.LinearWarmupSchedule, schedules.WarmupOptions),
    "polynomial_warmup": (schedules.PolynomialWarmupSchedule, schedules.PolynomialWarmupOptions),
    "wsd": (schedules.WSDSchedule, schedules.WSDOptions),
    "cosine": (schedules.CosineSchedule, schedules.CosineOptions),
}


def row_of(option: str, rows: Mapping[str, tuple[type, type]], name: str) -> tuple[Any, Any]:
    """Look up the class of an optimizer or schedule and the dataclass of its options.

    Args:
        option: the command-line option, for the error message.
        rows: :data:`OPTIMIZERS` or :data:`SCHEDULES`.
        name: the value of the option.

    Raises:
        UserError: the name is unknown.
    """
    if name not in rows:
        raise UserError(f"{option} {name}: choose from {', '.join(rows)}; any other value requires fairseq-train")
    return rows[name]


@dataclass(frozen=True)
class OptimizationConfig:
    """A run's optimizer, schedule and precision, with the same semantics as fairseq-train's options.

    Attributes:
        updates: the length of the schedule, in updates.
        rate: the peak learning rate.
        seed: the seed for the initial weights, dropout and data order.
        optimizer: a key of :data:`OPTIMIZERS`.
        optimizer_options: the optimizer's options by name.
        schedule: a key of :data:`SCHEDULES`.
        schedule_options: the schedule's options by name.
        update_freq: the number of batches that each process contributes to an update.
        clip_norm: the norm to which gradients are clipped; 0 disables clipping.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        device: ``cpu`` or ``cuda``.
    """

    updates: int
    rate: float
    seed: int = 1
    optimizer: str = "fused_adam"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = "linear_warmup"
    schedule_options: Mapping[str, Any] = field(default_factory=dict)
    update_freq: int = 1
    clip_norm: float = 0.0
    precision: str = "fp32"
    device: str = "cpu"

    @classmethod
    def from_options(cls, options: Mapping[str, Any], **fields: Any) -> "OptimizationConfig":
        """Create a config from options with fairseq-train's names.

        Args:
            options: values by name. Options that do not concern optimization, such as the model's, are ignored.
            fields: additional fields of the config.
        """
        optimizer = options["optimizer"]
        schedule = options["lr_scheduler"]
        return cls(
            optimizer=optimizer,
            optimizer_options=select_options(row_of("--optimizer", OPTIMIZERS, optimizer)[1], options),
            schedule=schedule,
            schedule_options=select_options(row_of("--lr-scheduler", SCHEDULES, schedule)[1], options),
            clip_norm=options["clip_norm"],
            **fields,
        )

    def resolved_optimizer_options(self) -> dict[str, Any]:
        """Return all optimizer options, including defaults."""
        _, options = row_of("--optimizer", OPTIMIZERS, self.optimizer)
        return vars(options(**self.optimizer_options))

    def resolved_schedule_options(self) -> dict[str, Any]:
        """Return all schedule options, including defaults."""
        _, options = row_of("--lr-scheduler", SCHEDULES, self.schedule)
        return vars(options(**self.schedule_options))

    def build_optimizer(self, weights: Iterable[nn.Parameter]) -> Any:
        """Build the optimizer, an :class:`~lazyformer_fairseq.training.optimizers.AdamLike`, for these weights."""
        make, _ = row_of("--optimizer", OPTIMIZERS, self.optimizer)
        cfg = SimpleNamespace(**self.resolved_optimizer_options(), lr=[self.rate])
        return make(cfg, weights)

    def build_schedule(self, optimizer: Any) -> Any:
        """Build the learning-rate schedule for an optimizer."""
        make, _ = row_of("--lr-scheduler", SCHEDULES, self.schedule)
        length = {"lr": [self.rate], "max_update": self.updates, "max_epoch": 0}
        cfg = SimpleNamespace(**self.resolved_schedule_options(), **length)
        return make(cfg, optimizer)
