"""The training of a comparison: the models of one seed take turns, update by update, in one process."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq.files.json_files import read_json, write_json
from lazyformer_fairseq.language_modeling.comparison.settings import ComparisonSettings
from lazyformer_fairseq.training.stepwise import StepwiseTraining

SAVES = 10  # of a training
TRIAL_WARM_UP, TRIAL_UPDATES = 5, 20


class ModelTraining(StepwiseTraining):
    """The training of the pattern `name` with one seed for `total` updates, in a folder of its own."""

    def __init__(self, settings: ComparisonSettings, name: str, seed: int, total: int, folder: Path):
        super().__init__(settings.training_command(name, seed, total), folder)
        self.name = name
        self.total = total

    @property
    def share_done(self) -> float:
        return self.updates / self.total


def train_in_turn(trainings: list[ModelTraining], progress: tqdm) -> None:
    """Trains all to their ends; the one farthest behind is next, so that equal totals mean strict turns.

    All save at the same share of their updates, so that they also resume together.
    """
    while (behind := min(trainings, key=lambda training: training.share_done)).updates < behind.total:
        behind.update()
        progress.update()
        if behind.updates % max(1, behind.total // SAVES) == 0 or behind.updates == behind.total:
            behind.save()


def updates_that_fit(settings: ComparisonSettings) -> dict[str, int]:
    """By model: the updates that fit in `settings.minutes`, by the median of a trial in which all models take turns."""
    trial = TRIAL_WARM_UP + TRIAL_UPDATES
    with TemporaryDirectory() as folder:
        trainings = [
            ModelTraining(settings, name, settings.seeds[0], trial, Path(folder) / name) for name in settings.patterns
        ]
        for _ in tqdm(range(trial), desc="trial", unit=" updates", leave=False):
            for training in trainings:
                training.update()
    medians = {training.name: np.median(training.seconds[TRIAL_WARM_UP:]) for training in trainings}
    return {name: max(1, int(60 * settings.minutes / seconds)) for name, seconds in medians.items()}


def planned_updates(settings: ComparisonSettings, path: Path) -> Mapping[str, int]:
    """Updates by model, kept in `path`: a second trial would give another answer."""
    if not path.exists():
        same = dict.fromkeys(settings.patterns, settings.updates)
        write_json(path, updates_that_fit(settings) if settings.minutes is not None else same)
    return read_json(path)
