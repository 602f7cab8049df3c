"""GLUE: its official files prepared, the paper's table, and the files that gluebenchmark.com takes."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from tabulate import tabulate

from lazyformer_fairseq.data import labelled_files
from lazyformer_fairseq.data.encoding import encode_split
from lazyformer_fairseq.data.glue import TASKS, find_task
from lazyformer_fairseq.data.labelled_files import SplitFile, TaskDescription
from lazyformer_fairseq.data.prepared_folder import EncodedExamples, PreparedTask, targets_of, write_split
from lazyformer_fairseq.data.text.interface import TextTokenizer, told_cut
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer, tokenizer_hashes
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation import checkpoints, inference, loading
from lazyformer_fairseq.evaluation.match import heads_in_checkpoint
from lazyformer_fairseq.finetuning import paper_numbers
from lazyformer_fairseq.finetuning.benchmark import TableRow, TextsBenchmark
from lazyformer_fairseq.finetuning.paper_numbers import PROTOCOLS, SCORES
from lazyformer_fairseq.finetuning.results import BEST, RESULT, Results
from lazyformer_fairseq.finetuning.settings import GridSettings, PredictSettings
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.json_files import sha256_of
from lazyformer_fairseq.training.objectives.labelled_texts import LabelledTextsObjective

LONGEST = 512  # ids of an input where nobody says
HEADER = ("index", "prediction")


class Glue(TextsBenchmark):
    """The nine tasks of GLUE, and its diagnostic set."""

    name = "GLUE"
    key = "glue"
    tasks = TASKS
    protocols = PROTOCOLS
    options = frozenset(("max_length", "max_train_rows", "glue_head"))
    scores = tuple(SCORES.values())
    columns = paper_numbers.COLUMNS
    average = True

    def choose_tasks(self, names: Sequence[str]) -> list[str]:
        """Raises a UserError for a task that is unknown, given twice, or cannot be trained."""
        tasks = [find_task(name) for name in names or self.usual.tasks]
        for number, task in enumerate(tasks):
            if task in tasks[:number]:
                raise UserError(f"--tasks: {task.name} is there twice")
            if "train" not in task.splits:
                raise UserError(f"--tasks: {task.name} has no training data; {task.model_of}'s model predicts it")
        return [task.name for task in tasks]

    def prepare(self, wanted: GridSettings, positions: Collection[int] = ()) -> str:
        return overview(prepare_tasks(wanted), positions)

    # --- report -------------------------------------------------------------------------------------------------------

    def other_rows(self, results: Results) -> Iterable[TableRow]:
        """The baseline and LazyFormer's Table 1; PAR's Table 4 too where the grid is of its two tasks alone."""
        rows = (*paper_numbers.PAPER_ROWS, *(paper_numbers.PAR_ROWS if self._is_pars(results) else ()))
        papers = [TableRow(f"{row.model} (paper)", "paper", row.updates, row.scores) for row in rows]
        return [*super().other_rows(results), *papers]

    def _is_pars(self, results: Results) -> bool:
        return set(results.grid.tasks) <= set(PROTOCOLS["par"].tasks)

    def notes(self, results: Results) -> Iterator[str]:
        yield (
            "A score is the median over seeds at each learning rate, and of these medians the best; MNLI-mm stands at "
            "the rate that MNLI-m chose. CoLA: Matthews' correlation, STS: Pearson's, all others accuracy; times 100."
        )
        yield (
            "Avg. is the mean of the paper's nine numbers, MNLI-m and -mm counted apart, and stands only where all "
            "nine are complete. Rows marked (paper) are those of LazyFormer, arXiv 2102.12702, Table 1: theirs, not "
            "measured here."
        )
        if self._is_pars(results):
            yield (
                "The last rows are those of PAR Transformer, arXiv 2009.04534, Table 4: medians of five runs; "
                "DistilBERT's are of its own paper."
            )

    # --- predictions --------------------------------------------------------------------------------------------------

    def predict(self, runs: Mapping[str, Path], folder: Path, wanted: PredictSettings) -> list[str]:
        """Writes every file that the runs can make: a line per row of a test set, its number and the answer.

        Raises:
            UserError: no data of a task; no checkpoint, head, tokenizer or test file; another dictionary.
        """
        lines = []
        chosen = [find_task(name).name for name in wanted.tasks]
        written = []
        for task in TASKS.values():
            run = runs.get(task.model_of or task.name)
            if run is None or (chosen and task.name not in chosen):
                continue
            source = wanted.data or _output_of(run) / "tasks"
            data = source / (task.name if PreparedTask.is_at(source / task.name) else task.folder)
            if not data.is_dir() and task.model_of:
                lines.append(f"{submission_file(task, 'test')}: no data of {task.name}, so it is left out")
                continue
            if not data.is_dir():
                raise UserError(
                    f"{source}: holds no folder {task.folder}; give the one with "
                    f"{task.name}'s {task.splits['test'].file} by --data, or choose other tasks by --tasks"
                )
            for split, (words, cut) in predict_task(task, run, data, wanted).items():
                name = submission_file(task, split)
                official = task.splits[split].rows
                rows = ["\t".join(HEADER), *(f"{number}\t{word}" for number, word in enumerate(words))]
                (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
                written.append(name)
                lines.append(f"{name}: {len(words):,} rows")
                if len(words) != official:
                    lines[-1] += f", but the official test set has {official:,}: the leaderboard will refuse it"
                lines += [f"{name}: {cut}"] if cut else []
        missing = [name for name in SUBMISSION_FILES if name not in written]
        return [*lines, *([f"missing {', '.join(missing)}"] if missing else [])]


# --- from official files to folders of memory-mapped data -------------------------------------------------------------


def prepare_tasks(wanted: GridSettings) -> list[PreparedTask]:
    """Prepares the wanted tasks, or else those that have a folder in the data, in OUT/tasks; reuses what is there.

    Raises:
        UserError: a folder or all files of a task are missing, a row is wrong (file and line), or the task was
            prepared before in another way. Tasks that were finished before stay.
    """
    tasks = [find_task(name) for name in dict.fromkeys(wanted.tasks)]
    tasks = tasks or [task for task in TASKS.values() if (wanted.data / task.folder).is_dir()]
    if not tasks:
        folders = ", ".join(task.folder for task in TASKS.values())
        raise UserError(f"{wanted.data}: holds no folder of a GLUE task; known are {folders}")
    tokenizer = load_tokenizer(wanted.tokenizer)
    settings = [_settings(wanted, task) for task in tasks]  # reports every missing folder before anything is encoded
    prepared = []
    with Progress(total=len(tasks), desc="prepare", unit=" tasks") as progress:
        for task, values in zip(tasks, settings, strict=True):
            progress.set_postfix_str(task.name)
            folder = wanted.output / Glue.prepared_in / task.name
            prepared.append(prepare_task(wanted.data / task.folder, folder, task, values, tokenizer))
            progress.update()
    return prepared


def remarks(prepared: PreparedTask) -> list[str]:
    """Remarks for the user on a task's files: missing ones, skipped rows, an unofficial number of rows."""
    task = prepared.task
    manifest = prepared.manifest
    lines = [f"{manifest['data']}/{file}: is not there" for file in manifest["missing_files"]]
    for split, counts in manifest["splits"].items():
        file = f"{manifest['data']}/{counts['file']}"
        official = task.splits[split].rows
        lines += labelled_files.describe_oddities(file, counts)
        if official not in (0, counts["rows"]):
            lines.append(
                f"{file}: ends at line {counts['last_line']:,} and has {counts['rows']:,} rows, but the official file "
                f"has {official:,}; is it cut off, or another version?"
            )
    return lines


