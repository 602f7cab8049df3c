"""What a user decides of fine-tuning: how data is prepared, what a grid runs, and what is predicted."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.options import option

# Name on the command line -> module that has the benchmark as BENCHMARK. A new one is a file, and a row here.
MODULES = {name: f"lazyformer_fairseq.finetuning.tasks.{name}" for name in ("glue", "squad", "listops", "pairs")}
# Fields that only some benchmarks take, and what they are where nobody gives them.
SPECIAL_OPTIONS = {
    **dict.fromkeys(("max_length", "dev_articles", "stride", "max_question_length", "max_train_rows")),
    **{"skip_mistakes": False, "from_mnli": False, "glue_head": "dense", "pooler_dropout": None},
}
TASKS = "Names of tasks."
LENGTH = "Longer inputs are cut, or divided, at so many tokens, all counted."


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of inputs, and how official files are read; what is None is as the benchmark has it."""

    max_length: Optional[int] = option(None, LENGTH, low=1, shown="512; for SQuAD 384")
    dev_articles: Optional[int] = option(
        None,
        "SQuAD: hold out every Nth article of the file to train on, as OUTPUT/split; DATA may be that file.",
        low=2,
        metavar="N",
        shown="validate on dev-v1.1.json",
    )
    stride: Optional[int] = option(
        None,
        "SQuAD: a context too long for one input gets several, each so many tokens further on.",
        low=1,
        shown="128",
    )
    max_question_length: Optional[int] = option(None, "SQuAD: longer questions are cut.", low=1, shown="64")
    skip_mistakes: bool = option(False, "SQuAD: leave out, and list, questions that are wrong in the files.")


@dataclass(frozen=True, kw_only=True)
class Preparation(Sizes):
    """The request to prepare data; `tokenizer` is its folder."""

    data: Path = option(MISSING, "Folder of the official download.")
    tokenizer: Path = option(MISSING, "The pre-training's: its folder, or a checkpoint's.")
    output: Path = option(MISSING, "Folder of the grid; prepared data go to OUTPUT/tasks, SQuAD's to OUTPUT/data.")
    tasks: tuple[str, ...] = option((), TASKS, shown="all that are in DATA")
    workers: Optional[int] = option(None, "Processes that encode side by side.", low=1, shown="the cores")


