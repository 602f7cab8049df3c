"""Custom tasks, defined by a folder with train.tsv and dev.tsv, or with .conll files.

Properties that the user does not specify are inferred from the training file: the text and label columns, the label
type (classes, regression targets, label lists or tags) and the set of classes. In all other respects, a custom task
works like a GLUE task.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.data.labelled_files import (
    CONLL,
    MOST_SHOWN,
    NAME,
    OUTSIDE,
    RowReader,
    Split,
    TaskDescription,
    class_name,
    parse_label_list,
    read_rows,
    read_split,
)
from lazyformer_fairseq.data.prepared_folder import MANIFEST, PreparedCustomTask
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning import settings
from lazyformer_fairseq.finetuning.benchmark import Score, TextsBenchmark, TuningProtocol
from lazyformer_fairseq.finetuning.paper_numbers import LAZYFORMER, PROTOCOLS
from lazyformer_fairseq.finetuning.tasks.glue import overview, prepare_task, settings_of
from lazyformer_fairseq.options import reject_non_defaults
from lazyformer_fairseq.storage.json_files import read_json

ENDINGS = (".tsv", ".csv", ".jsonl", CONLL)
FILES = {"train": ("train",), "dev": ("dev", "valid")}  # file names without the extension
TEXT_COLUMNS = (  # the first entry whose columns are all in the file is used
    ("text", "text2"),
    ("text1", "text2"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text",),
    ("sentence",),
)
LABEL_COLUMNS = ("label", "labels", "class", "score", "target")


class CustomTask(TextsBenchmark):
    """A benchmark that consists of a single custom task.

    Args:
        row: the task's description.
    """

    prepared = PreparedCustomTask
    options = frozenset(("max_length", "max_train_rows", "glue_head", *settings.CUSTOM_OPTIONS))

    def __init__(self, row: TaskDescription):
        self.row = row
        self.name = row.name
        self.key = row.name
        self.tasks = {row.name: row}
        usual = TuningProtocol(
            tasks=(row.name,),
            lrs=settings.CUSTOM_LRS,
            seeds=settings.CUSTOM_SEEDS,
            epochs=settings.CUSTOM_EPOCHS,
            batch_size=32,
            warmup_ratio=0.06,
        )
        self.protocols = {"custom": usual, LAZYFORMER: replace(PROTOCOLS[LAZYFORMER], tasks=usual.tasks)}
        self.scores = (Score(row.selecting_metric, row.name, row.selecting_metric),)

    def place(self, folder: Path, name: str) -> Path:
        """Return the path of the prepared task: `folder` itself if it contains the task, else a subfolder."""
        if PreparedCustomTask.is_at(folder):
            return folder
        return super().place(folder, name)

    def prepare(self, wanted: settings.GridSettings, positions: Collection[int] = ()) -> str:
        """Prepare the files, and return an overview that describes how they were interpreted."""
        decides = {**settings_of(wanted, self.row, wanted.data), "description": self.row.as_json()}
        folder = wanted.output / self.prepared_subfolder / self.name
        tokenizer = load_tokenizer(wanted.tokenizer)
        prepared = prepare_task(wanted.data, folder, self.row, decides, tokenizer)
        return f"{overview([prepared], positions)}\n{self.row.name}: {describe_in_words(self.row)}"

    def extra_settings(
        self,
        given: settings.GridSettings,
        prepared: Mapping[str, PreparedCustomTask],
    ) -> dict[str, Any]:
        """Return the head's type and dropout, and the task's description."""
        return {**super().extra_settings(given, prepared), "description": self.row.as_json()}


def describe_in_words(row: TaskDescription) -> str:
    """Describe the inferred task in words, so that the user can check it."""
    if row.is_regression:
        mean, deviation = row.standard
        what = f"targets with mean {mean:g} and standard deviation {deviation:g}; for classes, set --label-type classes"
    else:
        shown = ", ".join(row.labels[:MOST_SHOWN])
        if len(row.labels) > MOST_SHOWN:
            shown += ", ..."
        what = f"{len(row.labels)} classes ({shown})"
        if row.tags_words:
            what = f"{len(row.labels)} tags ({shown})"
        elif row.is_multi_label:
            what = f"lists of {len(row.labels)} labels ({shown})"
        elif all(map(_is_number, row.labels)):
            what += "; for regression, set --label-type scores"
    texts = map(repr, row.splits["train"].texts)
    label = repr(row.splits["train"].label)
    where = f"texts in column {' and '.join(texts)}, labels in {label}"
    if row.tags_words:
        where = "words in the first column, tags in the last"
    return f"{what}; {row.selecting_metric} selects the epoch and the learning rate; {where}"


# --- from a folder to the row -----------------------------------------------------------------------------------------


def find_custom_task(given: settings.GridSettings) -> Optional[TaskDescription]:
    """Return the custom task, if any, whose files or prepared data are in --data or, without --data, in OUTPUT."""
    folder = given.data or given.output / CustomTask.prepared_subfolder
    for path in (folder / MANIFEST, *sorted(folder.glob(f"*/{MANIFEST}"))):
        if path.is_file() and read_json(path).get("format") == PreparedCustomTask.FORMAT:
            return PreparedCustomTask.load(path.parent).task
    if given.data and files_of(folder, "train"):
        return describe(folder, given)
    return None


def describe(folder: Path, given: settings.GridSettings, dev: Optional[str] = None) -> TaskDescription:
    """Infer the description of the custom task in a folder; the task is named after the folder.

    Args:
        folder: the folder.
        given: the options that describe the task.
        dev: the name of the dev file; None to look for it in the folder.

    Raises:
        UserError: a file or column is missing, or the training file has an invalid row or labels that do not define a
            task. The message names file and line, and says what to do.
    """
    name = folder.resolve().name
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot be used as a task name; rename {folder}")
    train = find_file(folder, "train")
    dev = dev or find_file(folder, "dev")
    path = folder / train
    first = next(read_rows(path), None)
    if first is None:
        raise UserError(f"{path} is empty; write a line that names the columns, followed by the rows")
    texts, label = columns_of(path, first.fields, given.text, given.label)
    splits = {"train": Split(train, texts, label, 0), "valid": Split(dev, texts, label, 0)}
    row = TaskDescription(name, splits, (), is_custom=True, tags_words=path.suffix == CONLL)
    if row.tags_words != (Path(dev).suffix == CONLL):
        raise UserError(f"{folder} contains {train} and {dev}; write both as {CONLL} files, or neither")
    row = replace(row, is_multi_label=not row.tags_words and _begins_with_list(row, path))

    words = [example.target for example in read_split(row, folder, "train").examples]
    label_type = given.label_type
    if row.tags_words:
        words = [word for tags in words for word in tags]
        label_type = _type_of_tags(path, set(words))
    elif row.is_multi_label:
        label_type = settings.LISTS
        words = [word for listed in words for word in listed]
        if not words:
            raise UserError(f"{path}: all label lists are empty, so nothing can be learned from the file")
    elif not label_type and given.labels:
        label_type = settings.CLASSES
    has_lists = label_type == settings.LISTS
    wants_lists = given.label_type == settings.LISTS
    if given.label_type and has_lists != wants_lists:
        raise UserError(
            f"--label-type {given.label_type}: the first row of {path} has labels of a different type; omit the option"
        )
    if not label_type:
        label_type = infer_label_type(words, label)
    if label_type != settings.SCORES:
        row = replace(row, labels=labels_of(path, words, given.labels))
    else:
        reject_non_defaults(given, ("labels",), "does not apply to regression; omit the option")
        row = replace(row, standard=(0.0, 1.0))  # the reader now accepts only numbers
        scores = [example.target for example in read_split(row, folder, "train").examples]
        deviation = float(np.std(scores))
        if not 0 < deviation < math.inf:
            raise UserError(
                f"{path}: all {len(scores):,} targets are {scores[0]:g}, so nothing can be learned from them"
            )
        row = replace(row, standard=(float(np.mean(scores)), deviation))
    return replace(row, metrics=metrics_of(label_type, row.labels, given.metric))


def _type_of_tags(path: Path, tags: set[str]) -> str:
    """Return "entities" if the tags have IOB prefixes (all tags except ``O`` must then have one), else "tags"."""
    of_entities = {tag for tag in tags if re.match("[BI]-.", tag)}
    if not of_entities:
        return settings.TAGS
    others = tags - of_entities - {OUTSIDE}
    if others:
        raise UserError(
            f"{path} contains tags such as {min(of_entities)!r} and {min(others)!r}; write B-TYPE for the first word "
            f"of an entity, I-TYPE for its other words, and {OUTSIDE} for words outside of entities"
        )
    return settings.ENTITIES


def _begins_with_list(row: TaskDescription, path: Path) -> bool:
    """Return True if the first labeled row has a list of labels."""
    layout = row.splits["train"]
    rows = read_rows(path)
    header = next(rows).fields
    reader = RowReader.of(path, header, layout.texts, layout.label)
    complete = (found for found in rows if len(found.fields) == len(reader.names))
    word = next(map(reader.label_of, complete), None)
    return word is not None and parse_label_list(word) is not None


def files_of(folder: Path, split: str) -> list[str]:
    """Return the names of a split's files in a folder; there should be exactly one."""
    wanted = [f"{name}{ending}" for name in FILES[split] for ending in ENDINGS]
    return [name for name in wanted if (folder / name).is_file()]


