"""Tables of published tasks: the GLUE tasks, and the GLUE and SuperGLUE tasks in BabyLM's evaluation.

A task's files, columns, labels and metrics are defined only here. The files and columns of GLUE follow the official
download (gluebenchmark.com/tasks). The checkpoint selection metric and the number of epochs follow LazyFormer (arXiv
2102.12702, appendix A and Table 5).
"""

from collections.abc import Mapping

from lazyformer_fairseq.data.labelled_files import Split, TaskDescription
from lazyformer_fairseq.errors import UserError

_FILES = {"train": "train.tsv", "valid": "dev.tsv", "test": "test.tsv"}


def _splits(
    texts: tuple[str, ...],
    label: str,
    rows: tuple[int, ...],
    files: Mapping[str, str] = _FILES,
) -> dict[str, Split]:
    """Return the splits of a task whose files all have a header with the same column names."""
    splits = {}
    for (split, file), count in zip(files.items(), rows, strict=True):
        label_of_split = None if split.startswith("test") else label
        splits[split] = Split(file, texts, label_of_split, count)
    return splits


_BINARY = ("0", "1")
_ACCURACY = ("accuracy",)
_AND_F1 = ("accuracy", "f1")
_SENTENCES = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_INFERENCE = ("contradiction", "entailment", "neutral")
_COLA = {
    "train": Split("train.tsv", (3,), 1, 8551),
    "valid": Split("dev.tsv", (3,), 1, 1043),
    "test": Split("test.tsv", ("sentence",), None, 1063),
}
_QQP = _splits(("question1", "question2"), "is_duplicate", (363846, 40430, 390965))
_MNLI_FILES = {
    "train": "train.tsv",
    "valid": "dev_matched.tsv",
    "valid1": "dev_mismatched.tsv",
    "test": "test_matched.tsv",
    "test1": "test_mismatched.tsv",
}
_MNLI = _splits(_SENTENCES, "gold_label", (392702, 9815, 9832, 9796, 9847), _MNLI_FILES)
_AX = {"test": Split("diagnostic.tsv", _SENTENCES, None, 1104)}
_TASKS = (
    TaskDescription("CoLA", _COLA, ("matthews", "accuracy"), _BINARY),
    TaskDescription("SST-2", _splits(("sentence",), "label", (67349, 872, 1821)), _ACCURACY, _BINARY),
    TaskDescription("MRPC", _splits(("#1 String", "#2 String"), "Quality", (3668, 408, 1725)), _AND_F1, _BINARY),
    TaskDescription("STS-B", _splits(_SENTENCES, "score", (5749, 1500, 1379)), ("pearson", "spearman"), (), (0.0, 5.0)),
    TaskDescription("QQP", _QQP, _AND_F1, _BINARY, has_odd_rows=True),
    TaskDescription("MNLI", _MNLI, _ACCURACY, _INFERENCE),
    TaskDescription("QNLI", _splits(("question", "sentence"), "label", (104743, 5463, 5463)), _ACCURACY, _ENTAILMENT),
    TaskDescription("RTE", _splits(_SENTENCES, "label", (2490, 277, 3000)), _ACCURACY, _ENTAILMENT),
    TaskDescription("WNLI", _splits(_SENTENCES, "label", (635, 71, 146)), _ACCURACY, _BINARY),
    TaskDescription("AX", _AX, ("matthews",), _INFERENCE, model_of="MNLI", official_folder="diagnostic"),
)
TASKS = {task.name: task for task in _TASKS}

# BabyLM's 2025 evaluation (github.com/babylm/evaluation-pipeline-2025 at bf55c11): JSON lines files in one folder.
BABYLM_PREFIX = "BabyLM-"  # distinguishes its tasks' heads and data from GLUE's


def _babylm(
    name: str,
    columns: tuple[str, ...],
    rows: tuple[int, int],
    metrics: tuple[str, ...] = _ACCURACY,
    templates: tuple[str, ...] = (),
    labels: tuple[str, ...] = _BINARY,
) -> TaskDescription:
    """Return a task from BabyLM's evaluation; its files are named after the task."""
    splits = {
        split: Split(f"{name.lower()}.{split}.jsonl", columns, "label", count, templates)
        for split, count in zip(("train", "valid"), rows, strict=True)
    }
    return TaskDescription(BABYLM_PREFIX + name, splits, metrics, labels, official_folder=".")


_F1 = ("f1", "accuracy")
_MULTIRC = ("Question: {question} Answer: {answer}", "{paragraph}")
_WSC = ('Does "{span2_text}" refer to "{span1_text}" in this passage?', "{text}")
_BABYLM_TASKS = (
    _babylm("BoolQ", ("question", "passage"), (0, 1635)),
    _babylm("MNLI", ("premise", "hypothesis"), (10000, 4908), labels=("0", "1", "2")),
    _babylm("MRPC", _SENTENCES, (3668, 204), _F1),
    _babylm("MultiRC", ("question", "answer", "paragraph"), (0, 2424), templates=_MULTIRC),
    _babylm("QQP", ("question1", "question2"), (10000, 20215), _F1),
    _babylm("RTE", _SENTENCES, (2490, 139)),
    _babylm("WSC", ("span1_text", "span2_text", "text"), (554, 52), templates=_WSC),
)
BABYLM_TASKS = {task.name: task for task in _BABYLM_TASKS}
PUBLISHED = {**TASKS, **BABYLM_TASKS}


def find_task(name: str, table: Mapping[str, TaskDescription] = TASKS, what: str = "GLUE") -> TaskDescription:
    """Find a task by its name or folder, ignoring case; the prefix of BabyLM tasks is optional.

    Raises:
        UserError: there is no such task; the message lists all tasks.
    """
    for task in table.values():
        own_name = task.name.lower()
        without_prefix = own_name.removeprefix(BABYLM_PREFIX.lower())
        if name.lower() in (own_name, without_prefix, task.folder.lower()):
            return task
    raise UserError(f"{name!r} is not a {what} task; choose from {', '.join(table)}")
