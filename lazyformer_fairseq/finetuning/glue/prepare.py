"""Official GLUE files -> folders of memory-mapped data with a manifest each (``lazyformer glue prepare``)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from tabulate import tabulate
from tqdm import tqdm

from lazyformer_fairseq.data.glue.encode import encode_split
from lazyformer_fairseq.data.glue.prepared_data import EncodedExamples, PreparedTask, targets_of, write_split
from lazyformer_fairseq.data.glue.task_table import TASKS, TaskDescription
from lazyformer_fairseq.data.glue.tsv import ODDITIES, SplitFile, describe_oddities, read_split
from lazyformer_fairseq.data.prepared_folder import MANIFEST
from lazyformer_fairseq.data.text.interface import TextTokenizer
from lazyformer_fairseq.data.text.load_tokenizer import load_tokenizer, tokenizer_hashes
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import versions
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.hashes import sha256_of
from lazyformer_fairseq.storage.json_files import write_json

PACKAGES = ("fairseq-fixed", "sacremoses", "sentencepiece", "torch")


@dataclass(frozen=True)
class Preparation:
    """The request to prepare.

    Attributes:
        data, tokenizer: folders, of the official download and of the tokenizer.
        output: OUT; tasks go to OUT/tasks.
        max_length: longest input in ids, all counted.
        processes: that encode side by side.
    """

    data: Path
    tokenizer: Path
    output: Path
    max_length: int = 512
    processes: int = 1

    def folder(self, task: TaskDescription) -> Path:
        return self.output / "tasks" / task.name


def tasks_present(data: Path) -> list[TaskDescription]:
    """Tasks of the table that have a folder in `data`; UserError where none has."""
    found = [task for task in TASKS.values() if (data / task.folder).is_dir()]
    if not found:
        folders = ", ".join(task.folder for task in TASKS.values())
        raise UserError(f"{data}: holds no folder of a GLUE task; known are {folders}")
    return found


def prepare_tasks(wanted: Preparation, tasks: Sequence[TaskDescription]) -> list[PreparedTask]:
    """Prepares each task, or reuses what was prepared from the same files in the same way.

    Raises:
        UserError: a folder or all files of a task are missing, a row is wrong (file and line), or the task was
            prepared before in another way. Tasks that were finished before stay.
    """
    tokenizer = load_tokenizer(wanted.tokenizer)
    settings = [_settings(wanted, task) for task in tasks]  # reports every missing folder before anything is encoded
    prepared = []
    with tqdm(total=len(tasks), desc="prepare", unit=" tasks", disable=None) as progress:
        for task, values in zip(tasks, settings, strict=True):
            progress.set_postfix_str(task.name)
            prepared.append(_reuse(wanted, task, values) or _prepare(wanted, task, values, tokenizer))
            progress.update()
    return prepared


def remarks(prepared: PreparedTask) -> list[str]:
    """Remarks for the user on a task's files: missing ones, skipped rows, an unofficial number of rows."""
    task, manifest = prepared.task, prepared.manifest
    lines = [f"{manifest['data']}/{file}: is not there" for file in manifest["missing_files"]]
    for split, counts in manifest["splits"].items():
        file, official = f"{manifest['data']}/{counts['file']}", task.splits[split].rows
        lines += describe_oddities(file, counts)
        if counts["rows"] != official:
            lines.append(
                f"{file}: ends at line {counts['last_line']:,} and has {counts['rows']:,} rows, but the official file "
                f"has {official:,}; is it cut off, or another version?"
            )
    return lines


def overview(prepared: Sequence[PreparedTask]) -> str:
    """A table of the prepared data, a row per split, with remarks for the user under it."""
    rows = [
        (
            task.task.name,
            counts["file"],
            f"{counts['rows']:,}",
            f"{counts['short_rows']:,}",
            f"{counts['truncated']:,}",
            f"{100 * counts['unknown_word_share']:.2f}%",
            f"{100 * counts['unknown_token_share']:.2f}%",
            f"{counts['kept_tokens'] / counts['rows']:.1f}",
        )
        for task in prepared
        for counts in task.manifest["splits"].values()
    ]
    titles = ("task", "file", "rows", "left out", "cut", "unknown words", "unknown tokens", "tokens a row")
    table = tabulate(rows, titles, colalign=("left", "left", *["right"] * 6), disable_numparse=True)
    return "\n".join([table, *(f"note: {remark}" for task in prepared for remark in remarks(task))])


