"""GLUE: preparation of its official files, the paper's table, and the files for gluebenchmark.com."""

import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from lazyformer_fairseq.data import labelled_files
from lazyformer_fairseq.data.datasets.tagged_words import first_tokens
from lazyformer_fairseq.data.encoding import encode_split
from lazyformer_fairseq.data.glue import TASKS, find_task
from lazyformer_fairseq.data.labelled_files import SplitFile, TaskDescription, words_of
from lazyformer_fairseq.data.prepared_folder import (
    EncodedExamples,
    PreparedCustomTask,
    PreparedTask,
    targets_of,
    write_split,
)
from lazyformer_fairseq.data.text.interface import TextTokenizer, told_cut
from lazyformer_fairseq.data.text.tokenizer import find_tokenizer_folder, load_tokenizer, tokenizer_hashes
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, inference, loading
from lazyformer_fairseq.evaluation.match import heads_in_checkpoint
from lazyformer_fairseq.finetuning import paper_numbers
from lazyformer_fairseq.finetuning.benchmark import TableRow, TextsBenchmark
from lazyformer_fairseq.finetuning.results import Results, kept_checkpoint
from lazyformer_fairseq.finetuning.settings import GridSettings, PredictSettings
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.json_files import sha256_of
from lazyformer_fairseq.training.objectives.labelled_texts import LabelledTextsObjective

LONGEST = 512  # default maximum length of an input in tokens
HEADER = "index\tprediction"


class PublishedTasks(TextsBenchmark):
    """Tasks of a published benchmark, whose files are official."""

    average = True

    def choose_tasks(self, names: Sequence[str]) -> list[str]:
        """Return the named tasks, or the default ones if none are named.

        Raises:
            UserError: a task is unknown, given twice, or cannot be trained.
        """
        tasks = [find_task(name, self.tasks, self.name) for name in names or self.usual.tasks]
        for number, task in enumerate(tasks):
            if task in tasks[:number]:
                raise UserError(f"--tasks: {task.name} is given twice")
            if "train" not in task.splits:
                raise UserError(f"--tasks: {task.name} has no training data; the model of {task.model_of} predicts it")
        return [task.name for task in tasks]

    def prepare(self, wanted: GridSettings, positions: Collection[int] = ()) -> str:
        """Prepare the tasks, and return an overview."""
        return overview(prepare_tasks(wanted, self.tasks, self.name), positions)


class Glue(PublishedTasks):
    """The nine tasks of GLUE, and its diagnostic set."""

    name = "GLUE"
    key = "glue"
    tasks = TASKS
    protocols = paper_numbers.PROTOCOLS
    scores = paper_numbers.SCORES
    columns = paper_numbers.COLUMNS

    # --- report -------------------------------------------------------------------------------------------------------

    def other_rows(self, results: Results) -> Iterable[TableRow]:
        """Return the baseline and LazyFormer's Table 1, and PAR's Table 4 if the grid has no tasks but those."""
        rows = [*super().other_rows(results), *paper_numbers.PAPER_ROWS]
        if self._is_pars(results):
            rows += paper_numbers.PAR_ROWS
        return rows

    def _is_pars(self, results: Results) -> bool:
        return set(results.grid.tasks) <= set(self.protocols["par"].tasks)

    def notes(self, results: Results) -> Iterator[str]:
        """Yield notes of a sentence or two that a reader needs to compare the scores with others."""
        yield (
            "A score is the best over the learning rates of the median over seeds; MNLI-mm uses the learning rate "
            "selected on MNLI-m. CoLA has Matthews' correlation, STS Pearson's, and all others accuracy, times 100."
        )
        yield (
            "Avg. is the mean of the paper's nine scores, with MNLI-m and -mm counted separately; it is shown only if "
            "all nine are complete. Rows marked (paper) are quoted from LazyFormer, arXiv 2102.12702, Table 1; they "
            "were not measured here."
        )
        if self._is_pars(results):
            yield (
                "The last rows are quoted from PAR Transformer, arXiv 2009.04534, Table 4: medians of five runs; "
                "DistilBERT's are from its own paper."
            )

    # --- predictions --------------------------------------------------------------------------------------------------

    def predict(self, runs: Mapping[str, Path], folder: Path, wanted: PredictSettings) -> list[str]:
        """Write all submission files that the runs can make, with the number and the prediction of each test row.

        Raises:
            UserError: the data of a task, a checkpoint, head, tokenizer or test file is missing, or the dictionary of
                the model differs from that of the data.
        """
        lines = []
        chosen = [find_task(name).name for name in wanted.tasks]
        for task in TASKS.values():
            run = runs.get(task.model_of or task.name)
            if run is None or (chosen and task.name not in chosen):
                continue
            source = wanted.data or run.absolute().parents[3] / self.prepared_in  # OUT in OUT/runs/MODEL/TASK/RUN
            data = source / task.name
            if not PreparedTask.is_at(data):
                data = source / task.folder
            if data.is_dir():
                lines += predict_task(task, run, data, folder, wanted)
            elif task.model_of:
                lines.append(f"{submission_file(task, 'test')}: no data of {task.name}, so it is left out")
            else:
                raise UserError(
                    f"{source}: contains no folder {task.folder}; give the folder that has "
                    f"{task.name}'s {task.splits['test'].file} with --data, or choose other tasks with --tasks"
                )
        missing = [name for name in SUBMISSION_FILES if not (folder / name).exists()]
        if missing:
            lines.append(f"missing {', '.join(missing)}")
        return lines


