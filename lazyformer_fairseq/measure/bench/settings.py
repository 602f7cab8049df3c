"""What `lazyformer bench` and its commands measure, and take as options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import duration, option
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES, CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import expand

# By name: a description, and whether it trains.
WORKLOADS = {
    "training": ("training step: forward, masked-LM loss, backward, AdamW", True),
    "encoder": ("encoder alone: forward and backward", True),
    "inference": ("encoder alone: inference", False),
}
TABLE_4 = "distilbert_base bert_base_absolute bert_base par_bert_base lazy_par_bert_base lazyformer_m2x6_s".split()
# That PAR Transformer's Table 4 prints, in milliseconds on an A100, of SQuAD's inference. + marks an estimate: 61% of
# BERT's, by DistilBERT's paper.
PAPER_LATENCY = {"distilbert_base": "5.3+", "bert_base_absolute": "8.6", "par_bert_base": "5.7"}


def rounds(default: int, help: str = "Samples of each; the median counts.") -> Any:
    """The option --rounds."""
    return option(default, help, low=2)


def precision() -> Any:
    """The option --precision, None where it is not given."""
    shown = "on GPUs bf16 where all have it, else fp16; on a CPU fp32"
    return option(None, "Of all numbers.", choices=("fp32", "bf16", "fp16"), shown=shown)


def budget(default: Optional[str] = None) -> Any:
    """The option --budget, in seconds."""
    help = "Time, after which no round begins; one round of each always runs."
    return option(default, help, parse=duration, metavar="TIME", shown=default or "no limit")


def lengths(*default: int) -> Any:
    """The option --lengths."""
    help = "Tokens of a sequence; each is a measurement of its own."
    return option(default, help, metavar="N,N,...")


def heads(*default: str) -> Any:
    """The option --heads."""
    return option(default, "Heads, and the size of each.", parse=_product, metavar="NxN,...")


def _product(text: str) -> tuple[int, int]:
    left, _, right = text.partition("x")
    if not (left.isdecimal() and right.isdecimal() and int(left) and int(right)):
        raise UserError(f"{text!r} is no product of two whole numbers, such as 12x64")
    return int(left), int(right)


@dataclass(frozen=True)
class BenchSettings:
    """Models side by side.

    Attributes:
        patterns: further encoders, by name, in the sizes of the baseline and without attention dropout.
        batch: None for as many as `tokens` make up.

    Raises:
        UserError: an unknown name, or sizes that do not fit together.
    """

    archs: tuple[str, ...] = option(("lazyformer_m2x6_s",), "Encoders, and causal models, to measure.", "--arch")
    patterns: Mapping[str, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = lengths(128, 512)
    batch: Optional[int] = option(None, "Sequences.", low=1, shown="as many as --tokens make up")
    tokens: int = option(1024, "Of a batch; at least one sequence.", low=1)
    precisions: tuple[str, ...] = option(("fp32",), "Of fp32, bf16 and fp16.", "--precision")
    back_ends: tuple[str, ...] = option(
        ("auto",), "Of models: auto, eager, materialize, recompute, fused, tiles, flex.", "--backend"
    )
    buckets: tuple[int, ...] = option(
        (32, 0), "Of the relative bias, of the models and our BERT; 0: none.", "--relative-position-buckets"
    )
    workloads: tuple[str, ...] = option(
        tuple(WORKLOADS),
        "An update; the encoder's forward and backward; inference at batch 1 and at the batch.",
        "--what",
    )
    baseline_back_ends: tuple[str, ...] = option(
        ("eager", "materialize", "recompute", "fused"),
        "Of our BERT; the fastest of them is the baseline.",
        "--baseline-backend",
    )
    baseline_arch: str = option("bert_base", "Whose sizes the three baselines have.")
    device: str = "cpu"
    rounds: int = rounds(10)
    budget: Optional[float] = budget()
    compile: bool = option(False, "Let torch compile every model and the loss.")
    tgt_len: int = option(64, "Tokens of a causal model's segment.", low=1)
    mem_len: int = option(640, "Tokens that it remembers.", low=0)

    def __post_init__(self) -> None:
        from lazyformer_fairseq.measure.costs.machine import PRECISIONS
        from lazyformer_fairseq.modules.attention.choice import AUTO, BACKENDS

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


@dataclass(frozen=True)
class BackEndSettings:
    """Back ends of lazy attention alone."""

    lengths: tuple[int, ...] = lengths(32, 128, 512, 2048)
    layers: tuple[int, ...] = option((1, 2, 4), "Of a lazy block: an s and those that read it.", metavar="N,N,...")
    batches: tuple[int, ...] = option((1, 8, 32), "Sequences of a batch.", metavar="N,N,...")
    heads: tuple[Any, ...] = heads("4x16", "4x64", "12x64")
    windows: tuple[int, ...] = option(
        (0, 32, 256), "Keys to either side that a query sees; 0 for all keys.", metavar="N,N,..."
    )
    tokens: int = option(4096, "Of a batch at most; longer sequences come alone.", low=1)
    precision: Optional[str] = precision()
    rounds: int = rounds(10)
    budget: Optional[float] = budget("20min")


@dataclass(frozen=True)
class KindSettings:
    """Kinds of attention alone."""

    kinds: tuple[str, ...] = option(
        ("s[window=256]", "s[strided=64]", "s[fixed=64,summary=8]", "s[linformer=256]", "s[window=256]l"),
        "Patterns of s, l and c, such as s[window=256].",
    )
    lengths: tuple[int, ...] = lengths(1024, 4096)
    batch: int = option(1, "Sequences.", low=1)
    heads: tuple[Any, ...] = heads("12x64")
    precision: Optional[str] = precision()
    back_end: str = option("auto", "auto, or one that computes all of them.", "--backend")
    rounds: int = rounds(10)
    budget: Optional[float] = budget()


@dataclass(frozen=True)
class Table4Settings:
    """SQuAD's inference."""

    archs: tuple[str, ...] = option(tuple(TABLE_4), "Encoders; bert_base_absolute is always measured.", "--arch")
    tokens: int = option(384, "Of the sequence.", low=1)
    precision: Optional[str] = precision()
    threads: Optional[int] = option(None, "On a processor.", low=1, shown="torch's")
    rounds: int = rounds(40)
    budget: Optional[float] = budget()
