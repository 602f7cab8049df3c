"""Optimizers and schedules by the names that fairseq-train knows them by, each with its options."""

from collections.abc import Mapping
from typing import Any

from lazyformer_fairseq.errors import UserError
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
    """The class of this name, and that of its options; UserError for a name that is none."""
    if name not in rows:
        raise UserError(f"{option} {name}: choose from {', '.join(rows)}; others are fairseq-train's")
    return rows[name]
