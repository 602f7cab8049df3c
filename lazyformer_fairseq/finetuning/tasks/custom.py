"""A task of a user's own: train.tsv and dev.tsv in a folder, or a YAML file that says more, become a row of the table.

What nobody says is read off the training file: which columns hold texts and labels, whether labels are classes or
scores, and which there are. The rest is as for GLUE's tasks.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.data.labelled_files import (
    MOST_SHOWN,
    NAME,
    Column,
    Split,
    TaskDescription,
    class_name,
    read_rows,
    read_split,
)
from lazyformer_fairseq.data.prepared_folder import MANIFEST, PreparedCustomTask
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError, nearest, whole_number
from lazyformer_fairseq.finetuning import settings
from lazyformer_fairseq.finetuning.benchmark import Score, TextsBenchmark, TuningProtocol
from lazyformer_fairseq.finetuning.paper_numbers import LAZYFORMER, PROTOCOLS
from lazyformer_fairseq.finetuning.tasks.glue import overview, prepare_task, settings_of
from lazyformer_fairseq.storage import checked
from lazyformer_fairseq.storage.json_files import read_json

ENDINGS = (".tsv", ".csv", ".jsonl")
TRAIN, DEV = ("train",), ("dev", "valid")  # names of files
TEXT_COLUMNS = (  # the first of these that a file has
    *(("text", "text2"), ("text1", "text2"), ("sentence1", "sentence2"), ("premise", "hypothesis")),
    *(("question1", "question2"), ("question", "sentence"), ("text",), ("sentence",)),
)
LABEL_COLUMNS = ("label", "labels", "class", "score", "target")
KEYS = ("name", "data", "train", "dev", "text", "label", "labels", "kind", "metric")  # of a YAML file


class CustomTask(TextsBenchmark):
    """A user's task alone.

    Args:
        row: of the table of tasks.
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
        self.protocols = {"its own": usual, LAZYFORMER: replace(PROTOCOLS[LAZYFORMER], tasks=usual.tasks)}
        self.scores = (Score(row.selecting_metric, row.name, "valid", row.selecting_metric, row.selecting_metric),)

    def place(self, folder: Path, name: str) -> Path:
        if PreparedCustomTask.is_at(folder):
            return folder
        return super().place(folder, name)

    def prepare(self, wanted: settings.GridSettings, positions: Collection[int] = ()) -> str:
        decides = {**settings_of(wanted, self.row, wanted.data), "description": self.row.as_json()}
        folder = wanted.output / self.prepared_in / self.name
        tokenizer = load_tokenizer(wanted.tokenizer)
        prepared = prepare_task(wanted.data, folder, self.row, decides, tokenizer, PreparedCustomTask)
        return f"{overview([prepared], positions)}\n{self.row.name}: {in_words(self.row)}"

    def predict(self, runs: Mapping[str, Path], folder: Path, wanted: settings.PredictSettings) -> list[str]:
        model = next(iter(runs.values()), "MODEL")
        raise UserError(f"{self.name}: give the texts too, as in `lazyformer predict {model} texts.tsv`")

    def extra_settings(
        self,
        given: settings.GridSettings,
        prepared: Mapping[str, PreparedCustomTask],
    ) -> dict[str, Any]:
        return {**super().extra_settings(given, prepared), "description": self.row.as_json()}


def in_words(row: TaskDescription) -> str:
    """What is learnt, for the user to check."""
    if row.is_regression:
        mean, deviation = row.standard
        what = f"scores around {mean:g}, standard deviation {deviation:g} (--kind classes for classes)"
    else:
        shown = ", ".join(row.labels[:MOST_SHOWN]) + ", ..." * (len(row.labels) > MOST_SHOWN)
        are_numbers = all(map(_number, row.labels))
        what = f"{len(row.labels)} classes, {shown}{' (--kind scores for scores)' * are_numbers}"
    split = row.splits["train"]
    texts = " and ".join(map(_column_in_words, split.texts))
    columns = f"texts in column {texts}, labels in {_column_in_words(split.label)}"
    return f"{what}; {row.selecting_metric} selects epoch and rate; {columns}"


def _column_in_words(column: Column) -> str:
    if isinstance(column, str):
        return repr(column)
    return str(column + 1)


# --- from a folder, or a YAML file, to the row ------------------------------------------------------------------------


def find_custom_task(given: settings.GridSettings) -> Optional[CustomTask]:
    """The task whose files lie in --data, or that was prepared there or, without --data, in OUTPUT; None for none."""
    folder = given.data or given.output / CustomTask.prepared_in
    for path in (folder / MANIFEST, *sorted(folder.glob(f"*/{MANIFEST}"))):
        if path.is_file() and read_json(path).get("format") == PreparedCustomTask.FORMAT:
            return CustomTask(PreparedCustomTask.load(path.parent).task)
    if given.data and any((folder / f"train{ending}").is_file() for ending in ENDINGS):
        return CustomTask(describe(folder, given))
    return None


