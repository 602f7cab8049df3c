"""The demo's settings."""

from dataclasses import dataclass
from typing import Optional

from lazyformer_fairseq.options import option
from lazyformer_fairseq.training.laptop import LAPTOP_HELP


@dataclass(frozen=True)
class DemoSettings:
    """The settings that determine the demo's result. Its folder stores them, and resuming requires the same settings.

    Attributes:
        vocab_size: the number of symbols in the vocabulary.
        valid_share: the fraction of the documents that is held out and used to build the acceptability task.
        tokens_per_sample: the length of the longest block, in tokens.
        sequences: the number of sequences per update.
        finetuning_updates: the number of fine-tuning updates on the acceptability task.
        seed: the seed of the corpus and of all runs.
    """

    corpus: Optional[str] = option(
        None,
        "Text file, or folder of .txt files, to train on.",
        shown="the English prose that ships with Python",
    )
    updates: int = option(5000, "Number of pre-training updates.", low=6)
    recipe: str = option(
        "laptop", f"Training recipe. {LAPTOP_HELP}; adam: Adam with linear decay.", choices=("laptop", "adam")
    )
    vocab_size: int = 4000
    valid_share: float = 0.2
    tokens_per_sample: int = 32
    sequences: int = 8
    finetuning_updates: int = 400
    seed: int = 1
