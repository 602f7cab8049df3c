"""Settings of a model's optimization; optimizers and schedules by the names that fairseq-train has for them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import chosen
from lazyformer_fairseq.training import muon, optimizers, schedules

# By the value of ``--optimizer``, or ``--lr-scheduler``: the class, and the dataclass of its options.
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
    """Return the class of a name, and the dataclass of its options.

    Raises:
        UserError: there is no such name.
    """
    if name not in rows:
        raise UserError(f"{option} {name}: choose from {', '.join(rows)}; others are fairseq-train's")
    return rows[name]


@dataclass(frozen=True)
class OptimizationConfig:
    """Optimizer, schedule and precision of a training, each as fairseq-train's option of that name.

    Attributes:
        updates: the length of the schedule.
        rate: the highest learning rate.
        seed: the seed of weights, dropout and order.
        optimizer: a key of :data:`OPTIMIZERS`.
        optimizer_options: its options by name.
        schedule: a key of :data:`SCHEDULES`.
        schedule_options: its options by name.
        update_freq: batches per update and process.
        clip_norm: the norm that gradients are clipped to; 0 for never.
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
        """Read a config from options by fairseq-train's names, among which those of models and text may be.

        Args:
            options: values by name.
            fields: further fields of the config.
        """
        optimizer = options["optimizer"]
        schedule = options["lr_scheduler"]
        return cls(
            optimizer=optimizer,
            optimizer_options=chosen(row_of("--optimizer", OPTIMIZERS, optimizer)[1], options),
            schedule=schedule,
            schedule_options=chosen(row_of("--lr-scheduler", SCHEDULES, schedule)[1], options),
            clip_norm=options["clip_norm"],
            **fields,
        )

    def resolved_optimizer_options(self) -> dict[str, Any]:
        """Return all options of the optimizer, defaults included."""
        _, options = row_of("--optimizer", OPTIMIZERS, self.optimizer)
        return vars(options(**self.optimizer_options))

    def resolved_schedule_options(self) -> dict[str, Any]:
        """Return all options of the schedule, defaults included."""
        _, options = row_of("--lr-scheduler", SCHEDULES, self.schedule)
        return vars(options(**self.schedule_options))

    def build_optimizer(self, weights: Iterable[nn.Parameter]) -> Any:
        """Return an :class:`~lazyformer_fairseq.training.optimizers.AdamLike` of these weights."""
        make, _ = row_of("--optimizer", OPTIMIZERS, self.optimizer)
        cfg = SimpleNamespace(**self.resolved_optimizer_options(), lr=[self.rate])
        return make(cfg, weights)

    def build_schedule(self, optimizer: Any) -> Any:
        """Return the schedule of an optimizer's rate."""
        make, _ = row_of("--lr-scheduler", SCHEDULES, self.schedule)
        length = {"lr": [self.rate], "max_update": self.updates, "max_epoch": 0}
        cfg = SimpleNamespace(**self.resolved_schedule_options(), **length)
        return make(cfg, optimizer)
