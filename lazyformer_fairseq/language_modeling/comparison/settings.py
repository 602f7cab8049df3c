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
class ComparisonRecipe:
    """How a comparison trains.

    Attributes:
        help: one line.
        rate: the highest one, unless the user gives another.
        warmup_ratio: share of the updates until then, the same.
        decayed_to: share of the highest rate that is left in the end.
        options: of fairseq-train.
    """

    help: str
    rate: float
    warmup_ratio: float
    decayed_to: float
    options: str

    def schedule(self, rate: float, warmup_ratio: float, updates: int) -> list[str]:
        """Options of fairseq-train."""
        if not self.decayed_to:
            return ["--lr-scheduler", "linear_warmup", "--warmup-ratio", str(warmup_ratio), "--lr", str(rate)]
        warmup = ["--warmup-updates", str(round(warmup_ratio * updates)), "--warmup-init-lr", "0"]
        return ["--lr-scheduler", "cosine", *warmup, "--lr", str(rate), "--min-lr", str(self.decayed_to * rate)]


RECIPES = {
    "adam": ComparisonRecipe(
        "Adam (0.9, 0.98), linear decay to zero", 3e-3, 0.1, 0.0, "--optimizer fused_adam --adam-betas (0.9,0.98)"
    ),
    "nvidia": ComparisonRecipe(
        "LAMB, cosine decay to a tenth, as NVIDIA's configurations of Transformer-XL",
        0.01,
        0.025,
        0.1,
        "--optimizer nvlamb --weight-decay 0 --max-weight-norm 10 --no-bias-correction",
    ),
}


@dataclass(frozen=True)
class ComparisonSettings:
    """All that decides a comparison's result; kept in its folder, so that results of other settings never mix in.

    One option of `lazyformer lm compare` each, whose help describes them.

    Attributes:
        recipe: a name of RECIPES.
        normalize_before: whether LayerNorms stand before sublayers.
        same_length: of evaluation; training has none.
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
    rate: float = RECIPES["adam"].rate
    warmup_ratio: float = RECIPES["adam"].warmup_ratio
    recipe: str = "adam"
    normalize_before: bool = True
    same_length: bool = False
    device: str = "cpu"
    precision: str = "fp32"

    def __post_init__(self):
        for pattern in self.patterns.values():
            expand(pattern)  # raises a UserError where it cannot be read
        assert (self.updates is None) != (self.minutes is None)

    def as_kept(self) -> dict[str, Any]:
        """For the folder. Older ones name no precision, which is then fp32 on a CPU and bf16 on a GPU, nor the rest."""
        kept = {name: value for name, value in asdict(self).items() if name not in _NEW or value != _NEW[name]}
        if self.precision == ("fp32" if self.device == "cpu" else "bf16"):
            del kept["precision"]
        return kept

    def training_command(self, model: str, seed: int, updates: int) -> list[str]:
        """Arguments of the fairseq-train that trains one model.

        Pre-norm by default, as in the PAR paper's equations 1 and 2: post-norm needs far more updates of Adam than a
        miniature gets to learn more than word frequencies.
        """
        recipe = RECIPES[self.recipe]
        return [
            *(self.data, "--user-dir", str(USER_DIR), "--task", "stream_language_modeling"),
            *("--tgt-len", str(self.tgt_len), "--criterion", "causal_lm", "--arch", "lazyformer_lm"),
            *(["--decoder-normalize-before"] if self.normalize_before else []),
            *("--sublayer-pattern", self.patterns[model], "--mem-len", str(self.mem_len)),
            *("--dropout", str(self.dropout), "--attention-dropout", "0"),
            *("--activation-dropout", "0"),
            *("--decoder-embed-dim", str(self.embed_dim), "--decoder-ffn-embed-dim", str(self.ffn_embed_dim)),
            *("--decoder-attention-heads", str(self.heads)),
            *("--adaptive-softmax-cutoff", ",".join(map(str, self.cutoffs))),
            *(*recipe.options.split(), "--clip-norm", "0.25"),
            *recipe.schedule(self.rate, self.warmup_ratio, updates),
            *("--batch-size", str(self.streams), "--max-update", str(updates), "--seed", str(seed)),
            *("--num-workers", "0", "--no-epoch-checkpoints"),
            *(["--cpu"] if self.device == "cpu" else []),
            *([] if self.precision == "fp32" else [f"--{self.precision}"]),
        ]


# What older folders do not name.
_NEW = {"recipe": "adam", "normalize_before": True, "same_length": False}
