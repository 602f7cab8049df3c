"""The options of fine-tuning: how data is prepared, what a grid runs, and what is predicted."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.executors.options import WHERE, ExecutorOptions
from lazyformer_fairseq.options import PRECISION, option
from lazyformer_fairseq.training.trackers import ReportOptions

TASK_NAMES = ("glue", "babylm", "squad")  # of --task
CUSTOM_OPTIONS = ("text", "label", "labels", "label_type", "metric", "dev_share")
SPECIAL_OPTIONS = ("max_length", "max_train_rows", "glue_head", "skip_mistakes", *CUSTOM_OPTIONS)  # of some benchmarks
OF_BENCHMARKS = ("data", "tasks", "n_best", "max_answer_tokens", "skip_mistakes")  # options of predict, none of TEXTS
CUSTOM_LRS = (5e-5, 5e-4)  # large models learn at the first rate, tiny ones at the second
CUSTOM_SEEDS = (1, 2, 3)
CUSTOM_EPOCHS = 10
USUAL = "the protocol's"
CUSTOM = "Custom labels"  # a section of --help
CLASSES = "classes"
SCORES = "scores"
LISTS = "lists"
LABEL_TYPES = (CLASSES, SCORES, LISTS)
ENTITIES = "entities"
TAGS = "tags"
METRICS = {  # the first selects
    CLASSES: ("accuracy", "macro_f1", "matthews"),
    SCORES: ("spearman", "pearson"),
    LISTS: ("micro_f1", "macro_f1"),
    ENTITIES: ("entity_f1", "accuracy"),
    TAGS: ("accuracy",),
}


@dataclass(frozen=True, kw_only=True)
class GridSettings(ExecutorOptions, ReportOptions):
    """Settings of ``lazyformer finetune``; None leaves the decision to the protocol or the data."""

    checkpoints: tuple[str, ...] = ()
    output: Path = option(MISSING, "Folder for data, runs and report.")
    data: Optional[Path] = option(
        None,
        "Official files, or custom train.tsv and dev.tsv (or valid.tsv; .csv or .jsonl too; .conll with a word "
        "and its tag per line), which are prepared in OUTPUT; or prepared data.",
        shown="the prepared data in OUTPUT",
    )
    text: tuple[str, ...] = option(
        (),
        "Name of the column with the texts, or names of the two columns with pairs.",
        shown="text, or text and text2, sentence1 and sentence2, premise and hypothesis ...",
        section=CUSTOM,
    )
    label: Optional[str] = option(
        None, "Name of the column with the labels.", shown="label, class, score or target", section=CUSTOM
    )
    labels: tuple[str, ...] = option((), "Names of the classes, in their order.", shown="sorted", section=CUSTOM)
    label_type: Optional[str] = option(
        None,
        "Type of the labels.",
        choices=LABEL_TYPES,
        shown="lists if the first is a list; scores if most are numbers and some are not whole, or if the column is "
        "called score",
        section=CUSTOM,
    )
    metric: Optional[str] = option(
        None,
        "Metric that selects epoch and learning rate. f1 is the F1 of the second of two classes, macro_f1 the mean of "
        "all classes, micro_f1 the F1 over all labels of all texts, entity_f1 the F1 over all entities.",
        choices=("accuracy", "macro_f1", "micro_f1", "f1", "matthews", "spearman", "pearson", "entity_f1"),
        shown="accuracy for classes, spearman for scores, micro_f1 for lists; for tags entity_f1 if they begin with B- "
        "or I-, else accuracy",
        section=CUSTOM,
    )
    dev_share: Optional[float] = option(
        None,
        "Share of the training rows to hold out as the dev file, if there is none; 0.1 is usual.",
        low=0,
        is_open=True,
        high=0.5,
        section=CUSTOM,
    )
    tokenizer: Optional[Path] = option(
        None, "Tokenizer for official files.", shown="the one beside the first checkpoint"
    )
    max_length: Optional[int] = option(
        None,
        "Maximum length of an input in tokens; longer inputs in official files are cut or split.",
        low=1,
        shown="512; 384 for SQuAD",
    )
    skip_mistakes: bool = option(False, "SQuAD: leave out and list questions that are wrong in the files.")
    protocol: Optional[str] = option(
        None,
        "Paper whose tasks, learning rates, seeds, epochs, batch size and warm-up are the defaults: LazyFormer (Table "
        "5) or PAR (Table 4: SST-2 and MRPC, or SQuAD).",
        choices=("lazyformer", "par"),
        shown="par for SQuAD, else lazyformer",
    )
    tasks: tuple[str, ...] = option((), "Names of tasks.", shown=USUAL)
    lrs: tuple[float, ...] = option(
        (),
        "Learning rates.",
        "--lr",
        "--lrs",
        low=0,
        high=1,
        is_open=True,
        shown=f"{USUAL}; for custom labels 5e-5,5e-4",
    )
    seeds: tuple[int, ...] = option(
        (),
        "Random seeds; each runs with each learning rate.",
        low=0,
        shown="1 to 5; for custom labels 1 to 3",
    )
    epochs: tuple[str, ...] = option(
        (),
        "Number of epochs for all tasks, or for single ones, as in 10,MNLI=3.",
        metavar="[TASK=]N,...",
        shown=f"{USUAL}; for custom labels {CUSTOM_EPOCHS}",
    )
    batch_size: Optional[int] = option(None, "Rows per update.", low=1, shown=USUAL)
    warmup_ratio: Optional[float] = option(
        None,
        "Share of the updates during which the learning rate rises.",
        low=0,
        high=0.999999,
        shown=USUAL,
    )
    max_train_rows: Optional[int] = option(None, "Rows per task to train on, the same in all runs.", low=1, shown="all")
    glue_head: Optional[str] = option(
        None,
        "Head on <s> and its dropout: dense is RoBERTa's head, two linear maps with a tanh between; linear is one map. "
        "Tags of words always have a linear head.",
        metavar="TYPE[:DROPOUT]",
        shown="dense with the checkpoint's own dropout, 0 unless set; 0.1 for a linear head",
    )
    no_padding: bool = option(
        False, "Compute a batch as one row of its texts, without padding; results differ only by rounding."
    )
    keep_checkpoints: str = option(
        "best",
        "Fine-tuned models to keep: none, the best of each model and task, or all.",
        choices=("none", "best", "all"),
    )
    precision: Optional[str] = PRECISION(help="Precision of training.")
    gpus: Optional[str] = option(
        None,
        "GPUs to use, as in CUDA_VISIBLE_DEVICES, or 'none' for the CPU.",
        shown="all",
        section=WHERE,
    )
    threads: int = option(
        1,
        "Threads per run on a CPU. Equal seeds and threads give equal results, to the last digit.",
        low=1,
        section=WHERE,
    )


@dataclass(frozen=True, kw_only=True)
class PredictSettings:
    """Settings of ``lazyformer predict``; None leaves the decision to the training of the model."""

    data: Optional[Path] = option(
        None,
        "GLUE: official or prepared files. SQuAD: a file of questions in the official layout.",
        shown="the data that the runs were trained on; for SQuAD those that they were scored on",
    )
    tasks: tuple[str, ...] = option((), "GLUE: names of tasks, including AX.", shown="all")
    text: tuple[str, ...] = option(
        (),
        "Name of the column of TEXTS with the texts, or names of the two columns with pairs.",
        shown="as in training, else text, sentence ...",
    )
    head: Optional[str] = option(None, "Name of the head that predicts for TEXTS.", shown="the model's only head")
    n_best: int = option(20, "SQuAD: answers per question in nbest_predictions.json.", low=1)
    max_answer_tokens: int = option(30, "SQuAD: maximum length of an answer in tokens.", low=1)
    skip_mistakes: bool = option(False, "SQuAD: leave out questions that are wrong in the file.")
    tokenizer: Optional[Path] = option(
        None, "Folder of the tokenizer, or of a checkpoint that has one.", shown="the run's"
    )
    max_tokens: int = option(8192, "Maximum number of tokens per batch, including padding.", low=1)
