"""Fine-tuned models -> gluebenchmark.com's files for the test sets: a line per row, its number and the answer."""

import csv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from fairseq import utils
from fairseq.models import BaseFairseqModel
from omegaconf import open_dict
from tqdm import tqdm

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.glue.prepared_data import PreparedTask
from lazyformer_fairseq.data.glue.task_table import TASKS, TaskDescription
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.checkpoint_match import heads_in_checkpoint
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_loading import load_safely
from lazyformer_fairseq.finetuning import load_finetuned as finetuned
from lazyformer_fairseq.finetuning.glue.report.read_results import read_results, read_run
from lazyformer_fairseq.finetuning.run.grid import BEST
from lazyformer_fairseq.storage.atomic import atomic_folder

HEADER = ("index", "prediction")


def leaderboard_splits(task: TaskDescription) -> list[str]:
    return [split for split in task.splits if split.startswith("test")]


def submission_file(task: TaskDescription, split: str) -> str:
    """The leaderboard's name for a test set: that of its task; MNLI has a matched and a mismatched one."""
    if len(leaderboard_splits(task)) == 1:
        return f"{task.name}.tsv"
    return f"{task.name}-{'m' if split == 'test' else 'mm'}.tsv"


SUBMISSION_FILES = tuple(submission_file(task, split) for task in TASKS.values() for split in leaderboard_splits(task))


@dataclass(frozen=True)
class Prediction:
    """The data and settings of a prediction.

    Attributes:
        data: a folder of official files (TASK/test.tsv) or of tasks as ``lazyformer glue prepare`` made them; None:
            `tasks` in the folder that a run belongs to.
        tokenizer: its folder; None: the one beside the checkpoint, or of the prepared data.
        tasks: names; none means all.
        max_tokens: of a batch, padding included.
        zipped: write submission.zip too.
    """

    data: Optional[Path] = None
    tokenizer: Optional[Path] = None
    tasks: frozenset[str] = frozenset()
    max_tokens: int = 8192
    zipped: bool = False


@dataclass
class Submission:
    """A folder of files: name -> rows; those that are missing, and remarks on the others."""

    folder: Path
    rows: dict[str, int] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        return [name for name in SUBMISSION_FILES if name not in self.rows]


def predict_runs(runs: Sequence[Path], target: Path, wanted: Prediction) -> list[Submission]:
    """Predicts with the given runs, one per task, into `target`.

    Raises:
        UserError: two runs of a task, or whatever :func:`predict_task` raises. Nothing is written then.
    """
    of_task: dict[str, Path] = {}
    for folder in runs:
        task = read_run(folder / "result.json").key.task
        if task in of_task:
            raise UserError(f"{folder} and {of_task[task]}: both are of {task}; give one run a task")
        of_task[task] = folder
    with atomic_folder(target) as unfinished:
        submission = _submit(of_task, unfinished, wanted)
    submission.folder = target
    return [submission]


def predict_best(output: Path, target: Path, wanted: Prediction) -> list[Submission]:
    """Predicts with each model's best run of each task, by the development score, into `target`/MODEL.

    Args:
        output: the folder that ``lazyformer glue run`` wrote.

    Raises:
        UserError: no run has ended well, or whatever :func:`predict_task` raises. Nothing is written then.
    """
    results = read_results(output)
    if not results.runs:
        raise UserError(f"{output / 'runs'}: no run has ended well")
    submissions = []
    with atomic_folder(target) as unfinished:
        for model in results.grid.models:
            best = {task: [run.folder for run in results.of(model, task).best] for task in results.grid.tasks}
            of_task = {task: _one_with_checkpoint(folders) for task, folders in best.items() if folders}
            (unfinished / model).mkdir(parents=True)
            submissions.append(_submit(of_task, unfinished / model, wanted))
            submissions[-1].folder = target / model
    return submissions


def _one_with_checkpoint(runs: list[Path]) -> Path:
    """One of equally good runs whose checkpoint was kept, else the first."""
    return next((run for run in runs if (run / BEST).is_file()), runs[0])


def _submit(runs: dict[str, Path], folder: Path, wanted: Prediction) -> Submission:
    """Every file that the runs (task -> folder) can make."""
    submission = Submission(folder)
    for task in TASKS.values():
        run = runs.get(task.model_of or task.name)
        if run is None or (wanted.tasks and task.name not in wanted.tasks):
            continue
        source = wanted.data or _output_of(run) / "tasks"
        data = find_data(task, source)
        if data is None and task.model_of:
            submission.remarks.append(f"{submission_file(task, 'test')}: no data of {task.name}, so it is left out")
            continue
        if data is None:
            raise UserError(
                f"{source}: holds no folder {task.folder}; give the one with "
                f"{task.name}'s {task.splits['test'].file} by --data, or choose other tasks by --tasks"
            )
        for split, words in predict_task(task, run, data, wanted).items():
            name = submission_file(task, split)
            write_submission(folder / name, words)
            submission.rows[name] = len(words)
            if len(words) != (official := task.splits[split].rows):
                submission.remarks.append(
                    f"{name}: {len(words):,} rows, but the official test set has {official:,}: the leaderboard will "
                    "refuse it"
                )
    if wanted.zipped:
        zip_submission(folder)
    return submission


