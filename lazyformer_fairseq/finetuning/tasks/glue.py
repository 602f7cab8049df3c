"""GLUE: preparation of the official files, the papers' scores, and submission files for gluebenchmark.com."""

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
from lazyformer_fairseq.data.text.interface import TextTokenizer, truncation_message
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

LONGEST = 512  # default maximum input length in tokens
HEADER = "index\tprediction"


class PublishedTasks(TextsBenchmark):
    """Base class of published benchmarks with official files."""

    average = True

    def choose_tasks(self, names: Sequence[str]) -> list[str]:
        """Return the named tasks, or the default tasks if no names are passed.

        Raises:
            UserError: a task is unknown, is named twice, or has no training data.
        """
        tasks = [find_task(name, self.tasks, self.name) for name in names or self.default_protocol.tasks]
        for number, task in enumerate(tasks):
            if task in tasks[:number]:
                raise UserError(f"--tasks: {task.name} is specified twice")
            if "train" not in task.splits:
                raise UserError(
                    f"--tasks: {task.name} has no training data; it is predicted by the {task.model_of} model"
                )
        return [task.name for task in tasks]

    def prepare(self, wanted: GridSettings, positions: Collection[int] = ()) -> str:
        """Prepare the tasks, and return an overview of the data."""
        return overview(prepare_tasks(wanted, self.tasks, self.name), positions)


