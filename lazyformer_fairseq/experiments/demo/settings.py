"""The settings of the demo."""

from dataclasses import dataclass
from typing import Optional

from lazyformer_fairseq.options import option
from lazyformer_fairseq.training.laptop import LAPTOP_HELP


@dataclass(frozen=True)
class DemoSettings:
    """The settings that determine the result of the demo; its folder stores them and resumes only with the same ones.

    Attributes:
        vocab_size: the number of symbols in the vocabulary.
        valid_share: the share of the documents that is held out, from which the acceptability task is built.
        tokens_per_sample: the length of the longest block, in tokens.
        sequences: the number of sequences per update.
        finetuning_updates: the number of updates of fine-tuning on the acceptability task.
        seed: the seed of the corpus and of all trainings.
    """

    corpus: Optional[str] = option(
        None,
        "Text file, or folder of .txt files, to train on.",
        shown="the English prose that comes with Python",
    )
    updates: int = option(5000, "Number of updates of pre-training.", low=6)
    recipe: str = option("laptop", f"Training recipe. {LAPTOP_HELP}.", choices=("laptop", "adam"))
    vocab_size: int = 4000
    valid_share: float = 0.2
    tokens_per_sample: int = 32
    sequences: int = 8
    finetuning_updates: int = 400
    seed: int = 1
