"""What ``lazyformer glue run`` does where its options say nothing: the settings of two papers' tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from lazyformer_fairseq.finetuning.glue.report.paper_table import LEARNING_RATES, PAPER_TASKS, SEEDS


@dataclass(frozen=True)
class Protocol:
    """Settings of fine-tuning.

    Attributes:
        epochs: of every task; None for each task's own.
        batch_size: rows of an update.
        warmup: share of the updates in which the rate rises.
    """

    tasks: tuple[str, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]
    epochs: Optional[int]
    batch_size: int
    warmup: float


LAZYFORMER = "lazyformer"
PROTOCOLS: Mapping[str, Protocol] = {
    # LazyFormer, appendix A and Table 5.
    LAZYFORMER: Protocol(PAPER_TASKS, LEARNING_RATES, SEEDS, None, 32, 0.06),
    # PAR Transformer, Table 4: two tasks, medians of five runs. The rest are the defaults of the code to which its
    # footnote points (NVIDIA/DeepLearningExamples at 729963dd, BERT's scripts/run_glue.sh): eight GPUs with 16 rows.
    "par": Protocol(("SST-2", "MRPC"), (2.4e-5,), SEEDS, 3, 128, 0.1),
}
