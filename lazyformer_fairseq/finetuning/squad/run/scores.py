"""The marks of a run on the development file, and of answers that need no model."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lazyformer_fairseq.data.squad.baselines import baselines
from lazyformer_fairseq.data.squad.metrics import score
from lazyformer_fairseq.fairseq_plugin.models.spans import find_answers
from lazyformer_fairseq.finetuning.run.best_epoch import load_best
from lazyformer_fairseq.finetuning.run.grid import Run
from lazyformer_fairseq.finetuning.squad.best_texts import best_texts


def scores(run: Run, cfg: DictConfig, best: dict[str, Any]) -> dict[str, Any]:
    """``metrics`` of the best epoch's weights, ``baseline``, the best of all heuristics, and ``baselines``, all."""
    task, model = load_best(run, cfg, best)
    for split in ("train", "valid"):
        task.load_dataset(split)
    dataset = task.dataset("valid")
    answers = find_answers(model, task.head_name, dataset, n_best=1)
    heuristics = baselines(dataset.file, task.dataset("train").file)
    strongest = max(heuristics.values(), key=lambda marks: marks[run.task.selecting_metric])
    file = Path(run.task.splits["valid"].file).stem
    return {
        "metrics": {file: score(dataset.file, best_texts(dataset.file, answers))},
        "baseline": {file: strongest},
        "baselines": {name: {file: marks} for name, marks in heuristics.items()},
    }
