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
        "Type of data: blimp (BLiMP; if the folder is incomplete, the report says so) or pairs (any minimal pairs).",
        choices=BENCHMARKS,
    )
    output: Optional[Path] = option(
        None,
        "Output folder for answers, report and plot.",
        shown="results/BENCHMARK",
    )
    ngram: Optional[Path] = option(
        None,
        "Also evaluate an n-gram model of the training text in this folder, written by `lazyformer corpus`.",
    )
    order: int = option(5, "Order n of the n-gram model, in tokens.", low=1, high=10)
    pairs: Optional[int] = option(
        None,
        "Maximum number of pairs per paradigm; the pairs are evenly spaced over the paradigm's file.",
        bounds=COUNT,
        shown="all",
    )
    mask_rest_of_word: bool = option(
        False,
        "For masked LMs: when scoring a token, also mask the following tokens of its word (Kauf and Ivanova, 2023).",
    )
    device: Optional[str] = DEVICE()
    precision: str = option("fp32", "Numeric precision of the models.", choices=("fp32", "bf16", "fp16"))
    max_tokens: int = option(16384, "Maximum number of tokens per batch.", low=1)