def overview(prepared: Sequence[PreparedTask], positions: Collection[int] = ()) -> str:
    """Return a table of the prepared data, a row per split, with remarks for the user under it.

    Args:
        prepared: tasks of one length.
        positions: of the models that will read them: rows that are cut are counted at the length that each reads.
    """
    longest = prepared[0].longest
    lengths = sorted({min(longest, each) for each in positions or [longest]})
    rows = [
        {
            "task": task.task.name,
            "file": counts["file"],
            "rows": f"{counts['rows']:,}",
            "left out": f"{counts['short_rows']:,}",
            **{f"cut at {length:,} tokens": f"{task.count_cut(split, length):,}" for length in lengths},
            **{f"unknown {what}s": f"{100 * counts[f'unknown_{what}_share']:.2f}%" for what in ("word", "token")},
            "tokens a row": f"{counts['kept_tokens'] / counts['rows']:.1f}",
        }
        for task in prepared
        for split, counts in task.manifest["splits"].items()
    ]
    align = ("left", "left", *["right"] * (len(rows[0]) - 2))
    table = tabulate(rows, "keys", colalign=align, disable_numparse=True)
    return "\n".join([table, *(f"note: {remark}" for task in prepared for remark in remarks(task))])


def _settings(wanted: GridSettings, task: TaskDescription) -> dict[str, Any]:
    folder = wanted.data / task.folder
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; put {task.name}'s official files there, or leave it out of --tasks")
    files = {split.file: folder / split.file for split in task.splits.values()}
    if not any(path.is_file() for path in files.values()):
        raise UserError(f"{folder}: holds none of {', '.join(files)}; put {task.name}'s official files there")
    return settings_of(wanted, task, folder)