def find_file(folder: Path, split: str) -> str:
    """Return the name of a split's file; raise a UserError unless there is exactly one."""
    found = files_of(folder, split)
    if not found:
        advice = ""
        if split == "dev":
            advice = "; set --dev-share 0.1 to hold out a tenth of the training rows"
        raise UserError(f"{folder} contains no {' or '.join(FILES[split])} file ({', '.join(ENDINGS)}){advice}")
    if len(found) > 1:
        raise UserError(f"{folder} contains {' and '.join(found)}; keep only one")
    return found[0]


def columns_of(
    path: Path,
    header: Sequence[str],
    text: Sequence[str] = (),
    label: Optional[str] = None,
    is_labelled: bool = True,
) -> tuple[tuple[str, ...], Optional[str]]:
    """Return the names of the one or two text columns, and the name of the label column.

    Args:
        path: the file, for messages.
        header: the fields of the first line.
        text: names of the text columns; if empty, the usual names are tried.
        label: name of the label column; if None, the usual names are tried.
        is_labelled: whether a label column is required; if not, the returned label name may be None.

    Raises:
        UserError: a column is not found, or is named twice.
    """
    known = {name.strip().lower(): name for name in reversed(header)}
    known |= {name: name for name in header}  # among names that differ only in case, an exact match wins
    texts = tuple(text)
    if not texts:
        usual = next((names for names in TEXT_COLUMNS if known.keys() >= set(names)), ())
        texts = tuple(known[name] for name in usual)
    if not label:
        label = next((known[name] for name in LABEL_COLUMNS if name in known), None)
    wanted = list(texts)
    if label:
        wanted.append(label)
    if len(set(wanted)) < len(wanted):
        twice = max(wanted, key=wanted.count)
        raise UserError(
            f"{path}: column {twice!r} is selected twice; use different columns for the texts and the label"
        )

    has_texts = len(texts) in (1, 2)
    has_label = bool(label) or not is_labelled
    if has_texts and has_label and set(wanted) <= set(header):
        return texts, label
    lacking = ", ".join(repr(name) for name in wanted if name not in header)
    if not texts:
        lacking = "with texts"
    elif not lacking:
        lacking = "with labels"
    found = ", ".join(f"{name[:40]!r}" for name in header[:MOST_SHOWN])
    example = "text"
    options = "--text (two for pairs)"
    if is_labelled:
        example = "text<TAB>label"
        options += " and --label"
    raise UserError(
        f"{path}, line 1: there is no column {lacking}; the columns are {found}. Write a first line that names "
        f"the columns, such as {example}, or set their names with {options}"
    )


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def infer_label_type(words: Sequence[str], label: str) -> str:
    """Return "scores" or "classes".

    The labels are scores if their column is called "score", or if most labels are numbers and some of these are not
    integers.

    Args:
        words: labels as class names; integers are written without a fraction.
        label: the name of the label column.
    """
    numbers = list(filter(_is_number, words))
    has_fraction = not all(re.fullmatch(r"[+-]?\d+", word) for word in numbers)
    is_named = str(label).strip().lower() == "score"
    if is_named or (has_fraction and 2 * len(numbers) > len(words)):
        return settings.SCORES
    return settings.CLASSES


