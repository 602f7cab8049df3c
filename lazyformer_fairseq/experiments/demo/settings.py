"""Settings of the demo."""

from dataclasses import dataclass
from typing import Optional

from lazyformer_fairseq.options import option
from lazyformer_fairseq.training.laptop import LAPTOP_HELP


@dataclass(frozen=True)
class DemoSettings:
    """Settings that decide the demo's result; its folder keeps them, and resumes a demo of the same settings only.

    Attributes:
        vocab_size: number of symbols.
        valid_share: share of the documents that is held out, from which the acceptability task is made.
        tokens_per_sample: longest block.
        sequences: per update.
        finetuning_updates: on the acceptability task.
        seed: the seed of everything.
    """

    corpus: Optional[str] = option(
        None,
        "Text file or folder of .txt files.",
        shown="the English prose that Python carries",
    )
    updates: int = option(5000, "Updates of pre-training.", low=6)
    recipe: str = option("laptop", f"How the models learn. {LAPTOP_HELP}.", choices=("laptop", "adam"))
    vocab_size: int = 4000
    valid_share: float = 0.2
    tokens_per_sample: int = 32
    sequences: int = 8
    finetuning_updates: int = 400
    seed: int = 1