class Glue(PublishedTasks):
    """The nine GLUE tasks and the diagnostic set."""

    name = "GLUE"
    key = "glue"
    tasks = TASKS
    protocols = paper_numbers.PROTOCOLS
    scores = paper_numbers.SCORES
    columns = paper_numbers.COLUMNS

    # --- report -------------------------------------------------------------------------------------------------------

    def other_rows(self, results: Results) -> Iterable[TableRow]:
        """Return the rows of the baseline and of the LazyFormer paper (Table 1).

        The rows of the PAR paper (Table 4) are added if they cover all of the grid's tasks.
        """
        rows = [*super().other_rows(results), *paper_numbers.PAPER_ROWS]
        if self._is_pars(results):
            rows += paper_numbers.PAR_ROWS
        return rows

    def _is_pars(self, results: Results) -> bool:
        return set(results.grid.tasks) <= set(self.protocols["par"].tasks)

    def notes(self, results: Results) -> Iterator[str]:
        """Yield short notes that help the reader compare the scores with other work."""
        yield (
            "Each score is the median over seeds at the best learning rate; MNLI-mm uses the learning rate selected on "
            "MNLI-m. The metric is Matthews correlation for CoLA, Pearson correlation for STS, and accuracy for the "
            "other tasks, times 100."
        )
        yield (
            "Avg. is the mean of the paper's nine scores, with MNLI-m and MNLI-mm counted separately; it is shown only "
            "if all nine are complete. Rows marked (paper) are quoted from LazyFormer, arXiv 2102.12702, Table 1; they "
            "were not measured here."
        )
        if self._is_pars(results):
            yield (
                "The last rows are quoted from PAR Transformer, arXiv 2009.04534, Table 4, and are medians of five "
                "runs; DistilBERT's scores are from its own paper."
            )

    # --- predictions --------------------------------------------------------------------------------------------------

    def predict(self, runs: Mapping[str, Path], folder: Path, wanted: PredictSettings) -> list[str]:
        """Write submission files for all tasks of the runs; they contain each test row's index and prediction.

        Raises:
            UserError: a task's data, a checkpoint, a head, a tokenizer or a test file is missing, or the dictionaries
                of model and data differ.
        """
        lines = []
        chosen = [find_task(name).name for name in wanted.tasks]
        for task in TASKS.values():
            run = runs.get(task.model_of or task.name)
            if run is None or (chosen and task.name not in chosen):
                continue
            source = wanted.data
            if source is None:
                output = run.absolute().parents[3]  # OUT in OUT/runs/MODEL/TASK/RUN
                source = output / self.prepared_subfolder
            data = source / task.name
            if not PreparedTask.is_at(data):
                data = source / task.folder
            if data.is_dir():
                lines += predict_task(task, run, data, folder, wanted)
            elif task.model_of:
                lines.append(f"{submission_file(task, 'test')}: skipped, because there is no data for {task.name}")
            else:
                raise UserError(
                    f"{source} contains no folder {task.folder} with {task.splits['test'].file}; pass the parent "
                    "folder of that folder as --data, or select other tasks with --tasks"
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
    """Prepare tasks in OUT/tasks: the requested ones or, by default, all tasks that have a folder in --data.

    Tasks that have already been prepared are reused.

    Args:
        wanted: settings with the official files, the tokenizer folder and the tasks.
        table: the known tasks.
        what: the benchmark's name, for messages.

    Raises:
        UserError: a task's folder or all of its files are missing, a row is invalid (the message names file and line),
            or a task has already been prepared with different settings. Tasks finished before the error are kept.
    """
    tasks = [find_task(name, table, what) for name in dict.fromkeys(wanted.tasks)]
    if not tasks:
        tasks = [task for task in table.values() if (wanted.data / task.folder).is_dir()]
    if not tasks:
        folders = ", ".join(task.folder for task in table.values())
        raise UserError(f"{wanted.data} contains no {what} task folder; known folders are {folders}")
    for task in tasks:  # report missing folders before encoding anything
        folder = wanted.data / task.folder
        if not folder.is_dir():
            raise UserError(
                f"{folder}: no such folder; put {task.name}'s official files there, or remove the task from --tasks"
            )
        files = [split.file for split in task.splits.values()]
        if not any((folder / file).is_file() for file in files):
            raise UserError(f"{folder} contains none of {', '.join(files)}; put {task.name}'s official files there")

    tokenizer = load_tokenizer(wanted.tokenizer)
    prepared = []
    for task in Progress(tasks, desc="prepare", unit=" tasks"):
        source = wanted.data / task.folder
        folder = wanted.output / Glue.prepared_subfolder / task.name
        prepared.append(prepare_task(source, folder, task, settings_of(wanted, task, source), tokenizer))
    return prepared


def settings_of(wanted: GridSettings, task: TaskDescription, source: Path) -> dict[str, Any]:
    """Return all settings that determine a task's prepared data, including hashes of its files in `source`."""
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
    """Prepare a task's files, or reuse existing prepared data.

    Args:
        source: the folder that contains the files.
        folder: the folder to write.
        task: the task.
        settings: all settings that determine the prepared data.
        tokenizer: the tokenizer.

    Raises:
        UserError: a row is invalid (the message names file and line), or the folder contains data prepared with
            different settings.
    """
    prepared_class = PreparedTask
    if task.is_custom:
        prepared_class = PreparedCustomTask
    before = prepared_class.reuse(folder, settings)
    if before is not None:
        return before
    files = {}
    missing = []
    for split, layout in task.splits.items():  # report invalid rows before encoding anything
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
    """Encode and write a split, and return its manifest entry."""
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
    """Format a table of the prepared data with one row per split, followed by notes for the user.

    Args:
        prepared: tasks prepared with the same maximum length.
        positions: maximum input lengths of the models; the table counts the truncated rows for each.
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
                "skipped": f"{counts['short_rows']:,}",
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
    """Return notes for the user on missing files, skipped rows, and row counts that differ from the official ones."""
    task = prepared.task
    manifest = prepared.manifest
    lines = [f"{manifest['data']}/{file} does not exist" for file in manifest["missing_files"]]
    for split, counts in manifest["splits"].items():
        file = f"{manifest['data']}/{counts['file']}"
        official = task.splits[split].rows
        lines += labelled_files.describe_oddities(file, counts)
        if official not in (0, counts["rows"]):
            lines.append(
                f"{file} ends at line {counts['last_line']:,} and has {counts['rows']:,} rows, but the official file "
                f"has {official:,}; is the file truncated, or is it a different version?"
            )
    return lines


# --- from fine-tuned models to the leaderboard's files ----------------------------------------------------------------


def leaderboard_splits(task: TaskDescription) -> list[str]:
    """Return the names of a task's test splits."""
    return [split for split in task.splits if split.startswith("test")]


def submission_file(task: TaskDescription, split: str) -> str:
    """Return the leaderboard's file name for a test split; MNLI has a matched and a mismatched split."""
    if len(leaderboard_splits(task)) == 1:
        return f"{task.name}.tsv"
    return {"test": f"{task.name}-m.tsv", "test1": f"{task.name}-mm.tsv"}[split]


SUBMISSION_FILES = tuple(submission_file(task, split) for task in TASKS.values() for split in leaderboard_splits(task))


def predict_task(task: TaskDescription, run: Path, data: Path, folder: Path, wanted: PredictSettings) -> list[str]:
    """Predict a task's test splits, and write one submission file per split.

    Args:
        task: the task.
        run: the folder of the run to predict with.
        data: the task's data, official or prepared.
        folder: the output folder.
        wanted: the command's options.

    Returns:
        One line per file, plus a line about truncated rows if there are any.

    Raises:
        UserError: the checkpoint, a suitable head, the tokenizer or a file is missing, or a file is invalid.
    """
    checkpoint = kept_checkpoint(run)
    state = checkpoints.load(checkpoint)
    head = heads_in_checkpoint(state["model"]).get(task.head_name)
    if head is None or head.outputs != task.num_classes:
        raise UserError(
            f"{checkpoint} has no classification head {task.head_name!r} for {task.name}; use a checkpoint that was "
            "fine-tuned on this task"
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
            lines.append(f"{file}: {truncation_message(objective.cut[split], len(dataset), objective.longest, 'rows')}")
    return lines


def prediction_words(task: TaskDescription, logits: np.ndarray) -> list[str]:
    """Convert logits (N, classes) to labels or, for regression, to numbers in the task's range with three decimals.

    Raises:
        UserError: a predicted number is not finite.
    """
    if not task.is_regression:
        return [task.labels[number] for number in logits.argmax(-1)]
    scores = logits[:, 0]
    if not np.isfinite(scores).all():
        raise UserError(f"{task.name}: the model predicts {scores[~np.isfinite(scores)][0]}; train the model again")
    return [f"{score:.3f}" for score in np.clip(scores, *task.score_range)]


BENCHMARK = Glue()