def task_of_yaml(path: Path, given: settings.GridSettings) -> tuple[CustomTask, settings.GridSettings]:
    """The task that a YAML file describes, and settings whose --data is its folder; options win over the file.

    Raises:
        UserError: the file is none, or has a key or a value that it may not have; what :func:`describe` raises.
    """
    found = read_yaml(path)
    data = given.data or path.parent / found.get("data", "")
    named = {name: found[name] for name in settings.CUSTOM_OPTIONS if name in found and not getattr(given, name)}
    described = replace(given, data=data, **named)
    files = {split: found[split] for split in ("train", "dev") if split in found}
    row = describe(data, described, found.get("name", path.stem), files, found.get("labels", ()))
    return CustomTask(row), described


def read_yaml(path: Path) -> dict[str, Any]:
    """Its content, each value of the right type: columns and labels are text, `text` and `labels` several."""
    found = checked.read_yaml(path, f"describe a task by lines such as `data: my_folder`, of {', '.join(KEYS)}")
    for key, value in found.items():
        if key not in KEYS:
            raise UserError(f"{path}: unknown key {key!r}{nearest(str(key), KEYS)}; known are {', '.join(KEYS)}")
        if isinstance(value, list) and key in ("text", "labels"):
            values = value
        else:
            values = [value]
        if not values or not all(type(each) in (str, int, float) and len(str(each)) < 256 for each in values):
            wrong = repr(value)[:80]
            raise UserError(f"{path}: {key} is {wrong}; write short text or numbers, and words such as 'no' in quotes")
        found[key] = tuple(map(str, values)) if key in ("text", "labels") else str(value)
    return found


def describe(
    folder: Path,
    given: settings.GridSettings,
    name: Optional[str] = None,
    files: Optional[Mapping[str, str]] = None,
    labels: Sequence[str] = (),
) -> TaskDescription:
    """The row of a task whose files lie in a folder.

    Args:
        given: what options say of it.
        name: by default the folder's.
        files: names of `train` and `dev`, where they are not the usual ones.
        labels: in their order, of classes alone; by default all of the training file, sorted.

    Raises:
        UserError: a file is missing; a column is not found; a row of the training file is wrong, or its labels make no
            task. The message names file and line, and says what to do.
    """
    name = name or folder.resolve().name
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot name a task's folders; rename {folder}, or give `name: ...` in a YAML file")
    train, dev = (_file(folder, names, (files or {}).get(names[0])) for names in (TRAIN, DEV))
    first = next(read_rows(folder / train), None)
    if first is None:
        raise UserError(f"{folder / train}: is empty; write a line of names, and rows under it")
    texts, label = columns_of(folder / train, first.fields, given.text, given.label)
    splits = {"train": Split(train, texts, label, 0), "valid": Split(dev, texts, label, 0)}
    row = TaskDescription(name, splits, (), is_custom=True)
    path = folder / train
    words = [example.target for example in read_split(row, folder, "train").examples]
    kind = given.kind or (settings.CLASSES if labels else kind_of(words, label))
    if kind not in settings.KINDS:  # a YAML file may say anything
        raise UserError(f"kind: {kind!r} is none of {', '.join(settings.KINDS)}")
    if labels and kind == settings.SCORES:
        raise UserError(f"labels: scores have none, but {', '.join(labels[:MOST_SHOWN])} are given; leave them out")
    if kind == settings.CLASSES:
        row = replace(row, labels=labels_of(path, words, labels))
    else:
        row = replace(row, standard=(0.0, 1.0))  # now the reader takes numbers alone
        scores = [example.target for example in read_split(row, folder, "train").examples]
        mean = float(np.mean(scores))
        deviation = float(np.std(scores))
        if not 0 < deviation < math.inf:
            raise UserError(f"{path}: all {len(scores):,} scores are {scores[0]:g}, so nothing can be learnt from them")
        row = replace(row, standard=(mean, deviation))
    return replace(row, metrics=metrics_of(kind, row.labels, given.metric))


def _file(folder: Path, names: Sequence[str], given: Optional[str]) -> str:
    """The name of the one file in a folder that is called so."""
    if given:
        wanted = [given]
    else:
        wanted = [f"{name}{ending}" for name in names for ending in ENDINGS]
    found = [name for name in wanted if (folder / name).is_file()]
    if not found:
        needed = given or f"{' or '.join(names)} that ends in {', '.join(ENDINGS)}"
        if names is DEV:
            advice = "; put a tenth of the training rows there"
        else:
            advice = ""
        raise UserError(f"{folder}: holds no file {needed}{advice}")
    if len(found) > 1:
        raise UserError(f"{folder}: holds {' and '.join(found)}; keep one, or name it in a YAML file: {names[0]}: ...")
    return found[0]