@dataclass(frozen=True, kw_only=True)
class GridSettings(Sizes):
    """The request to run a grid; what is None is as the protocol or the data has it."""

    checkpoints: tuple[str, ...] = option(
        (),
        "Pre-trained models: checkpoints, or folders (their best checkpoint, else the last). NAME is the row's in the "
        "table; without one it is the name of the folder.",
        "--checkpoint",
        metavar="[NAME=]PATH...",
    )
    output: Path = option(MISSING, "Data, runs and report go into this folder.")
    prepared: Optional[Path] = option(None, "Prepared data, in place of --data.", shown="in OUTPUT")
    data: Optional[Path] = option(None, "Official files; what is not prepared yet goes to OUTPUT.")
    tokenizer: Optional[Path] = option(None, "For --data.", shown="beside the first checkpoint")
    protocol: Optional[str] = option(
        None,
        "Whose tasks, rates, seeds, epochs, batches and warm-up are the defaults: LazyFormer's Table 5, or PAR's Table "
        "4 (SST-2 and MRPC, or SQuAD).",
        choices=("lazyformer", "par"),
        shown="par for SQuAD, else lazyformer",
    )
    tasks: tuple[str, ...] = option((), TASKS, shown="the protocol's")
    lrs: tuple[float, ...] = option(
        (), "Learning rates.", "--lr", "--lrs", low=0, high=1, is_open=True, shown="the protocol's"
    )
    seeds: tuple[int, ...] = option((), "Random seeds; each runs at each rate.", low=0, shown="1 to 5")
    epochs: Optional[int] = option(None, "Epochs of every task.", low=1, shown="the protocol's")
    task_epochs: tuple[str, ...] = option((), "Epochs of some tasks, as in MNLI=3 QQP=3.", metavar="TASK=N...")
    batch_size: Optional[int] = option(None, "Rows of an update.", low=1, shown="the protocol's")
    warmup_ratio: Optional[float] = option(
        None, "Share of the updates in which the rate rises.", low=0, high=0.999999, shown="the protocol's"
    )
    from_mnli: bool = option(False, "GLUE: RTE, MRPC and STS-B start from the model's best MNLI run.")
    max_train_rows: Optional[int] = option(
        None, "Train on so many rows of a task, all runs on the same.", low=1, shown="all"
    )
    glue_head: str = option(
        "dense",
        "On <s>: RoBERTa's two linear maps with a tanh between, or one linear map.",
        choices=("dense", "linear"),
    )
    pooler_dropout: Optional[float] = option(
        None,
        "Dropout in the head.",
        low=0,
        high=0.999999,
        shown="the checkpoint's, 0 unless set, in a dense head; 0.1 in a linear one",
    )
    keep_checkpoints: str = option(
        "best",
        "Fine-tuned models to keep: of no run, of the best of each model and task, of each run.",
        choices=("none", "best", "all"),
    )
    precision: Optional[str] = option(
        None,
        "Of training.",
        choices=("fp32", "bf16", "fp16"),
        shown="on GPUs bf16 where all have it, else fp16; on a CPU fp32",
    )
    gpus: Optional[str] = option(None, "As CUDA_VISIBLE_DEVICES, or 'none' for the CPU.", shown="all")
    workers: Optional[int] = option(None, "Runs at a time.", low=1, shown="as many as GPUs, else cores / threads")
    threads: int = option(
        1, "Of a run on a CPU. Equal seeds and equal threads give equal results, to the last digit.", low=1
    )
    executor: str = option(
        "processes",
        "Where runs go: to this machine, to Slurm as an array, to submitit's processes (to try that).",
        choices=("processes", "slurm", "submitit-local"),
    )
    slurm: tuple[str, ...] = option(
        (),
        "submitit's parameters, such as slurm_partition=gpu gpus_per_node=1 timeout_min=600.",
        metavar="NAME=VALUE...",
    )


@dataclass(frozen=True, kw_only=True)
class PredictSettings:
    """The request to predict; what is None is as the model was trained."""

    data: Optional[Path] = option(
        None, "GLUE: official files, or prepared ones.", shown="what the runs were trained on"
    )
    tasks: tuple[str, ...] = option((), "GLUE: names of tasks, AX too.", shown="all")
    zip: bool = option(False, "GLUE: write submission.zip too.")
    file: Optional[Path] = option(
        None, "SQuAD: questions, in the official layout.", shown="the grid's development file"
    )
    n_best: int = option(20, "SQuAD: answers to a question in nbest_predictions.json.", low=1)
    max_answer_tokens: int = option(30, "SQuAD: longest answer.", low=1)
    max_length: Optional[int] = option(None, "SQuAD: tokens of an input.", low=1, shown="as trained")
    stride: Optional[int] = option(None, "SQuAD: of inputs on one context.", low=1, shown="as trained")
    max_question_length: Optional[int] = option(None, "SQuAD: longer ones are cut.", low=1, shown="as trained")
    skip_mistakes: bool = option(False, "SQuAD: leave out questions that are wrong in the file.")
    tokenizer: Optional[Path] = option(None, "Its folder, or a checkpoint's.", shown="the run's")
    max_tokens: int = option(8192, "Tokens of a batch, padding included.", low=1)


# Left out where a command is of the other benchmark alone.
GLUE_ONLY = frozenset(
    ("task_epochs", "from_mnli", "max_train_rows", "glue_head", "pooler_dropout", "protocol", "tasks", "zip")
)
SQUAD_ONLY = frozenset(
    ("dev_articles", "stride", "max_question_length", "skip_mistakes", "file", "n_best", "max_answer_tokens")
)
