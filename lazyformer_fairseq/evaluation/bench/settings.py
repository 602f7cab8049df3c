"""Options of `lazyformer bench` and its commands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError, whole_number
from lazyformer_fairseq.evaluation.usual_sizes import arch_named
from lazyformer_fairseq.options import DEVICE, LONGEST, PRECISION, duration, option
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import expand, split_sublayers

# Tokens of a causal model: PAR Transformer, Table 6.
SEGMENT = 64
REMEMBERED = 640


@dataclass(frozen=True)
class Workload:
    """One thing that models do, which is timed."""

    title: str
    trains: bool


WORKLOADS = {
    "training": Workload("training step: forward, masked-LM loss, backward, AdamW", trains=True),
    "encoder": Workload("encoder alone: forward and backward", trains=True),
    "inference": Workload("encoder alone: inference", trains=False),
    "causal": Workload(
        f"causal language models: inference of a segment behind {REMEMBERED} tokens",
        trains=False,
    ),
}


def _product(text: str) -> tuple[int, int]:
    left, _, right = text.partition("x")
    factors = whole_number(left), whole_number(right)
    if not all(factors):
        raise UserError(f"{text!r} is no product of two whole numbers, such as 12x64")
    return factors


def _like_bert(name: str) -> str:
    rows = (ARCHITECTURES["bert_base"], {**CAUSAL_ARCHITECTURES, **ARCHITECTURES}[arch_named(name)])
    bert, own = (split_sublayers(expand(row.sublayer_pattern)) for row in rows)
    if name in CAUSAL_ARCHITECTURES or own != bert[:2] * (len(own) // 2):
        raise UserError(f"{name}: is no encoder of repeated sf, as the baselines are; give bert_base, say")
    return name


NUMBERS = partial(option, low=1, high=LONGEST, metavar="N,N,...")
ROUNDS = partial(option, default=10, help="Samples of each; the median counts.", low=2, high=10**6)
BUDGET = partial(
    option,
    default=None,
    help="Time, after which no round begins; one round of each always runs.",
    parse=duration,
    metavar="TIME",
    shown="no limit",
)


@dataclass(frozen=True)
class BenchSettings:
    """Models side by side.

    Attributes:
        patterns: further encoders, by name, in the sizes of the baseline and without attention dropout.

    Raises:
        UserError: an unknown back end, a pattern that cannot be read, or a name that is there twice.
    """

    archs: tuple[str, ...] = option(
        ("lazyformer_m2x6_s",),
        "Encoders, and causal models, to measure.",
        "--arch",
        parse=arch_named,
    )
    patterns: Mapping[str, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = NUMBERS((128, 512), "Tokens of a sequence; each is a measurement of its own.")
    tokens: int = option(1024, "Of a batch; at least one sequence.", low=1, high=LONGEST)
    precisions: tuple[str, ...] = option(
        ("fp32",),
        "Of fp32, bf16 and fp16.",
        "--precision",
        choices=("fp32", "bf16", "fp16"),
    )
    back_ends: tuple[str, ...] = option(
        ("auto",),
        "Of models: auto, eager, materialize, recompute, fused, flex.",
        "--backend",
    )
    buckets: tuple[int, ...] = option(
        (32, 0),
        "Of the relative bias, of the models and our BERT; 0: none.",
        "--relative-position-buckets",
        low=0,
    )
    workloads: tuple[str, ...] = option(
        ("training", "encoder", "inference"),
        "An update; the encoder's forward and backward; inference at batch 1 and at the batch.",
        "--what",
        choices=("training", "encoder", "inference"),
    )
    baseline_back_ends: tuple[str, ...] = option(
        ("eager", "materialize", "recompute", "fused"),
        "Of our BERT; the fastest of them is the baseline.",
        "--baseline-backend",
    )
    baseline_arch: str = option("bert_base", "A BERT, whose sizes the three baselines have.", parse=_like_bert)
    device: Optional[str] = DEVICE()
    rounds: int = ROUNDS()
    budget: Optional[float] = BUDGET()
    compile: bool = option(False, "Let torch compile every model and the loss.")

    def __post_init__(self) -> None:
        from lazyformer_fairseq.modules.attention.selection import check_back_end

        for name in (*self.back_ends, *self.baseline_back_ends):
            check_back_end(name, 0.0)
        for pattern in self.patterns.values():
            expand(pattern)
        if taken := self.patterns.keys() & self.archs:
            raise UserError(f"--pattern {min(taken)}=...: an --arch has this name; give another one")

    @property
    def encoders(self) -> dict[str, dict[str, Any]]:
        """Options of the encoders to measure, by name."""
        named = {name: ARCHITECTURES[name].options() for name in self.archs if name in ARCHITECTURES}
        sizes = {**ARCHITECTURES[self.baseline_arch].options(), "attention_dropout": 0.0}
        return named | {name: {**sizes, "sublayer_pattern": pattern} for name, pattern in self.patterns.items()}

    @property
    def causal_archs(self) -> tuple[str, ...]:
        """Causal models to measure."""
        return tuple(name for name in self.archs if name in CAUSAL_ARCHITECTURES)


@dataclass(frozen=True)
class AttentionSettings:
    """Attention variants, and back ends.

    Raises:
        UserError: an unknown back end.
    """

    patterns: tuple[str, ...] = option(
        ("sl", "s[window=256]", "s[window=256]l", "s[linformer=256]"),
        "Patterns, each measured beside s.",
    )
    back_ends: tuple[str, ...] = option(
        ("auto",),
        "To measure each on: auto, eager, materialize, recompute, fused, flex.",
        "--backend",
    )
    lengths: tuple[int, ...] = NUMBERS((512, 2048), "Tokens of a sequence.")
    tokens: int = option(512, "Of a batch; at least one sequence.", low=1)
    heads: tuple[Any, ...] = option(("12x64",), "Heads, and the size of each.", parse=_product, metavar="NxN,...")
    precision: Optional[str] = PRECISION()
    rounds: int = ROUNDS()
    budget: Optional[float] = BUDGET()
    device: Optional[str] = DEVICE()

    def __post_init__(self) -> None:
        from lazyformer_fairseq.modules.attention.selection import check_back_end

        for name in self.back_ends:
            check_back_end(name, 0.0)
