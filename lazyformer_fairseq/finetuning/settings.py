"""What a user decides of fine-tuning: how data is prepared, what a grid runs, and what is predicted."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.options import PRECISION, option

TASK_NAMES = ("glue", "squad")  # of --task
CUSTOM_OPTIONS = ("text", "label", "kind", "metric")
SPECIAL_OPTIONS = ("max_length", "max_train_rows", "glue_head", "skip_mistakes", *CUSTOM_OPTIONS)  # of some benchmarks
OF_BENCHMARKS = ("data", "tasks", "n_best", "max_answer_tokens", "skip_mistakes")  # options of predict, none of TEXTS
CUSTOM_LRS = (5e-5, 5e-4)  # large models learn at the first rate, tiny ones at the second
CUSTOM_SEEDS = (1, 2, 3)
CUSTOM_EPOCHS = 10
USUAL = "the protocol's"
OWN = "Labels of your own"  # a section of --help
CLASSES, SCORES = KINDS = ("classes", "scores")
METRICS_OF_KIND = {CLASSES: ("accuracy", "macro_f1", "matthews"), SCORES: ("spearman", "pearson")}  # the first selects


def _usual(own: object) -> str:
    return f"{USUAL}; of labels of your own {own}"


@dataclass(frozen=True, kw_only=True)
class GridSettings:
    """The request to run a grid; what is None is as the protocol or the data has it."""

    checkpoints: tuple[str, ...] = ()
    output: Path = option(MISSING, "Data, runs and report go into this folder.")
    data: Optional[Path] = option(
        None,
        "Official files, or your own train.tsv and dev.tsv (or valid.tsv; .csv or .jsonl too), which are prepared in "
        "OUTPUT; or prepared data.",
        shown="what is prepared in OUTPUT",
    )
    text: tuple[str, ...] = option(
        (), "Column of the texts, or two columns of pairs, by name; by number from 1 if no line names them.",
        shown="text, or text and text2, sentence1 and sentence2, premise and hypothesis ...", section=OWN,
    )  # fmt: skip
    label: Optional[str] = option(None, "Column of the labels.", shown="label, class, score or target", section=OWN)
    kind: Optional[str] = option(
        None, "What labels are.", choices=KINDS,
        shown="scores if most are numbers and some are not whole, or the column is called score", section=OWN,
    )  # fmt: skip
    metric: Optional[str] = option(
        None, "Which selects epoch and rate. f1 is that of the second of two classes, macro_f1 the mean of all.",
        choices=("accuracy", "macro_f1", "f1", "matthews", "spearman", "pearson"),
        shown="accuracy of classes, spearman of scores", section=OWN,
    )  # fmt: skip
    tokenizer: Optional[Path] = option(None, "For official files.", shown="beside the first checkpoint")
    max_length: Optional[int] = option(
        None, "Of official files: longer inputs are cut, or divided, at so many tokens, all counted.",
        low=1, shown="512; for SQuAD 384",
    )  # fmt: skip
    skip_mistakes: bool = option(False, "SQuAD: leave out, and list, questions that are wrong in the files.")
    protocol: Optional[str] = option(
        None,
        "Whose tasks, rates, seeds, epochs, batches and warm-up are the defaults: LazyFormer's Table 5, or PAR's Table "
        "4 (SST-2 and MRPC, or SQuAD).",
        choices=("lazyformer", "par"), shown="par for SQuAD, else lazyformer",
    )  # fmt: skip
    tasks: tuple[str, ...] = option((), "Names of tasks.", shown=USUAL)
    lrs: tuple[float, ...] = option(
        (),
        "Learning rates.",
        "--lr",
        "--lrs",
        low=0,
        high=1,
        is_open=True,
        shown=_usual("5e-5,5e-4"),
    )
    seeds: tuple[int, ...] = option(
        (),
        "Random seeds; each runs at each rate.",
        low=0,
        shown="1 to 5; of labels of your own 1 to 3",
    )
    epochs: tuple[str, ...] = option(
        (),
        "Of every task, and of some, as in 10 MNLI=3.",
        metavar="[TASK=]N...",
        shown=_usual(CUSTOM_EPOCHS),
    )
    batch_size: Optional[int] = option(None, "Rows of an update.", low=1, shown=USUAL)
    warmup_ratio: Optional[float] = option(
        None,
        "Share of the updates in which the rate rises.",
        low=0,
        high=0.999999,
        shown=USUAL,
    )
    max_train_rows: Optional[int] = option(None, "Rows of a task to train on, equal in all runs.", low=1, shown="all")
    glue_head: Optional[str] = option(
        None, "On <s>, and its dropout: dense is RoBERTa's two linear maps with a tanh between, linear is one.",
        metavar="KIND[:DROPOUT]", shown="dense with the checkpoint's own dropout, 0 unless set; of a linear one 0.1",
    )  # fmt: skip
    no_padding: bool = option(False, "Compute a batch as a row of its texts, without padding: equal but for rounding.")
    keep_checkpoints: str = option(
        "best", "Fine-tuned models to keep: of no run, of the best of each model and task, of each run.",
        choices=("none", "best", "all"),
    )  # fmt: skip
    precision: Optional[str] = PRECISION(help="Of training.")
    gpus: Optional[str] = option(None, "As CUDA_VISIBLE_DEVICES, or 'none' for the CPU.", shown="all")
    workers: Optional[int] = option(None, "Runs at a time.", low=1, shown="as many as GPUs, else cores / threads")
    threads: int = option(1, "Of a run on a CPU. Equal seeds and threads give equal results, to the last digit.", low=1)
    slurm: tuple[str, ...] = option(
        (), "Send runs to Slurm, as an array, with submitit's parameters: slurm_partition=gpu timeout_min=600.",
        metavar="NAME=VALUE...",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PredictSettings:
    """The request to predict; what is None is as the model was trained."""

    data: Optional[Path] = option(
        None, "GLUE: official files, or prepared ones; SQuAD: a file of questions, in the official layout.",
        shown="what the runs were trained on; for SQuAD what they were marked on",
    )  # fmt: skip
    tasks: tuple[str, ...] = option((), "GLUE: names of tasks, AX too.", shown="all")
    text: tuple[str, ...] = option(
        (), "Of TEXTS: the column of texts, or two of pairs, by name; by number from 1 if no line names them.",
        shown="as in training, else text, sentence ...",
    )  # fmt: skip
    head: Optional[str] = option(None, "Of TEXTS: the head that predicts.", shown="the only one of the model")
    n_best: int = option(20, "SQuAD: answers to a question in nbest_predictions.json.", low=1)
    max_answer_tokens: int = option(30, "SQuAD: longest answer.", low=1)
    skip_mistakes: bool = option(False, "SQuAD: leave out questions that are wrong in the file.")
    tokenizer: Optional[Path] = option(None, "Its folder, or a checkpoint's.", shown="the run's")
    max_tokens: int = option(8192, "Tokens of a batch, padding included.", low=1)
