"""The scores of a run on GLUE's development files, and of an answer that needs no text."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import utils
from omegaconf import DictConfig

from lazyformer_fairseq.data.glue.metrics import METRICS
from lazyformer_fairseq.data.glue.task_table import TaskDescription
from lazyformer_fairseq.finetuning.run.best_epoch import load_best
from lazyformer_fairseq.finetuning.run.grid import BATCH_SIZE, Run


def scores(run: Run, cfg: DictConfig, best: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """By development file: metrics of the best epoch's weights, and those of an answer that needs no text."""
    task, model = load_best(run, cfg, best)
    criterion = task.build_criterion(cfg.criterion).eval()
    task.load_dataset("train")
    constant = constant_answer(run.task, task.dataset("train").targets.numpy())
    found, baseline = {}, {}
    for split in cfg.dataset.valid_subset.split(","):
        task.load_dataset(split)
        predictions, targets = _predict(task, split, model, criterion)
        file = Path(run.task.splits[split].file).stem
        found[file] = {name: METRICS[name](predictions, targets) for name in run.task.metrics}
        guesses = np.full(len(targets), constant)
        baseline[file] = {name: METRICS[name](guesses, targets) for name in run.task.metrics}
    return found, baseline


@torch.no_grad()
def _predict(task, split: str, model, criterion) -> tuple[np.ndarray, np.ndarray]:
    cuda = torch.cuda.is_available()
    predictions, targets = [], []
    dataset = task.dataset(split)
    for indices in dataset.batch_by_size(dataset.ordered_indices(), max_sentences=BATCH_SIZE):
        batch = dataset.collater([dataset[index] for index in indices])
        _, _, log = criterion(model, utils.move_to_cuda(batch) if cuda else batch)
        predictions.append(log["predictions"])
        targets.append(log["targets"])
    return np.concatenate(predictions), np.concatenate(targets)


def constant_answer(task: TaskDescription, targets: np.ndarray) -> float:
    """The best answer of a model that has seen the training labels but no text: the majority class, the mean score."""
    return float(targets.mean()) if task.is_regression else int(np.bincount(targets).argmax())
