"""GLUE settings and scores from two papers; the settings are our defaults, and the scores are printed next to ours."""

from collections.abc import Mapping

from lazyformer_fairseq.finetuning.benchmark import Score, TableRow, TuningProtocol

SCORES = (  # each with the metric that selects its task's checkpoints
    Score("MNLI-m", "MNLI", "accuracy"),
    Score("MNLI-mm", "MNLI", "accuracy", split="valid1"),
    Score("QNLI", "QNLI", "accuracy"),
    Score("QQP", "QQP", "accuracy"),
    Score("SST", "SST-2", "accuracy"),
    Score("CoLA", "CoLA", "matthews"),
    Score("MRPC", "MRPC", "accuracy"),
    Score("RTE", "RTE", "accuracy"),
    Score("STS", "STS-B", "pearson"),
)
PAPER_TASKS = ("MNLI", "QNLI", "QQP", "SST-2", "CoLA", "MRPC", "RTE", "STS-B")

# Columns as in Table 1 of the LazyFormer paper, where the two MNLI scores share a column.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "MNLI-m/mm": ("MNLI-m", "MNLI-mm"),
    **{score.name: (score.name,) for score in SCORES[2:]},
}

LEARNING_RATES = (2e-5, 3e-5, 4e-5, 5e-5)
SEEDS = (1, 2, 3, 4, 5)  # the papers report only the number of seeds
LAZYFORMER = "lazyformer"
PAR = "par"
PROTOCOLS: Mapping[str, TuningProtocol] = {
    # LazyFormer (arXiv 2102.12702), appendix A and Table 5.
    LAZYFORMER: TuningProtocol(
        tasks=PAPER_TASKS,
        lrs=LEARNING_RATES,
        seeds=SEEDS,
        epochs=10,
        batch_size=32,
        warmup_ratio=0.06,
    ),
    # PAR Transformer, Table 4: two tasks, medians of five runs. All other settings are the defaults of the code linked
    # in the paper's footnote (NVIDIA/DeepLearningExamples at 729963dd, BERT's scripts/run_glue.sh), which uses eight
    # GPUs with 16 rows each.
    PAR: TuningProtocol(
        tasks=("SST-2", "MRPC"),
        lrs=(2.4e-5,),
        seeds=SEEDS,
        epochs=3,
        batch_size=128,
        warmup_ratio=0.1,
    ),
}


def _table_1(model: str, updates: int, *scores: float) -> TableRow:
    names = [score.name for score in SCORES]
    return TableRow(f"{model} (paper)", updates, dict(zip(names, scores, strict=True)))


PAPER_ROWS = (  # Table 1 of the LazyFormer paper: MNLI-m, -mm, QNLI, QQP, SST, CoLA, MRPC, RTE, STS
    _table_1("BERT", 1_000_000, 85.72, 85.67, 92.07, 91.21, 92.78, 58.80, 88.73, 67.51, 89.23),
    _table_1("M2x6-S", 1_000_000, 85.69, 85.46, 91.14, 91.13, 92.66, 57.86, 87.25, 72.20, 89.79),
    _table_1("M2x6-SD", 1_000_000, 85.34, 85.50, 91.65, 91.22, 93.23, 57.85, 86.76, 70.40, 89.69),
    _table_1("M2x6", 1_000_000, 86.34, 86.31, 91.82, 91.38, 93.00, 60.77, 87.75, 73.65, 90.00),
    _table_1("M2x6 mid", 500_000, 85.81, 85.58, 91.62, 91.31, 92.66, 58.81, 87.75, 71.48, 88.90),
)
PAR_ROWS = (  # Table 4 of the PAR paper (arXiv 2009.04534); DistilBERT's scores are from its own paper
    TableRow("DistilBERT (paper)", None, {"SST": 91.3, "MRPC": 87.5}),
    TableRow("BERT Base (paper)", None, {"SST": 91.5, "MRPC": 88.7}),
    TableRow("PAR BERT Base (paper)", None, {"SST": 91.6, "MRPC": 89.2}),
)
