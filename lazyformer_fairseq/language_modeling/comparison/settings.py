"""The models of `lazyformer lm compare`: miniatures of the PAR paper's, equal in all but their pattern."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.patterns.architectures import CAUSAL_ARCHITECTURES
from lazyformer_fairseq.patterns.grammar import expand

NAMES = ("transformer_xl", "sandwich_transformer", "par_transformer", "lazy_par_transformer")
# By number of sublayers: the base models, of 32, and the same proportions in 16.
MODELS = {
    16: dict(zip(NAMES, ("(sf)x8", "(s)x3 (sf)x5 (f)x3", "(sfff)x3 (f)x4", "sffflfff sfff (f)x4"), strict=True)),
    32: {name: CAUSAL_ARCHITECTURES[f"{name}_base"].sublayer_pattern for name in NAMES},
}


@dataclass(frozen=True)
class ComparisonSettings:
    """All that decides a comparison's result; kept in its folder, so that results of other settings never mix in.

    One option of `lazyformer lm compare` each, whose help describes them.

    Attributes:
        updates: of each model; or
        minutes: of training for each model: so many updates as fit, by a trial of each model's update.
    """

    data: str
    patterns: Mapping[str, str] = field(default_factory=lambda: MODELS[16])
    seeds: Sequence[int] = (1, 2, 3)
    updates: Optional[int] = 2000
    minutes: Optional[float] = None
    embed_dim: int = 64
    ffn_embed_dim: int = 256
    heads: int = 4
    cutoffs: Sequence[int] = (2000, 10_000)
    dropout: float = 0.0
    tgt_len: int = 64
    mem_len: int = 64
    streams: int = 8
    evaluation_tgt_len: int = 64
    evaluation_mem_len: int = 64
    clamp_len: int = 0
    evaluation_streams: int = 64
    rate: float = 3e-3
    warmup_ratio: float = 0.1
    device: str = "cpu"
    precision: str = "fp32"

    def __post_init__(self):
        for pattern in self.patterns.values():
            expand(pattern)  # raises a UserError where it cannot be read
        assert (self.updates is None) != (self.minutes is None)

    def as_kept(self) -> dict[str, Any]:
        """For the folder. Those of older folders, which name no precision, are fp32 on a CPU and bf16 on a GPU."""
        kept = asdict(self)
        if self.precision == ("fp32" if self.device == "cpu" else "bf16"):
            del kept["precision"]
        return kept

    def training_command(self, model: str, seed: int, updates: int) -> list[str]:
        """Arguments of the fairseq-train that trains one model.

        Pre-norm, as in the PAR paper's equations 1 and 2: post-norm needs far more updates than a miniature gets to
        learn more than word frequencies.
        """
        return [
            *(self.data, "--user-dir", str(USER_DIR), "--task", "stream_language_modeling"),
            *("--tgt-len", str(self.tgt_len), "--criterion", "causal_lm", "--arch", "lazyformer_lm"),
            "--decoder-normalize-before",
            *("--sublayer-pattern", self.patterns[model], "--mem-len", str(self.mem_len)),
            *("--dropout", str(self.dropout), "--attention-dropout", "0"),
            *("--activation-dropout", "0"),
            *("--decoder-embed-dim", str(self.embed_dim), "--decoder-ffn-embed-dim", str(self.ffn_embed_dim)),
            *("--decoder-attention-heads", str(self.heads)),
            *("--adaptive-softmax-cutoff", ",".join(map(str, self.cutoffs))),
            *("--optimizer", "fused_adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "0.25"),
            *("--lr-scheduler", "linear_warmup", "--warmup-ratio", str(self.warmup_ratio), "--lr", str(self.rate)),
            *("--batch-size", str(self.streams), "--max-update", str(updates), "--seed", str(seed)),
            *("--num-workers", "0", "--no-epoch-checkpoints"),
            *(["--cpu"] if self.device == "cpu" else []),
            *([] if self.precision == "fp32" else [f"--{self.precision}"]),
        ]