def columns_of(
    path: Path,
    header: Sequence[str],
    text: Sequence[str] = (),
    label: Optional[str] = None,
    is_labelled: bool = True,
) -> tuple[tuple[Column, ...], Optional[Column]]:
    """Columns of the texts, one or two, and of the label: names, or numbers from 0 where no line names them.

    Args:
        header: the first line's fields.
        text, label: as given, numbers from 1; by default the usual names.
        is_labelled: whether there must be a label; else it is None where none is named.
    """
    known: dict[str, list[str]] = {}  # a name in lower case -> the columns that are called so
    for name in dict.fromkeys(header):
        known.setdefault(name.strip().lower(), []).append(name)

    def column_called(name: str, option: str) -> str:
        if len(known[name]) > 1:
            several = " and ".join(map(repr, known[name]))
            raise UserError(f"{path}, line 1: the columns {several} differ in case alone; name one of them by {option}")
        return known[name][0]

    usual = next((names for names in TEXT_COLUMNS if all(name in known for name in names)), ())
    texts = tuple(text) or tuple(column_called(name, "--text") for name in usual)
    label = label or next((column_called(name, "--label") for name in LABEL_COLUMNS if name in known), None)
    wanted = [*texts, *([label] if label else [])]
    if len(set(wanted)) < len(wanted):
        twice = max(wanted, key=wanted.count)
        raise UserError(f"{path}: the column {twice!r} is named twice, of texts or of labels; name different ones")
    if len(texts) in (1, 2) and (label or not is_labelled):
        if all(name in header for name in wanted):
            return texts, label
        has_names = path.suffix.lower() in (".jsonl", ".txt")  # always, so that the first row is none of the texts
        numbers = [whole_number(name) for name in wanted]
        if not has_names and all(number is not None and 0 < number <= len(header) for number in numbers):
            places = tuple(number - 1 for number in numbers)
            return places[: len(texts)], places[-1] if label else None
    found = ", ".join(f"{name[:40]!r}" for name in header[:MOST_SHOWN])
    lacking = [w for w in wanted if w not in header]
    what = ", ".join(map(repr, lacking)) or ("of labels" if texts else "of texts")
    raise UserError(
        f"{path}, line 1: names no column {what}, but {found}. Put a first line there that names the columns, as in "
        f"{'text<TAB>label' if is_labelled else 'text'}; or give their names by --text (two of pairs)"
        f"{' and --label' if is_labelled else ''}, or without such a line their numbers, the first is 1"
    )


def _number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def kind_of(words: Sequence[str], label: Column) -> str:
    """Scores where most labels are numbers and some are not whole, or the column is called so; else classes.

    Args:
        words: names of classes: whole numbers have no fraction there, however they are written.
    """
    numbers = list(filter(_number, words))
    has_fraction = not all(re.fullmatch(r"[+-]?\d+", word) for word in numbers)
    is_named = str(label).strip().lower() == "score"
    if is_named or (has_fraction and 2 * len(numbers) > len(words)):
        return settings.SCORES
    return settings.CLASSES


def labels_of(path: Path, words: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
    """The classes in their order: as given, else whole numbers by size, words by the alphabet."""
    there = set(words)
    given = tuple(map(class_name, given))
    if len(there) == 1:
        raise UserError(
            f"{path}: all {len(words):,} rows have the label {words[0]!r}; give rows of two classes or more"
        )
    if len(there) > MOST_SHOWN and 2 * len(there) > len(words):
        raise UserError(
            f"{path}: {len(there):,} different labels in {len(words):,} rows, as {words[0][:40]!r}: is this their "
            "column? Name it by --label; or if these are numbers to be predicted, give --kind scores"
        )
    if given and (wrong := [word for word in given if word not in there or list(given).count(word) > 1]):
        raise UserError(f"labels: {wrong[0]!r} is there twice, or no row of {path} has it")
    return tuple(given or sorted(there, key=(lambda word: (float(word), word)) if all(map(_number, there)) else None))


def metrics_of(kind: str, labels: Sequence[str], chosen: Optional[str]) -> tuple[str, ...]:
    """Names of what is measured, first of what selects epoch and rate."""
    known = (*settings.METRICS_OF_KIND[kind], *(("f1",) if len(labels) == 2 else ()))
    if chosen and chosen not in known:
        raise UserError(f"--metric {chosen}: {'two ' * (len(labels) == 2)}{kind} are measured by {', '.join(known)}")
    return tuple(dict.fromkeys(filter(None, (chosen, *settings.METRICS_OF_KIND[kind]))))