def _output_of(run: Path) -> Path:
    """OUT in OUT/runs/MODEL/TASK/RUN."""
    return run.absolute().parents[3]


def find_data(task: TaskDescription, folder: Path) -> Optional[Path]:
    """The task's folder among prepared tasks or official ones; None where there is none."""
    prepared, official = folder / task.name, folder / task.folder
    if PreparedTask.is_at(prepared):
        return prepared
    return official if official.is_dir() else None


def predict_task(task: TaskDescription, run: Path, data: Path, wanted: Prediction) -> dict[str, list[str]]:
    """The words predicted for each test split, in the order of its rows.

    Raises:
        UserError: no checkpoint, head, tokenizer or test file; a checkpoint of another dictionary.
    """
    model, glue_task = load_finetuned(task, run, data, wanted.tokenizer)
    words = {}
    for split in leaderboard_splits(task):
        glue_task.load_dataset(split)
        name = submission_file(task, split)
        predictions = predict_split(model, glue_task.head_name, glue_task.dataset(split), wanted.max_tokens, name)
        words[split] = prediction_words(task, predictions)
    return words


def load_finetuned(task: TaskDescription, run: Path, data: Path, tokenizer: Optional[Path]):
    """The model of a run, in evaluation mode and on the GPU if there is one, and its task ``glue`` on `data`."""
    checkpoint = run / BEST
    if not checkpoint.is_file():
        raise UserError(f"{checkpoint}: no such checkpoint; run it again with --keep-checkpoints best")
    state = load_safely(checkpoint)
    settings = state["cfg"]["task"]
    head = settings.get("glue_head_name") or task.head_name
    found = heads_in_checkpoint(state["model"]).get(head)
    if found is None or found.outputs != task.num_classes:
        raise UserError(f"{checkpoint}: has no classification head {head!r} of {task.name}; give one fine-tuned for it")
    with open_dict(settings):
        settings.glue_task = task.name
        settings.data = str(data)
        settings.tokenizer_folder = _find_tokenizer(run, data, tokenizer)
    return finetuned.load_finetuned(checkpoint, state, data)


def _find_tokenizer(run: Path, data: Path, given: Optional[Path]) -> Optional[str]:
    """The tokenizer's folder: the one given, beside the checkpoint, or of the data that the run was trained on.

    Prepared data has its own, which the task finds and compares with the given one.
    """
    if given is not None or PreparedTask.is_at(data):
        return given and str(given)
    candidates = [run / "tokenizer", _output_of(run) / "tasks" / run.absolute().parent.name / "tokenizer"]
    for folder in candidates:
        if folder.is_dir():
            return str(folder)
    raise UserError(f"no tokenizer at {' or '.join(map(str, candidates))}; give the checkpoint's by --tokenizer")


@torch.no_grad()
def predict_split(
    model: BaseFairseqModel, head: str, dataset: LabelledTextsDataset, max_tokens: int, name: str
) -> np.ndarray:
    """Classes (int) or scores (float), (N,), in the order of the dataset; computed in batches of like lengths."""
    device = next(model.parameters()).device
    predictions: Optional[np.ndarray] = None
    batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=max(max_tokens, int(dataset.sizes.max())))
    with tqdm(total=len(dataset), desc=name, unit=" rows", delay=2, disable=None, leave=False) as progress:
        for batch in batches:
            sample = dataset.collater([dataset[index] for index in batch])
            inputs = utils.apply_to_sample(lambda tensor: tensor.to(device), sample["net_input"])
            logits = model(**inputs, classification_head_name=head)[0].float().cpu()
            answers = (logits.squeeze(-1) if logits.size(-1) == 1 else logits.argmax(-1)).numpy()
            if predictions is None:
                predictions = np.empty(len(dataset), dtype=answers.dtype)
            predictions[sample["id"].numpy()] = answers
            progress.update(len(batch))
    return predictions


def prediction_words(task: TaskDescription, predictions: np.ndarray) -> list[str]:
    """Label words for classes (N,), or scores in the task's range, three decimals; UserError where one is no number."""
    if not task.is_regression:
        return [task.labels[number] for number in predictions]
    if not np.isfinite(predictions).all():
        raise UserError(f"{task.name}: the model predicts {predictions[~np.isfinite(predictions)][0]}; train it anew")
    return [f"{score:.3f}" for score in np.clip(predictions, *task.score_range)]


def write_submission(path: Path, words: list[str]) -> None:
    """One file: `words` in the order of the test rows, numbered from 0."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(enumerate(words))


def zip_submission(folder: Path) -> Path:
    """``submission.zip`` in `folder`, with its files at the top, as the leaderboard wants them."""
    path = folder / "submission.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in SUBMISSION_FILES:
            if (folder / name).is_file():
                archive.write(folder / name, name)
    return path
