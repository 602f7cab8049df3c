"""What the demo trains: two tiny models of the same size, on the same batches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.options import duration, option

# Equal parameters, as in the paper's Table 2: what the lazy attention saves in projections widens its feed-forward.
MODELS = {
    "bert_m1x4": "--arch bert_tiny --sublayer-pattern M1x4 --encoder-ffn-embed-dim 128",
    "lazyformer_m2x2": "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2x2 --encoder-ffn-embed-dim 160",
}
# At this size "eager" takes two thirds of the time of what "auto" chooses.
SAME_FOR_BOTH = (
    "--encoder-embed-dim 64 --encoder-attention-heads 8 --max-positions 64 --dropout 0 --attention-dropout 0 "
    "--attention-backend eager --optimizer fused_adam --clip-norm 1.0 --lr-scheduler linear_warmup --num-workers 0 "
    "--cpu --no-epoch-checkpoints"
)
FEWEST = 12  # updates: made however late it is, and what the first plan goes by


@dataclass(frozen=True)
class DemoSettings:
    """All that decides the demo's result; kept in its folder, so that a second run knows what it may reuse.

    Attributes:
        vocab_size: all symbols included.
        valid_share: of the documents; the acceptability task is made of these.
        tokens_per_sample: longest block.
        sequences: of an update.
        minutes: in which all must be over, at the price of fewer updates; None for no limit.
        updates: of pre-training, at most.
        rate: peak learning rate of pre-training.
        finetuning_updates: on the acceptability task, at most.
        seed: of everything.
    """

    corpus: Optional[str] = option(
        None, "Text file or folder of .txt files.", shown="the English prose that Python carries"
    )
    vocab_size: int = 4000
    valid_share: float = 0.2
    tokens_per_sample: int = 32
    sequences: int = 8
    minutes: Optional[float] = option(
        None,
        "Time for all of it, such as 4min.",
        "--budget",
        parse=lambda text: duration(text) / 60,
        metavar="TIME",
        shown="4min, or none with --updates",
    )
    updates: Optional[int] = option(None, "Updates of pre-training, at most.", low=FEWEST, shown="5000")
    rate: float = 2e-3
    finetuning_updates: int = 400
    seed: int = 1

    def __post_init__(self):
        if self.minutes is None and self.updates is None:
            object.__setattr__(self, "minutes", 4.0)
        object.__setattr__(self, "updates", self.updates or 5000)

    def pretraining_command(self, model: str, data: Path) -> list[str]:
        """Arguments of the fairseq-train that pre-trains a model of :data:`MODELS`."""
        return self._command(model, self.updates, self.rate, data, [
            *("--task", "full_sentences_masked_lm", "--criterion", "masked_lm_accuracy"),
            *("--tokens-per-sample", str(self.tokens_per_sample), "--adam-betas", "(0.9, 0.98)"),
            *("--warmup-ratio", "0.2", "--batch-size", str(self.sequences), "--batch-size-valid", "128"),
        ])  # fmt: skip

    def finetuning_command(self, model: str, task: Path, checkpoint: Path) -> list[str]:
        """Arguments of the fairseq-train that fine-tunes it on the acceptability task."""
        return self._command(model, self.finetuning_updates, 1e-3, task, [
            *("--task", "glue", "--glue-task", "CoLA", "--criterion", "glue"),
            *("--finetune-from-model", str(checkpoint), "--warmup-ratio", "0.06", "--batch-size", "32"),
        ])  # fmt: skip

    def _command(self, model: str, updates: int, rate: float, data: Path, words: list[str]) -> list[str]:
        return [
            *(str(data), "--user-dir", str(USER_DIR), *MODELS[model].split(), *SAME_FOR_BOTH.split(), *words),
            *("--max-update", str(updates), "--lr", str(rate), "--seed", str(self.seed)),
        ]
