"""Patterns trained from scratch: update by update in turn, on the same batches, each from the same seed; resumes."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path as File
from typing import Any

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.experiments.curve_training import CurveTraining, train_in_turn
from lazyformer_fairseq.experiments.search.supernet.fairseq_model import TASKS
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import keep_settings

RESULT = "result.json"
LONGEST_NAME = 100  # file systems end at 255 bytes, and temporary files add to a name
VALID_TOKENS = 32_768
VALIDATIONS = 4  # points of a curve beside the first; each is also saved


@dataclass(frozen=True)
class Recipe:
    """How all patterns learn: Adam, a warm-up over a tenth of the updates, linear decay to zero.

    Attributes:
        updates: of each pattern and seed.
        rate: the highest one.
        batch_size: sequences, or streams of text, an update.
        seeds: each trains every pattern.
        fairseq_options: of task and model.
        valid_tokens: of the validation split, its first.
    """

    data: str
    task: str
    arch: str
    updates: int
    rate: float
    batch_size: int
    seeds: tuple[int, ...]
    device: str
    fairseq_options: tuple[str, ...] = ()
    valid_tokens: int = VALID_TOKENS

    def command(self, pattern: str, seed: int) -> list[str]:
        """Arguments of the fairseq-train that trains one."""
        task, criterion, _ = TASKS[self.task]
        return [
            *(self.data, "--user-dir", str(USER_DIR), "--task", task, "--criterion", criterion, "--arch", self.arch),
            *self.fairseq_options,
            *("--sublayer-pattern", pattern, "--optimizer", "fused_adam", "--adam-betas", "(0.9,0.98)"),
            *("--clip-norm", "1.0", "--lr-scheduler", "linear_warmup", "--warmup-ratio", "0.1", "--lr", str(self.rate)),
            *("--batch-size", str(self.batch_size), "--max-update", str(self.updates), "--seed", str(seed)),
            *("--num-workers", "0", "--no-epoch-checkpoints", *(["--cpu"] if self.device == "cpu" else [])),
        ]


class ScratchTraining(CurveTraining):
    """The training of a pattern from one seed.

    Attributes:
        cpu_seconds: processor time of each update.
    """

    def __init__(self, recipe: Recipe, pattern: str, seed: int, folder: File):
        super().__init__(pattern, recipe.command(pattern, seed), folder, recipe.updates)
        self.valid_tokens = recipe.valid_tokens
        self.cpu_seconds: list[float] = self._kept("cpu_seconds", [])[: self.updates]

    def update(self) -> int:
        began = time.process_time()
        tokens = super().update()
        self.cpu_seconds.append(time.process_time() - began)
        return tokens

    def measure(self) -> Mapping[str, float]:
        """Loss on the validation split, bits a prediction."""
        return {"loss": float(self.evaluate(tokens=self.valid_tokens)["loss"])}

    def is_due(self) -> bool:
        return self.updates == self.total or self.updates % max(1, self.total // VALIDATIONS) == 0

    def save(self, with_optimizer: bool = True) -> None:
        self._keep("cpu_seconds", self.cpu_seconds)
        super().save(with_optimizer)

    def finish(self) -> None:
        """Writes the result; the checkpoint keeps no optimizer."""
        self.save(with_optimizer=False)
        result = {
            "loss": self.curve["loss"][-1],
            "curve": self.curve,
            "parameters": self.parameters,
            "cpu_seconds": sum(self.cpu_seconds),
            "cpu_ms_per_update": 1000 * float(np.median(self.cpu_seconds)),
        }
        write_json(self.folder / RESULT, result)


def train_from_scratch(recipe: Recipe, patterns: Sequence[str], folder: File) -> dict[str, dict[int, dict[str, Any]]]:
    """Trains all patterns that have no result in `folder` yet, those of a seed together.

    Args:
        patterns: written out, each once.

    Returns:
        By pattern and seed what its result.json holds: `loss` in bits, `curve`, `parameters`, processor time.

    Raises:
        UserError: the folder holds trainings of another recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    keep_settings(folder / "settings.json", asdict(recipe), "trainings", any(folder.glob("*/*")))
    folders = {(pattern, seed): _folder(folder, pattern, seed) for pattern in patterns for seed in recipe.seeds}
    left = [pair for pair, place in folders.items() if not (place / RESULT).exists()]
    total = len(folders) * recipe.updates
    with tqdm(
        total=total, initial=total - len(left) * recipe.updates, desc="from scratch", unit=" updates"
    ) as progress:
        for seed in recipe.seeds:
            pairs = [pair for pair in left if pair[1] == seed]
            trainings = [ScratchTraining(recipe, *pair, folders[pair]) for pair in pairs]
            progress.update(sum(training.updates for training in trainings))
            if trainings:
                train_in_turn(trainings, progress)
            for training in trainings:
                training.finish()
    return {
        pattern: {seed: read_json(folders[pattern, seed] / RESULT) for seed in recipe.seeds} for pattern in patterns
    }


def _folder(folder: File, pattern: str, seed: int) -> File:
    """Its name is the pattern, or the beginning of one that is too long for a name, and what tells it from others."""
    if len(pattern) > LONGEST_NAME:
        pattern = f"{pattern[:LONGEST_NAME]}-{hashlib.sha256(pattern.encode()).hexdigest()[:8]}"
    return folder / f"{pattern}-seed{seed}"


def mean_loss(runs: Mapping[int, Mapping[str, Any]]) -> float:
    """Over seeds."""
    return float(np.mean([run["loss"] for run in runs.values()]))
