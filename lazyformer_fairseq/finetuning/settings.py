"""The options of ``lazyformer finetune`` and ``lazyformer predict``."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.executors.options import WHERE, ExecutorOptions
from lazyformer_fairseq.options import PRECISION, option
from lazyformer_fairseq.training.trackers import ReportOptions

TASK_NAMES = ("glue", "babylm", "squad")  # values of --task
CUSTOM_OPTIONS = ("text", "label", "labels", "label_type", "metric", "dev_share")
# Options that only some benchmarks accept.
SPECIAL_OPTIONS = ("max_length", "max_train_rows", "glue_head", "skip_mistakes", *CUSTOM_OPTIONS)
BENCHMARK_OPTIONS = ("data", "tasks", "n_best", "max_answer_tokens", "skip_mistakes")  # do not apply to TEXTS
CUSTOM_LRS = (5e-5, 5e-4)  # the first suits large models, the second tiny ones
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
METRICS = {  # the first one selects the epoch and the learning rate
    CLASSES: ("accuracy", "macro_f1", "matthews"),
    SCORES: ("spearman", "pearson"),
    LISTS: ("micro_f1", "macro_f1"),
    ENTITIES: ("entity_f1", "accuracy"),
    TAGS: ("accuracy",),
}


@dataclass(frozen=True, kw_only=True)
class GridSettings(ExecutorOptions, ReportOptions):
    """Settings of ``lazyformer finetune``; the protocol or the data determines the value of a setting that is None."""

    checkpoints: tuple[str, ...] = ()
    output: Path = option(MISSING, "Output folder for prepared data, runs and report.")
    data: Optional[Path] = option(
        None,
        "Folder containing official files, a custom task, or prepared data. A custom task consists of two files named "
        "train and dev (or valid), which end in .tsv, .csv or .jsonl, or in .conll if they have one word and its tag "
        "per line. The data is prepared in OUTPUT.",
        shown="the prepared data in OUTPUT",
    )
    text: tuple[str, ...] = option(
        (),
        "Name of the text column, or the two column names for text pairs.",
        shown="text, or text and text2, sentence1 and sentence2, premise and hypothesis ...",
        section=CUSTOM,
    )
    label: Optional[str] = option(
        None, "Name of the label column.", shown="label, class, score or target", section=CUSTOM
    )
    labels: tuple[str, ...] = option((), "Names of the classes, in order.", shown="sorted", section=CUSTOM)
    label_type: Optional[str] = option(
        None,
        "Type of the labels: classes, scores (regression) or lists (multi-label classification).",
        choices=LABEL_TYPES,
        shown="lists if the first label is a list; scores if most labels are numbers and some are not integers, or if "
        "the column is named score; else classes",
        section=CUSTOM,
    )
    metric: Optional[str] = option(
        None,
        "Metric for selecting the epoch and the learning rate. f1: F1 of the second class (two classes only); "
        "macro_f1: mean of the per-class F1 scores; micro_f1: F1 over all labels of all texts; entity_f1: F1 over all "
        "entities.",
        choices=("accuracy", "macro_f1", "micro_f1", "f1", "matthews", "spearman", "pearson", "entity_f1"),
        shown="accuracy for classes, spearman for scores, micro_f1 for lists; entity_f1 for tags that begin with B- or "
        "I-, accuracy for other tags",
        section=CUSTOM,
    )
    dev_share: Optional[float] = option(
        None,
        "If there is no dev file, fraction of the training rows to hold out as the dev set, such as 0.1.",
        low=0,
        is_open=True,
        high=0.5,
        section=CUSTOM,
    )
    tokenizer: Optional[Path] = option(None, "Tokenizer for official files.", shown="the first checkpoint's tokenizer")
    max_length: Optional[int] = option(
        None,
        "Maximum input length in tokens. When official files are prepared, longer inputs are truncated or, for SQuAD, "
        "split.",
        low=1,
        shown="512, or 384 for SQuAD",
    )
    skip_mistakes: bool = option(False, "SQuAD: skip and list invalid questions in the files.")
    protocol: Optional[str] = option(
        None,
        "Paper to take the default tasks, learning rates, seeds, epochs, batch size and warm-up from: lazyformer "
        "(Table 5) or par (Table 4: SST-2 and MRPC, or SQuAD).",
        choices=("lazyformer", "par"),
        shown="par for SQuAD, else lazyformer",
    )
    tasks: tuple[str, ...] = option((), "Tasks to fine-tune on.", shown=USUAL)
    lrs: tuple[float, ...] = option(
        (),
        "Learning rates.",
        "--lr",
        "--lrs",
        low=0,
        high=1,
        is_open=True,
        shown=f"{USUAL}, or 5e-5,5e-4 for custom tasks",
    )
    seeds: tuple[int, ...] = option(
        (),
        "Random seeds; each is combined with each learning rate.",
        low=0,
        shown="1 to 5, or 1 to 3 for custom tasks",
    )
    epochs: tuple[str, ...] = option(
        (),
        "Number of epochs, for all tasks (N) or one task (TASK=N), as in 10,MNLI=3.",
        metavar="[TASK=]N,...",
        shown=f"{USUAL}, or {CUSTOM_EPOCHS} for custom tasks",
    )
    batch_size: Optional[int] = option(None, "Rows per update.", low=1, shown=USUAL)
    warmup_ratio: Optional[float] = option(
        None,
        "Fraction of the updates used for learning rate warm-up.",
        low=0,
        high=0.999999,
        shown=USUAL,
    )
    max_train_rows: Optional[int] = option(
        None, "Number of training rows per task; all runs use the same rows.", low=1, shown="all"
    )
    glue_head: Optional[str] = option(
        None,
        "Type and dropout of the head on <s>. dense is RoBERTa's head, two linear layers with a tanh between them; "
        "linear is a single layer. Tagging always uses a linear head.",
        metavar="TYPE[:DROPOUT]",
        shown="dense, with the checkpoint's own dropout (0 unless set); the dropout of a linear head is 0.1",
    )
    no_padding: bool = option(
        False, "Concatenate a batch's texts into one row instead of padding them; results differ only in rounding."
    )
    keep_checkpoints: str = option(
        "best",
        "Fine-tuned models to keep: none, the best one per model and task, or all.",
        choices=("none", "best", "all"),
    )
    precision: Optional[str] = PRECISION(help="Training precision.")
    gpus: Optional[str] = option(
        None,
        "GPUs to use, as in CUDA_VISIBLE_DEVICES, or 'none' for the CPU.",
        shown="all",
        section=WHERE,
    )
    threads: int = option(
        1,
        "Threads per run on a CPU. The same seed and number of threads give identical results.",
        low=1,
        section=WHERE,
    )


@dataclass(frozen=True, kw_only=True)
class PredictSettings:
    """Settings of ``lazyformer predict``; None selects the value used in fine-tuning."""

    data: Optional[Path] = option(
        None,
        "GLUE: folder containing the official files or prepared data. SQuAD: file of questions in the official format.",
        shown="the data used in fine-tuning or, for SQuAD, its development set",
    )
    tasks: tuple[str, ...] = option((), "GLUE: tasks to predict; may include AX.", shown="all")
    text: tuple[str, ...] = option(
        (),
        "Name of the text column in TEXTS, or the two column names for text pairs.",
        shown="as in fine-tuning if TEXTS has these columns, else text, sentence ...",
    )
    head: Optional[str] = option(None, "Name of the head used to label TEXTS.", shown="the model's only head")
    n_best: int = option(20, "SQuAD: number of answers per question in nbest_predictions.json.", low=1)
    max_answer_tokens: int = option(30, "SQuAD: maximum answer length in tokens.", low=1)
    skip_mistakes: bool = option(False, "SQuAD: skip invalid questions in the file.")
    tokenizer: Optional[Path] = option(
        None, "Tokenizer folder, or checkpoint folder that contains a tokenizer.", shown="the run's tokenizer"
    )
    max_tokens: int = option(8192, "Maximum number of tokens per batch, including padding.", low=1)
