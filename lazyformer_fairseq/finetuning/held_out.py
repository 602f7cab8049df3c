"""Holds out training rows as a dev set, for custom tasks that have none (``--dev-share``)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Optional

from sklearn.model_selection import train_test_split

from lazyformer_fairseq.data.labelled_files import Example, TaskDescription, read_split
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.settings import GridSettings
from lazyformer_fairseq.finetuning.tasks.custom import describe, files_of, find_file
from lazyformer_fairseq.storage.atomic import atomic_folder

FOLDER = "held_out"
SEED = 1


def with_dev_file(task: Optional[str], given: GridSettings) -> GridSettings:
    """Split the training file into a training and a dev file in OUTPUT, and set --data to their folder.

    The settings are returned unchanged if --dev-share is not set, or if --data contains no custom task.

    Raises:
        UserError: there is already a dev file, the rows cannot be read, or there are too few rows.
    """
    folder = given.data
    if task is not None or not given.dev_share:
        return given
    if folder is None or not files_of(folder, "train"):
        return given
    if there := files_of(folder, "dev"):
        raise UserError(f"--dev-share {given.dev_share:g}: {folder} already contains {there[0]}; omit the option")
    train = find_file(folder, "train")
    row = describe(folder, given, dev=train)
    path = folder / train
    examples = read_split(row, folder, "train").examples
    dev = draw_dev_rows(row, examples, given.dev_share)
    if not dev:
        raise UserError(f"--dev-share {given.dev_share:g}: {path} has too few rows; add more, or provide a dev file")

    with path.open("rb") as file:
        lines = list(file)
    lines[-1] = lines[-1].removesuffix(b"\n") + b"\n"
    starts = [example.line - 1 for example in examples]
    ends = [*starts[1:], len(lines)]
    header = b"".join(lines[: starts[0]])
    rows = [b"".join(lines[start:end]) for start, end in zip(starts, ends, strict=True)]
    kept = [text for place, text in enumerate(rows) if place not in dev]
    held_out = [text for place, text in enumerate(rows) if place in dev]

    copy = given.output / FOLDER / row.name
    with atomic_folder(copy, replace=True) as unfinished:
        (unfinished / f"train{path.suffix}").write_bytes(header + b"".join(kept))
        (unfinished / f"dev{path.suffix}").write_bytes(header + b"".join(held_out))
    return replace(given, data=copy, dev_share=None)


def draw_dev_rows(task: TaskDescription, examples: Sequence[Example], share: float) -> set[int]:
    """Return the indices of the examples to hold out, drawn with a fixed seed and stratified by class if possible.

    An example stays in the training set if one of its labels would otherwise be missing there.
    """
    if len(examples) < 2:
        return set()
    places = range(len(examples))
    classes = None
    if not (task.is_regression or task.is_multi_label or task.tags_words):
        classes = [example.target for example in examples]
    try:
        train, dev = train_test_split(places, test_size=share, random_state=SEED, stratify=classes)
    except ValueError:  # a class has too few rows
        train, dev = train_test_split(places, test_size=share, random_state=SEED)
    learnt = set().union(*(_labels_of(task, examples[place]) for place in train))
    return {place for place in dev if _labels_of(task, examples[place]) <= learnt}


def _labels_of(task: TaskDescription, example: Example) -> set[int]:
    """Return the indices of an example's labels; the set is empty for regression."""
    if task.is_regression:
        return set()
    if task.is_multi_label:
        return {label for label, is_there in enumerate(example.target) if is_there}
    if task.tags_words:
        return set(example.target)
    return {example.target}
