"""Options for the ``lazyformer bench`` commands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError, whole_number
from lazyformer_fairseq.evaluation.default_vocab_sizes import arch_named
from lazyformer_fairseq.options import DEVICE, LONGEST, PRECISION, duration, option
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import expand, split_sublayers

# Segment and memory lengths for causal models, in tokens, as in PAR Transformer's Table 6.
SEGMENT = 64
REMEMBERED = 640


@dataclass(frozen=True)
class Workload:
    """A timed workload: its title in reports, and whether it includes a backward pass."""

    title: str
    trains: bool


WORKLOADS = {
    "training": Workload("training step: forward, masked-LM loss, backward, AdamW", trains=True),
    "encoder": Workload("encoder alone: forward and backward", trains=True),
    "inference": Workload("encoder alone: inference", trains=False),
    "causal": Workload(
        f"causal language models: inference of a segment after {REMEMBERED} tokens",
        trains=False,
    ),
}


def _product(text: str) -> tuple[int, int]:
    left, _, right = text.partition("x")
    factors = whole_number(left), whole_number(right)
    if not all(factors):
        raise UserError(f"{text!r}: must be two whole numbers joined by x, such as 12x64")
    return factors


def _like_bert(name: str) -> str:
    row = {**CAUSAL_ARCHITECTURES, **ARCHITECTURES}[arch_named(name)]
    bert = split_sublayers(expand(ARCHITECTURES["bert_base"].sublayer_pattern))
    own = split_sublayers(expand(row.sublayer_pattern))
    repeats_sf = own == bert[:2] * (len(own) // 2)
    if name in CAUSAL_ARCHITECTURES or not repeats_sf:
        raise UserError(f"{name} is not an encoder that repeats sf, as the baselines do; use bert_base, for example")
    return name


NUMBERS = partial(option, low=1, high=LONGEST, metavar="N,N,...")
ROUNDS = partial(
    option,
    default=10,
    help="Number of rounds; everything is measured once per round, and the median is reported.",
    low=2,
    high=10**6,
)
BUDGET = partial(
    option,
    default=None,
    help="Time limit after which no new round begins; everything is measured at least once.",
    parse=duration,
    metavar="TIME",
    shown="no limit",
)


@dataclass(frozen=True)
class BenchSettings:
    """Settings for ``lazyformer bench models``.

    Attributes:
        patterns: additional encoders by name, with the baseline's sizes and without attention dropout.

    Raises:
        UserError: a back end is unknown, a pattern cannot be parsed, or a name is used twice.
    """

    archs: tuple[str, ...] = option(
        ("lazyformer_m2x6_s",),
        "Encoders and causal models to measure.",
        "--arch",
        parse=arch_named,
    )
    patterns: Mapping[str, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = NUMBERS((128, 512), "Tokens per sequence; each length is measured separately.")
    tokens: int = option(1024, "Tokens per batch; a batch has at least one sequence.", low=1, high=LONGEST)
    precisions: tuple[str, ...] = option(
        ("fp32",),
        "Numeric precisions: fp32, bf16, fp16.",
        "--precision",
        choices=("fp32", "bf16", "fp16"),
    )
    back_ends: tuple[str, ...] = option(
        ("auto",),
        "Attention back ends: auto, eager, materialize, recompute, fused, flex.",
        "--backend",
    )
    buckets: tuple[int, ...] = option(
        (32, 0),
        "Numbers of buckets in the relative position bias of the models and our BERT; 0 for no bias.",
        "--relative-position-buckets",
        low=0,
    )
    workloads: tuple[str, ...] = option(
        ("training", "encoder", "inference"),
        "Workloads: a training update (training), the encoder's forward and backward pass (encoder), and the encoder's "
        "forward pass, both with one sequence and with --tokens per batch (inference).",
        "--what",
        choices=("training", "encoder", "inference"),
    )
    baseline_back_ends: tuple[str, ...] = option(
        ("eager", "materialize", "recompute", "fused"),
        "Attention back ends to run our BERT on; the fastest one is the baseline.",
        "--baseline-backend",
    )
    baseline_arch: str = option("bert_base", "BERT architecture that sets the baselines' sizes.", parse=_like_bert)
    device: Optional[str] = DEVICE()
    rounds: int = ROUNDS()
    budget: Optional[float] = BUDGET()
    compile: bool = option(False, "Compile every model and the loss with torch.compile.")

    def __post_init__(self) -> None:
        from lazyformer_fairseq.modules.attention.selection import check_back_end

        for name in (*self.back_ends, *self.baseline_back_ends):
            check_back_end(name, 0.0)
        for pattern in self.patterns.values():
            expand(pattern)
        if taken := self.patterns.keys() & self.archs:
            raise UserError(f"--pattern {min(taken)}=...: an --arch already has this name; choose a different name")

    @property
    def encoders(self) -> dict[str, dict[str, Any]]:
        """The options of all encoders to measure, by name."""
        named = {name: ARCHITECTURES[name].options() for name in self.archs if name in ARCHITECTURES}
        sizes = {**ARCHITECTURES[self.baseline_arch].options(), "attention_dropout": 0.0}
        by_pattern = {name: {**sizes, "sublayer_pattern": pattern} for name, pattern in self.patterns.items()}
        return named | by_pattern

    @property
    def causal_archs(self) -> tuple[str, ...]:
        """The names of the causal models to measure."""
        return tuple(name for name in self.archs if name in CAUSAL_ARCHITECTURES)


@dataclass(frozen=True)
class AttentionSettings:
    """Settings for ``lazyformer bench attention``.

    Raises:
        UserError: a back end is unknown.
    """

    patterns: tuple[str, ...] = option(
        ("sl", "s[window=256]", "s[window=256]l", "s[linformer=256]"),
        "Patterns to compare with a plain s.",
    )
    back_ends: tuple[str, ...] = option(
        ("auto",),
        "Back ends to measure each pattern on: auto, eager, materialize, recompute, fused, flex.",
        "--backend",
    )
    lengths: tuple[int, ...] = NUMBERS((512, 2048), "Tokens per sequence.")
    tokens: int = option(512, "Tokens per batch; a batch has at least one sequence.", low=1)
    heads: tuple[Any, ...] = option(("12x64",), "Number of heads and head size.", parse=_product, metavar="NxN,...")
    precision: Optional[str] = PRECISION()
    rounds: int = ROUNDS()
    budget: Optional[float] = BUDGET()
    device: Optional[str] = DEVICE()

    def __post_init__(self) -> None:
        from lazyformer_fairseq.modules.attention.selection import check_back_end

        for name in self.back_ends:
            check_back_end(name, 0.0)
