"""Made folders of GLUE results, as ``lazyformer finetune`` writes them."""

import json
from pathlib import Path
from typing import Any, Union

from lazyformer_fairseq.data.glue import TASKS
from lazyformer_fairseq.finetuning.results import RunKey


def write_grid(folder: Path, models: dict[str, str], tasks: list[str], rates: list[float], seeds: list[int]) -> Path:
    """Writes grid.json. Returns `folder`."""
    grid = {"models": models, "tasks": tasks, "lrs": rates, "seeds": seeds, "epochs": {}}
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    (folder / "runs" / "grid.json").write_text(json.dumps(grid))
    return folder


def run_folder(folder: Path, key: RunKey) -> Path:
    path = folder / "runs" / key.model / key.task / f"lr{key.rate:g}_seed{key.seed}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_result(
    folder: Path, key: RunKey, score: Union[float, tuple[float, float]], baseline: float = 0.0, **more: Any
) -> Path:
    """Writes a result.json in which every metric has the same value; of a pair of scores the second is MNLI-mm's."""
    task = TASKS[key.task]
    files = [Path(split.file).stem for name, split in task.splits.items() if name.startswith("valid")]
    scores = score if isinstance(score, tuple) else (score,) * len(files)
    result = {
        "format_version": 1,
        "model": key.model,
        "checkpoint": f"{key.model}/checkpoint_last.pt",
        "updates": None,
        "task": key.task,
        "lr": key.rate,
        "seed": key.seed,
        "epochs": task.epochs,
        "best_epoch": 7,
        "metrics": {file: dict.fromkeys(task.metrics, value) for file, value in zip(files, scores, strict=True)},
        "baseline": {file: dict.fromkeys(task.metrics, baseline) for file in files},
        "train_rows": 100,
        "seconds": 36.0,
        **more,
    }
    path = run_folder(folder, key) / "result.json"
    path.write_text(json.dumps(result))
    return path


def write_failure(folder: Path, key: RunKey, message: str) -> Path:
    path = run_folder(folder, key) / "failed.json"
    path.write_text(json.dumps({"attempts": 2, "message": message, "log": str(path.with_name("train.log"))}))
    return path
