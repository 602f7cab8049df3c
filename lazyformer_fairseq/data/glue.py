"""GLUE: the table of its tasks.

Here and nowhere else stand a task's files, columns, labels and metrics. Files and columns are those of the official
download (gluebenchmark.com/tasks). The metric that selects a checkpoint and the number of epochs are those of
LazyFormer (arXiv 2102.12702, appendix A and Table 5).
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
    """Return the splits of a task whose files have a header and equal names of columns."""
    return {
        split: Split(file, texts, None if split.startswith("test") else label, count)
        for (split, file), count in zip(files.items(), rows, strict=True)
    }


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


def find_task(name: str) -> TaskDescription:
    """Return the row of a task by its name or folder, whatever the case.

    Raises:
        UserError: there is no such task; the message lists all.
    """
    for task in TASKS.values():
        if name.lower() in (task.name.lower(), task.folder.lower()):
            return task
    raise UserError(f"{name!r} is no GLUE task; known are {', '.join(TASKS)}")
