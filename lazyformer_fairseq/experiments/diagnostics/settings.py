"""What a comparison on a diagnostic trains, and with which commands."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.options import option
from lazyformer_fairseq.patterns.grammar import expand

SCRATCH, SELF_PRETRAINED = "from scratch", "self-pretrained"
VALIDATION_ROWS = 64  # of a batch


@dataclass(frozen=True)
class TaskRunSettings:
    """All that decides the result; kept in its folder, so that results of other settings never mix in.

    Attributes:
        data_sha256: of the prepared data's settings.
        max_positions: of the models: as many as the longest input has tokens.
    """

    data: str
    data_sha256: str
    max_positions: int
    patterns: Mapping[str, str]
    self_pretrain: int = option(
        0, "Also train each model to fill masks in the task's own training inputs first.", low=0, metavar="UPDATES"
    )
    updates: int = option(2000, "On the task, of every model.", low=1)
    seeds: tuple[int, ...] = option((1, 2, 3), "Each trains every model.", low=0, metavar="N,N,...")
    batch_size: int = option(32, "Inputs of an update.", low=1)
    embed_dim: int = option(128, "Embedding dimension.", low=1)
    ffn_embed_dim: int = option(256, "Width of the feed-forward sublayers.", low=1)
    heads: int = option(4, "Attention heads.", low=1)
    dropout: float = option(0.0, "Not on attention.", low=0, high=0.999)
    rate: float = option(5e-4, "Highest rate on the task.", "--lr", low=0, is_open=True, high=1)
    self_pretrain_rate: float = option(
        1e-3, "Highest rate of self-pretraining.", "--self-pretrain-lr", low=0, is_open=True, high=1
    )
    mask_prob: float = option(0.15, "Share of symbols to find.", low=0, is_open=True, high=1)
    warmup_ratio: float = option(0.1, "Share of the updates until that rate.", low=0, high=1)
    post_norm: bool = option(False, "LayerNorms stand behind sublayers, in place of before them.")
    device: str = "cpu"
    precision: str = "fp32"

    def __post_init__(self):
        if not self.patterns:
            raise UserError("--pattern: give at least one")
        for pattern in self.patterns.values():
            expand(pattern)  # raises a UserError where it cannot be read

    @property
    def starts(self) -> tuple[str, ...]:
        return (SCRATCH, SELF_PRETRAINED) if self.self_pretrain else (SCRATCH,)

    def self_pretraining_command(self, pattern: str, seed: int) -> list[str]:
        """Arguments of the fairseq-train that fills masks in the task's training inputs."""
        return [
            *(self.data, "--task", "inputs_masked_lm", "--criterion", "masked_lm_accuracy"),
            *("--tokens-per-sample", str(self.max_positions), "--mask-prob", str(self.mask_prob)),
            *self._common(pattern, seed, self.self_pretrain, self.self_pretrain_rate),
        ]

    def fine_tuning_command(self, pattern: str, seed: int, checkpoint: Path | None) -> list[str]:
        """Arguments of the fairseq-train that learns the labels, from a checkpoint or from random weights."""
        return [
            *(self.data, "--task", "glue", "--criterion", "glue", "--pooler-dropout", str(self.dropout)),
            *([] if checkpoint is None else ["--finetune-from-model", str(checkpoint)]),
            *self._common(pattern, seed, self.updates, self.rate),
        ]

    def _common(self, pattern: str, seed: int, updates: int, rate: float) -> list[str]:
        """Pre-norm by default, which from random weights needs fewer updates to learn anything."""
        return [
            *("--user-dir", str(USER_DIR), "--arch", "lazyformer", "--sublayer-pattern", pattern),
            *("--encoder-embed-dim", str(self.embed_dim), "--encoder-ffn-embed-dim", str(self.ffn_embed_dim)),
            *("--encoder-attention-heads", str(self.heads), "--max-positions", str(self.max_positions)),
            *("--relative-position-buckets", "32", "--dropout", str(self.dropout), "--attention-dropout", "0"),
            *([] if self.post_norm else ["--encoder-normalize-before"]),
            *("--optimizer", "fused_adam", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "1.0"),
            *("--lr-scheduler", "linear_warmup", "--warmup-ratio", str(self.warmup_ratio), "--lr", str(rate)),
            *("--max-update", str(updates), "--batch-size", str(self.batch_size), "--seed", str(seed)),
            *("--batch-size-valid", str(VALIDATION_ROWS), "--num-workers", "0", "--no-epoch-checkpoints"),
            *(["--cpu"] if self.device == "cpu" else []),
            *([] if self.precision == "fp32" else [f"--{self.precision}"]),
        ]
