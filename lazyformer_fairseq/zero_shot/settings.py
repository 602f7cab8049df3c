"""The options of ``lazyformer evaluate``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.options import COUNT, DEVICE, option

BENCHMARKS = ("blimp", "pairs")


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Options of ``lazyformer evaluate``."""

    benchmark: str = option(
        "blimp",
        "blimp: BLiMP, with a note if the folder does not contain all of it; pairs: any minimal pairs.",
        choices=BENCHMARKS,
    )
    output: Optional[Path] = option(
        None,
        "Folder for the answers, the report and the plot.",
        shown="results/BENCHMARK",
    )
    ngram: Optional[Path] = option(
        None,
        "Also score an n-gram model of the training text in this folder, which `lazyformer corpus` wrote.",
    )
    order: int = option(5, "Length of the n-grams in tokens.", low=1, high=10)
    pairs: Optional[int] = option(
        None, "Number of pairs per paradigm, evenly spaced over its file.", bounds=COUNT, shown="all"
    )
    mask_rest_of_word: bool = option(
        False,
        "Masked LMs: with each token, also mask the tokens of its word to the right (Kauf and Ivanova, 2023).",
    )
    device: Optional[str] = DEVICE()
    precision: str = option("fp32", "Numeric precision of the models.", choices=("fp32", "bf16", "fp16"))
    max_tokens: int = option(16384, "Maximum number of tokens per batch.", low=1)