# --- from official files to folders of memory-mapped data -------------------------------------------------------------


def prepare_tasks(
    wanted: GridSettings,
    table: Mapping[str, TaskDescription] = TASKS,
    what: str = Glue.name,
) -> list[PreparedTask]:
    """Prepare the requested tasks, or else those that have a folder in the data, in OUT/tasks; reuse existing ones.

    Args:
        wanted: settings with official files, a tokenizer's folder and tasks.
        table: the known tasks.
        what: the name of the benchmark, for messages.

    Raises:
        UserError: a folder or all files of a task are missing, a row is wrong (with file and line), or the task was
            prepared before with other settings. Tasks that were finished before the error remain.
    """
    tasks = [find_task(name, table, what) for name in dict.fromkeys(wanted.tasks)]
    if not tasks:
        tasks = [task for task in table.values() if (wanted.data / task.folder).is_dir()]
    if not tasks:
        folders = ", ".join(task.folder for task in table.values())
        raise UserError(f"{wanted.data}: contains no folder of a {what} task; known folders are {folders}")
    for task in tasks:  # reports missing folders before anything is encoded
        folder = wanted.data / task.folder
        if not folder.is_dir():
            raise UserError(
                f"{folder}: no such folder; put {task.name}'s official files there, or leave it out of --tasks"
            )
        files = [split.file for split in task.splits.values()]
        if not any((folder / file).is_file() for file in files):
            raise UserError(f"{folder}: contains none of {', '.join(files)}; put {task.name}'s official files there")

    tokenizer = load_tokenizer(wanted.tokenizer)
    prepared = []
    for task in Progress(tasks, desc="prepare", unit=" tasks"):
        source = wanted.data / task.folder
        folder = wanted.output / Glue.prepared_in / task.name
        prepared.append(prepare_task(source, folder, task, settings_of(wanted, task, source), tokenizer))
    return prepared


def settings_of(wanted: GridSettings, task: TaskDescription, source: Path) -> dict[str, Any]:
    """Return all settings that determine the prepared data of a task with its files in `source`."""
    paths = [source / split.file for split in task.splits.values()]
    return {
        "format_version": PreparedTask.FORMAT_VERSION,
        "task": task.name,
        "max_length": wanted.max_length or LONGEST,
        "tokenizer": tokenizer_hashes(wanted.tokenizer),
        "files": {path.name: sha256_of(path) for path in paths if path.is_file()},
    }