def settings_of(wanted: GridSettings, task: TaskDescription, source: Path) -> dict[str, Any]:
    """What decides the prepared data of a task whose files lie in `source`."""
    files = {split.file: source / split.file for split in task.splits.values()}
    hashes = {name: sha256_of(path) for name, path in files.items() if path.is_file()}
    known = (PreparedTask.FORMAT_VERSION, task.name, wanted.max_length or LONGEST)
    values = (*known, tokenizer_hashes(wanted.tokenizer), hashes)
    return dict(zip(PreparedTask.SETTINGS, values, strict=True))


def prepare_task(
    source: Path,
    folder: Path,
    task: TaskDescription,
    settings: dict[str, Any],
    tokenizer: TextTokenizer,
    kind: type[PreparedTask] = PreparedTask,
) -> PreparedTask:
    """What is prepared of the files of a task in `source`, now or before.

    Args:
        kind: of the folder.

    Raises:
        UserError: a row is wrong (file and line), or the folder was prepared in another way.
    """
    if (there := kind.reuse(folder, settings)) is not None:
        return there
    missing = [split.file for split in task.splits.values() if split.file not in settings["files"]]
    there = [split for split, layout in task.splits.items() if layout.file in settings["files"]]
    # Reports wrong rows before any is encoded.
    files = {split: labelled_files.read_split(task, source, split) for split in there}

    def write_splits(folder: Path) -> dict[str, Any]:
        return {name: _write(folder / name, task, file, tokenizer, settings) for name, file in files.items()}

    facts = {"data": str(source), "missing_files": missing, "dictionary_size": len(tokenizer.dictionary)}
    return kind.write(folder, settings, tokenizer, write_splits, **facts)