def labels_of(path: Path, words: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
    """Return the classes in order: as passed in `given`, else sorted numerically or alphabetically."""
    there = set(words)
    given = tuple(map(class_name, given))
    if len(there) == 1:
        raise UserError(f"{path}: all {len(words):,} labels are {words[0]!r}; at least two classes are required")
    if len(there) > MOST_SHOWN and 2 * len(there) > len(words):
        raise UserError(
            f"{path}: {len(there):,} different labels in {len(words):,} rows, such as {words[0][:40]!r}; is this the "
            "right column? Name the column with --label, or set --label-type scores to predict numbers"
        )
    for word in given:
        if word not in there or given.count(word) > 1:
            raise UserError(f"--labels: {word!r} is repeated, or does not occur in {path}")
    if given:
        return given
    if all(map(_is_number, there)):
        return tuple(sorted(there, key=lambda word: (float(word), word)))
    return tuple(sorted(there))


def metrics_of(label_type: str, labels: Sequence[str], chosen: Optional[str]) -> tuple[str, ...]:
    """Return the metric names; the first metric selects the epoch and the learning rate."""
    measured = settings.METRICS[label_type]
    known = measured
    if len(labels) == 2 and label_type == settings.CLASSES:
        known = (*measured, "f1")
        label_type = f"two {label_type}"
    if not chosen:
        return measured
    if chosen not in known:
        raise UserError(f"--metric {chosen}: for {label_type} the metric must be one of {', '.join(known)}")
    return tuple(dict.fromkeys((chosen, *measured)))