def prepare_task(
    source: Path,
    folder: Path,
    task: TaskDescription,
    settings: dict[str, Any],
    tokenizer: TextTokenizer,
) -> PreparedTask:
    """Prepare the files of a task, or reuse data that was prepared before.

    Args:
        source: the folder of the files.
        folder: the folder to write.
        task: the task.
        settings: all settings that determine the prepared data.
        tokenizer: the tokenizer.

    Raises:
        UserError: a row is wrong (with file and line), or the folder was prepared with other settings.
    """
    prepared_class = PreparedTask
    if task.is_custom:
        prepared_class = PreparedCustomTask
    before = prepared_class.reuse(folder, settings)
    if before is not None:
        return before
    files = {}
    missing = []
    for split, layout in task.splits.items():  # reports wrong rows before anything is encoded
        if layout.file in settings["files"]:
            files[split] = labelled_files.read_split(task, source, split)
        else:
            missing.append(layout.file)

    def write_splits(folder: Path) -> dict[str, Any]:
        return {name: _write(folder / name, task, file, tokenizer, settings) for name, file in files.items()}

    return prepared_class.write(
        folder,
        settings,
        tokenizer,
        write_splits,
        data=str(source),
        missing_files=missing,
        dictionary_size=len(tokenizer.dictionary),
    )