def _write(
    prefix: Path,
    task: TaskDescription,
    file: SplitFile,
    tokenizer: TextTokenizer,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Writes a split, FOLDER/SPLIT. Returns its entry in the manifest."""
    inputs, counts = encode_split(tokenizer, file, settings["max_length"], len(os.sched_getaffinity(0)))
    examples = EncodedExamples(inputs, targets_of(task, file.examples))
    write_split(prefix.parent, prefix.name, examples, len(tokenizer.dictionary))
    if task.is_regression or examples.targets is None:
        words = {}
    else:
        words = Counter(examples.targets.tolist())
    return {
        **{"file": file.path.name, "rows": len(file.examples), "short_rows": len(file.short_lines)},
        **{name: getattr(file, name) for name in labelled_files.ODDITIES},
        "last_line": max([file.examples[-1].line, *file.short_lines]),
        "labels": {word: words[number] for number, word in enumerate(task.labels)} if words else None,
        **{"longest": max(map(len, inputs)), "kept_tokens": sum(map(len, inputs)), **counts},
        "bytes": prefix.with_suffix(".bin").stat().st_size,
    }


# --- from fine-tuned models to the leaderboard's files ----------------------------------------------------------------


def leaderboard_splits(task: TaskDescription) -> list[str]:
    return [split for split in task.splits if split.startswith("test")]


def submission_file(task: TaskDescription, split: str) -> str:
    """The leaderboard's name for a test set: that of its task; MNLI has a matched and a mismatched one."""
    if len(leaderboard_splits(task)) == 1:
        return f"{task.name}.tsv"
    return f"{task.name}-{'m' if split == 'test' else 'mm'}.tsv"


SUBMISSION_FILES = tuple(submission_file(task, split) for task in TASKS.values() for split in leaderboard_splits(task))


def _output_of(run: Path) -> Path:
    """OUT in OUT/runs/MODEL/TASK/RUN."""
    return run.absolute().parents[3]


def predict_task(
    task: TaskDescription,
    run: Path,
    data: Path,
    wanted: PredictSettings,
) -> dict[str, tuple[list[str], str]]:
    """Predict each test split of a task.

    Returns:
        For each split the predicted words, in the order of its rows, and a sentence on rows that were cut.

    Raises:
        UserError: no checkpoint, no head in it that fits, no tokenizer, or a file that is missing or wrong.
    """
    checkpoint = run / BEST
    if not checkpoint.is_file():
        result = checkpoint.with_name(RESULT)
        raise UserError(
            f"{checkpoint}: no such checkpoint; remove {result}, and run it again with --keep-checkpoints best"
        )
    state = checkpoints.load(checkpoint)
    head = heads_in_checkpoint(state["model"]).get(task.head_name)
    if head is None or head.outputs != task.num_classes:
        raise UserError(
            f"{checkpoint}: has no classification head {task.head_name!r} of {task.name}; give one fine-tuned for it"
        )
    tokenizer_folder = _tokenizer_folder(run, data, wanted.tokenizer)
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
    words = {}
    for split in leaderboard_splits(task):
        dataset = objective.dataset(split)
        file = submission_file(task, split)
        predictions = np.empty(len(dataset), np.float32 if task.is_regression else np.int64)
        for rows, logits in inference.logits_of(loaded.model, task.head_name, dataset, wanted.max_tokens, file, "rows"):
            predictions[rows] = logits[:, 0] if task.is_regression else logits.argmax(-1)
        count = objective.cut[split]
        if count:
            cut = told_cut(count, len(dataset), objective.longest, "rows")
        else:
            cut = ""
        words[split] = prediction_words(task, predictions), cut
    return words


def _tokenizer_folder(run: Path, data: Path, given: Optional[Path]) -> Path:
    """Return the tokenizer of prepared data; else the given one, or one of the run or of its data.

    Raises:
        UserError: there is none, or data was prepared with another than the given one.
    """
    if PreparedTask.is_at(data):
        folder = PreparedTask.load(data).tokenizer_folder
        if given is not None and tokenizer_hashes(given) != tokenizer_hashes(folder):
            raise UserError(f"--tokenizer {given}: {data} was prepared with another tokenizer; leave the option out")
        return folder
    if given is not None:
        return given
    candidates = [run / "tokenizer", _output_of(run) / "tasks" / run.absolute().parent.name / "tokenizer"]
    for folder in candidates:
        if folder.is_dir():
            return folder
    known = " or ".join(map(str, candidates))
    raise UserError(f"no tokenizer at {known}; give the checkpoint's by --tokenizer")


def prediction_words(task: TaskDescription, predictions: np.ndarray) -> list[str]:
    """Label words for classes (N,), or scores in the task's range, three decimals; UserError where one is no number."""
    if not task.is_regression:
        return [task.labels[number] for number in predictions]
    if not np.isfinite(predictions).all():
        raise UserError(f"{task.name}: the model predicts {predictions[~np.isfinite(predictions)][0]}; train it anew")
    return [f"{score:.3f}" for score in np.clip(predictions, *task.score_range)]


BENCHMARK = Glue()
