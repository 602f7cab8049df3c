"""The options of fine-tuning: how data is prepared, what a grid runs, and what is predicted."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.executors.options import WHERE, ExecutorOptions
from lazyformer_fairseq.options import PRECISION, option

TASK_NAMES = ("glue", "babylm", "squad")  # of --task
CUSTOM_OPTIONS = ("text", "label", "labels", "label_type", "metric")
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
class GridSettings(ExecutorOptions):
    """The request to run a grid; what is None is as the protocol or the data has it."""

    checkpoints: tuple[str, ...] = ()
    output: Path = option(MISSING, "Data, runs and report go into this folder.")
    data: Optional[Path] = option(
        None,
        "Official files, or custom train.tsv and dev.tsv (or valid.tsv; .csv or .jsonl too; .conll with a word "
        "and its tag per line), which are prepared in OUTPUT; or prepared data.",
        shown="what is prepared in OUTPUT",
    )
    text: tuple[str, ...] = option(
        (),
        "Column of the texts, or two columns of pairs, by name.",
        shown="text, or text and text2, sentence1 and sentence2, premise and hypothesis ...",
        section=CUSTOM,
    )
    label: Optional[str] = option(None, "Column of the labels.", shown="label, class, score or target", section=CUSTOM)
    labels: tuple[str, ...] = option((), "Classes in their order.", shown="sorted", section=CUSTOM)
    label_type: Optional[str] = option(
        None,
        "What the labels are.",
        choices=LABEL_TYPES,
        shown="lists if the first is one; scores if most are numbers and some are not whole, or the column is called "
        "score",
        section=CUSTOM,
    )
    metric: Optional[str] = option(
        None,
        "Metric that selects epoch and rate. f1 is that of the second of two classes, macro_f1 the mean of all, "
        "micro_f1 that of all labels of all texts, entity_f1 that of all entities.",
        choices=("accuracy", "macro_f1", "micro_f1", "f1", "matthews", "spearman", "pearson", "entity_f1"),
        shown="accuracy of classes, spearman of scores, micro_f1 of lists; of words' tags entity_f1 if they begin with "
        "B- or I-, else accuracy",
        section=CUSTOM,
    )
    tokenizer: Optional[Path] = option(None, "Tokenizer for official files.", shown="beside the first checkpoint")
    max_length: Optional[int] = option(
        None,
        "Longest input in tokens; longer ones in official files are cut, or divided.",
        low=1,
        shown="512; for SQuAD 384",
    )
    skip_mistakes: bool = option(False, "SQuAD: leave out, and list, questions that are wrong in the files.")
    protocol: Optional[str] = option(
        None,
        "Paper whose tasks, rates, seeds, epochs, batches and warm-up are the defaults: LazyFormer (Table 5), or PAR "
        "(Table 4: SST-2 and MRPC, or SQuAD).",
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
        "Random seeds; each runs at each rate.",
        low=0,
        shown="1 to 5; for custom labels 1 to 3",
    )
    epochs: tuple[str, ...] = option(
        (),
        "Epochs of every task, and of some, as in 10,MNLI=3.",
        metavar="[TASK=]N,...",
        shown=f"{USUAL}; for custom labels {CUSTOM_EPOCHS}",
    )
    batch_size: Optional[int] = option(None, "Rows per update.", low=1, shown=USUAL)
    warmup_ratio: Optional[float] = option(
        None,
        "Share of the updates in which the rate rises.",
        low=0,
        high=0.999999,
        shown=USUAL,
    )
    max_train_rows: Optional[int] = option(None, "Rows of a task to train on, equal in all runs.", low=1, shown="all")
    glue_head: Optional[str] = option(
        None,
        "Head on <s>, and its dropout: dense is RoBERTa's two linear maps with a tanh between, linear is one. Tags of "
        "words have a linear one.",
        metavar="TYPE[:DROPOUT]",
        shown="dense with the checkpoint's own dropout, 0 unless set; of a linear one 0.1",
    )
    no_padding: bool = option(False, "Compute a batch as a row of its texts, without padding: equal but for rounding.")
    keep_checkpoints: str = option(
        "best",
        "Fine-tuned models to keep: of no run, of the best of each model and task, of each run.",
        choices=("none", "best", "all"),
    )
    precision: Optional[str] = PRECISION(help="Precision of training.")
    gpus: Optional[str] = option(
        None,
        "GPUs, as in CUDA_VISIBLE_DEVICES, or 'none' for the CPU.",
        shown="all",
        section=WHERE,
    )
    threads: int = option(
        1,
        "Threads of a run on a CPU. Equal seeds and threads give equal results, to the last digit.",
        low=1,
        section=WHERE,
    )


@dataclass(frozen=True, kw_only=True)
class PredictSettings:
    """The request to predict; what is None is as the model was trained."""

    data: Optional[Path] = option(
        None,
        "GLUE: official files, or prepared ones; SQuAD: a file of questions, in the official layout.",
        shown="what the runs were trained on; for SQuAD what they were marked on",
    )
    tasks: tuple[str, ...] = option((), "GLUE: names of tasks, AX too.", shown="all")
    text: tuple[str, ...] = option(
        (),
        "Column of TEXTS that holds texts, or two of pairs, by name.",
        shown="as in training, else text, sentence ...",
    )
    head: Optional[str] = option(None, "Head that predicts for TEXTS.", shown="the only one of the model")
    n_best: int = option(20, "SQuAD: answers to a question in nbest_predictions.json.", low=1)
    max_answer_tokens: int = option(30, "SQuAD: longest answer.", low=1)
    skip_mistakes: bool = option(False, "SQuAD: leave out questions that are wrong in the file.")
    tokenizer: Optional[Path] = option(None, "Folder of the tokenizer, or of its checkpoint.", shown="the run's")
    max_tokens: int = option(8192, "Tokens per batch, padding included.", low=1)