def _write(
    prefix: Path,
    task: TaskDescription,
    file: SplitFile,
    tokenizer: TextTokenizer,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Write a split to FOLDER/SPLIT, and return its entry in the manifest."""
    inputs, counts = encode_split(tokenizer, file, settings["max_length"])
    if task.tags_words:
        shutil.copy(file.path, prefix.parent)
        targets = []
        for example in file.examples:
            places = first_tokens(tokenizer, words_of(example.texts[0]))
            targets.append(np.stack([places, example.target], axis=1).ravel())
    else:
        targets = targets_of(task, file.examples)
    write_split(prefix.parent, prefix.name, EncodedExamples(inputs, targets), len(tokenizer.dictionary))
    labels = None
    if not (task.is_regression or task.tags_words or targets is None):
        rows_of_class = np.bincount(targets.ravel(), minlength=len(task.labels))
        if task.is_multi_label:
            rows_of_class = targets.sum(0)
        labels = dict(zip(task.labels, rows_of_class.tolist(), strict=True))
    return {
        "file": file.path.name,
        "rows": len(file.examples),
        "short_rows": len(file.short_lines),
        "short_lines": file.short_lines,
        "empty_lines": file.empty_lines,
        "last_line": max([file.examples[-1].line, *file.short_lines]),
        "labels": labels,
        "longest": max(map(len, inputs)),
        "kept_tokens": sum(map(len, inputs)),
        **counts,
        "bytes": prefix.with_suffix(".bin").stat().st_size,
    }


def overview(prepared: Sequence[PreparedTask], positions: Collection[int] = ()) -> str:
    """Return a table of the prepared data with one row per split, followed by remarks for the user.

    Args:
        prepared: tasks that were prepared with the same maximum length.
        positions: numbers of positions of the models that will read them; for each the table counts the rows that are
            cut.
    """
    longest = prepared[0].longest
    lengths = sorted({min(longest, each) for each in positions or [longest]})
    rows = []
    notes = []
    for task in prepared:
        notes += remarks(task)
        for split, counts in task.manifest["splits"].items():
            row = {
                "task": task.task.name,
                "file": counts["file"],
                "rows": f"{counts['rows']:,}",
                "left out": f"{counts['short_rows']:,}",
            }
            for length in lengths:
                row[f"cut at {length:,} tokens"] = f"{task.count_cut(split, length):,}"
                if task.task.tags_words:
                    row[f"words cut at {length:,}"] = f"{task.count_cut_words(split, length):,}"
            row["unknown words"] = f"{100 * counts['unknown_word_share']:.2f}%"
            row["unknown tokens"] = f"{100 * counts['unknown_token_share']:.2f}%"
            row["tokens per row"] = f"{counts['kept_tokens'] / counts['rows']:.1f}"
            rows.append(row)
    align = ("left", "left", *["right"] * (len(rows[0]) - 2))
    table = tabulate(rows, "keys", colalign=align, disable_numparse=True)
    return "\n".join([table, *(f"note: {note}" for note in notes)])


def remarks(prepared: PreparedTask) -> list[str]:
    """Return remarks for the user on a task's files: missing files, skipped rows, an unofficial number of rows."""
    task = prepared.task
    manifest = prepared.manifest
    lines = [f"{manifest['data']}/{file} does not exist" for file in manifest["missing_files"]]
    for split, counts in manifest["splits"].items():
        file = f"{manifest['data']}/{counts['file']}"
        official = task.splits[split].rows
        lines += labelled_files.describe_oddities(file, counts)
        if official not in (0, counts["rows"]):
            lines.append(
                f"{file}: ends at line {counts['last_line']:,} and has {counts['rows']:,} rows, but the official file "
                f"has {official:,}; is it truncated, or another version?"
            )
    return lines


# --- from fine-tuned models to the leaderboard's files ----------------------------------------------------------------


def leaderboard_splits(task: TaskDescription) -> list[str]:
    """Return the test splits of a task."""
    return [split for split in task.splits if split.startswith("test")]


def submission_file(task: TaskDescription, split: str) -> str:
    """Return the leaderboard's file name for a test split; MNLI has a matched and a mismatched one."""
    if len(leaderboard_splits(task)) == 1:
        return f"{task.name}.tsv"
    return {"test": f"{task.name}-m.tsv", "test1": f"{task.name}-mm.tsv"}[split]


SUBMISSION_FILES = tuple(submission_file(task, split) for task in TASKS.values() for split in leaderboard_splits(task))


def predict_task(task: TaskDescription, run: Path, data: Path, folder: Path, wanted: PredictSettings) -> list[str]:
    """Write the predictions for each test split of a task, in the order of its rows.

    Args:
        task: the task.
        run: the folder of the run whose model predicts.
        data: the data of the task, official or prepared.
        folder: the folder to write into.
        wanted: the options of the command.

    Returns:
        One line per file, and one about rows that were cut.

    Raises:
        UserError: the checkpoint, a fitting head, the tokenizer or a file is missing, or a file is wrong.
    """
    checkpoint = kept_checkpoint(run)
    state = checkpoints.load(checkpoint)
    head = heads_in_checkpoint(state["model"]).get(task.head_name)
    if head is None or head.outputs != task.num_classes:
        raise UserError(
            f"{checkpoint} has no classification head {task.head_name!r} of {task.name}; give one fine-tuned for it"
        )
    if PreparedTask.is_at(data):
        tokenizer_folder = PreparedTask.load(data).tokenizer_folder
    else:
        tokenizer_folder = find_tokenizer_folder(wanted.tokenizer or checkpoint)
    try:
        loaded = loading.load_state(state, checkpoint, load_tokenizer(tokenizer_folder))
    except UserError as error:
        raise UserError(f"{checkpoint}, on {data}: {error}") from error
    loaded.to("cuda" if torch.cuda.is_available() else "cpu")

    objective = LabelledTextsObjective(
        data=str(data),
        task=task.name,
        tokenizer_folder=tokenizer_folder,
        longest=loaded.longest_of(task.head_name),
    )
    objective.observe(loaded.model)
    lines = []
    for split in leaderboard_splits(task):
        dataset = objective.dataset(split)
        file = submission_file(task, split)
        logits = np.empty((len(dataset), task.num_classes), np.float32)
        for rows, found in inference.logits_of(loaded.model, task.head_name, dataset, wanted.max_tokens, file):
            logits[rows] = found
        words = prediction_words(task, logits)
        numbered = [f"{number}\t{word}" for number, word in enumerate(words)]
        (folder / file).write_text("\n".join([HEADER, *numbered]) + "\n", encoding="utf-8")

        said = f"{file}: {len(words):,} rows"
        official = task.splits[split].rows
        if len(words) != official:
            said += f", but the official test set has {official:,}; the leaderboard will reject the file"
        lines.append(said)
        if objective.cut[split]:
            lines.append(f"{file}: {told_cut(objective.cut[split], len(dataset), objective.longest, 'rows')}")
    return lines


def prediction_words(task: TaskDescription, logits: np.ndarray) -> list[str]:
    """Return the labels for logits (N, classes), or scores in the task's range with three decimals.

    Raises:
        UserError: a score is not a number.
    """
    if not task.is_regression:
        return [task.labels[number] for number in logits.argmax(-1)]
    scores = logits[:, 0]
    if not np.isfinite(scores).all():
        raise UserError(f"{task.name}: the model predicts {scores[~np.isfinite(scores)][0]}; train it again")
    return [f"{score:.3f}" for score in np.clip(scores, *task.score_range)]


BENCHMARK = Glue()
