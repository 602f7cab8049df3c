"""What `lazyformer bench` measures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.bench.models.workloads import WORKLOADS
from lazyformer_fairseq.measure.costs.machine import PRECISIONS
from lazyformer_fairseq.modules.attention.choice import AUTO, BACKENDS
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import expand


@dataclass(frozen=True)
class BenchSettings:
    """Options of the command, as its help describes them; `minutes` and `batch` None for none given.

    Raises:
        UserError: an unknown name, or sizes that do not fit together.
    """

    archs: tuple[str, ...] = ("lazyformer_m2x6_s",)
    patterns: Mapping[str, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = (128, 512)
    batch: Optional[int] = None
    tokens: int = 1024
    precisions: tuple[str, ...] = ("fp32",)
    back_ends: tuple[str, ...] = (AUTO,)
    baseline_back_ends: tuple[str, ...] = ("eager", "materialize", "recompute", "fused")
    buckets: tuple[int, ...] = (32, 0)
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    baseline_arch: str = "bert_base"
    device: str = "cpu"
    rounds: int = 10
    minutes: Optional[float] = None
    compile: bool = False
    tgt_len: int = 64
    mem_len: int = 640

    def __post_init__(self) -> None:
        check_names("--arch", self.archs, (*ARCHITECTURES, *CAUSAL_ARCHITECTURES))
        check_names("--baseline-arch", (self.baseline_arch,), tuple(ARCHITECTURES))
        check_names("--precision", self.precisions, tuple(PRECISIONS))
        check_names("--backend", self.back_ends, (AUTO, *BACKENDS))
        check_names("--baseline-backend", self.baseline_back_ends, (AUTO, *BACKENDS))
        check_names("--what", self.workloads, tuple(WORKLOADS))
        if not self.lengths or min(self.lengths) < 1:
            raise UserError("--lengths: give numbers from 1 on, such as 128,512")
        if not self.buckets:
            raise UserError("--relative-position-buckets: give numbers, such as 32,0; 0 is no bias")
        for pattern in self.patterns.values():
            expand(pattern)
        if taken := self.patterns.keys() & self.archs:
            raise UserError(f"--pattern {min(taken)}=...: an --arch has this name; give another one")

    @property
    def encoders(self) -> dict[str, dict[str, Any]]:
        """Options of the encoders to measure, by name."""
        baseline = ARCHITECTURES[self.baseline_arch].options()
        named = {name: ARCHITECTURES[name].options() for name in self.archs if name in ARCHITECTURES}
        sizes = {**baseline, "attention_dropout": 0.0}
        return named | {name: {**sizes, "sublayer_pattern": pattern} for name, pattern in self.patterns.items()}

    @property
    def causal_archs(self) -> tuple[str, ...]:
        return tuple(name for name in self.archs if name in CAUSAL_ARCHITECTURES)

    def batch_of(self, time: int) -> int:
        return self.batch or max(1, self.tokens // time)


def check_names(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raises a UserError unless an option has names that are known, each once."""
    if not given:
        raise UserError(f"{option}: give at least one of {', '.join(known)}")
    for name in given:
        if name not in known:
            nearest = get_close_matches(name, known, n=4, cutoff=0) if len(known) > 9 else known
            raise UserError(f"{option} {name}: there is no such one; there are {', '.join(nearest)}")
        if given.count(name) > 1:
            raise UserError(f"{option}: {name} is there twice")
