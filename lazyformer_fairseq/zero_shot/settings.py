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
        "blimp: BLiMP, and a note where the folder does not hold all of it; pairs: any minimal pairs.",
        choices=BENCHMARKS,
    )
    output: Optional[Path] = option(
        None,
        "Folder of the answers, the report and the picture.",
        shown="results/BENCHMARK",
    )
    ngram: Optional[Path] = option(
        None,
        "Also score an n-gram model of the training text in this folder, which `lazyformer corpus` wrote.",
    )
    order: int = option(5, "Tokens of an n-gram.", low=1, high=10)
    pairs: Optional[int] = option(None, "Pairs of each paradigm, evenly spaced.", bounds=COUNT, shown="all")
    mask_rest_of_word: bool = option(
        False,
        "Masked LMs: with each token, also mask the rest of its word (Kauf and Ivanova, 2023).",
    )
    device: Optional[str] = DEVICE()
    precision: str = option("fp32", "Numeric precision of the models.", choices=("fp32", "bf16", "fp16"))
    max_tokens: int = option(16384, "Tokens per batch.", low=1)