def _settings(wanted: Preparation, task: TaskDescription) -> dict[str, Any]:
    folder = wanted.data / task.folder
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; put {task.name}'s official files there, or leave it out of --tasks")
    files = {split.file: folder / split.file for split in task.splits.values()}
    hashes = {name: sha256_of(path) for name, path in files.items() if path.is_file()}
    if not hashes:
        raise UserError(f"{folder}: holds none of {', '.join(files)}; put {task.name}'s official files there")
    values = (PreparedTask.FORMAT_VERSION, task.name, wanted.max_length, tokenizer_hashes(wanted.tokenizer), hashes)
    return dict(zip(PreparedTask.SETTINGS, values, strict=True))


def _reuse(wanted: Preparation, task: TaskDescription, settings: dict[str, Any]) -> Optional[PreparedTask]:
    folder = wanted.folder(task)
    if not folder.exists():
        return None
    prepared = PreparedTask.load(folder)
    different = [name for name in PreparedTask.SETTINGS if prepared.manifest[name] != settings[name]]
    if different:
        raise UserError(
            f"{folder}: was prepared before with other {' and '.join(name.replace('_', ' ') for name in different)} "
            f"(see {MANIFEST} there); remove it, give another --output, or use it as it is by leaving out --data "
            "of `lazyformer glue run`"
        )
    return prepared


def _prepare(
    wanted: Preparation, task: TaskDescription, settings: dict[str, Any], tokenizer: TextTokenizer
) -> PreparedTask:
    source, folder = wanted.data / task.folder, wanted.folder(task)
    missing = [split.file for split in task.splits.values() if split.file not in settings["files"]]
    there = [split for split, layout in task.splits.items() if layout.file in settings["files"]]
    files = {split: read_split(task, source, split) for split in there}  # reports wrong rows before any is encoded
    with atomic_folder(folder) as unfinished:
        manifest = {
            "format": PreparedTask.FORMAT,
            **settings,
            "data": str(source),
            "missing_files": missing,
            "dictionary_size": len(tokenizer.dictionary),
            "splits": {name: _write(wanted, task, name, file, tokenizer, unfinished) for name, file in files.items()},
            "versions": versions(PACKAGES),
        }
        tokenizer.save(unfinished / "tokenizer")
        write_json(unfinished / MANIFEST, manifest, durable=False)
    return PreparedTask(folder, manifest)


def _write(
    wanted: Preparation, task: TaskDescription, split: str, file: SplitFile, tokenizer: TextTokenizer, folder: Path
) -> dict[str, Any]:
    """Writes a split. Returns its entry in the manifest."""
    encoded = encode_split(tokenizer, file, wanted.max_length, wanted.processes)
    examples = EncodedExamples(encoded.inputs, targets_of(task, file.examples))
    write_split(folder, split, examples, len(tokenizer.dictionary))
    words = {} if task.is_regression or examples.targets is None else Counter(examples.targets.tolist())
    return {
        "file": file.path.name,
        "rows": len(file.examples),
        "short_rows": len(file.short_lines),
        **{name: getattr(file, name) for name in ODDITIES},
        "last_line": max([file.examples[-1].line, *file.short_lines]),
        "labels": {word: words[number] for number, word in enumerate(task.labels)} if words else None,
        "truncated": encoded.truncated,
        "tokens": encoded.tokens,
        "longest": max(map(len, encoded.inputs)),
        "kept_tokens": sum(map(len, encoded.inputs)),
        "unknown_tokens": encoded.unknown_tokens,
        "unknown_token_share": encoded.unknown_share,
        "words": encoded.words,
        "unknown_words": encoded.unknown_words,
        "unknown_word_share": encoded.unknown_word_share,
        "bytes": (folder / f"{split}.bin").stat().st_size,
    }
