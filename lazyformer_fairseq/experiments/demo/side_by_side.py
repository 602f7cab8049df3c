"""Trains models side by side: update by update in turn, on the same batches, so that their times compare.

One process, one machine state: what slows one model down for a moment slows the others too.
"""

from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from lazyformer_fairseq.experiments.curve_training import CurveTraining, train_in_turn
from lazyformer_fairseq.experiments.demo.clock import Clock
from lazyformer_fairseq.experiments.demo.settings import MODELS, DemoSettings

VALIDATIONS = 6  # points of a curve beside the first; it is also saved there
FEWEST = 12  # updates: made however late it is, and what the first plan goes by
# Shares of the clock at which a stage must be over. Text and vocabulary come first and take what they take; the last
# share is for the report.
PRETRAINED_BY, FINETUNED_BY = 0.74, 0.86


class Run(CurveTraining):
    """The training of a model of MODELS.

    Args:
        measures: of a validation, by fairseq's names.
        clock: kept with each checkpoint.
        total: updates at most.
    """

    def __init__(self, name: str, command: list[str], folder: Path, measures: Sequence[str], clock: Clock, total: int):
        super().__init__(name, command, folder, total)
        self.measures = measures
        self.clock = clock

    def plan(self, total: int) -> None:
        """The learning rate is to be zero after `total` updates."""
        self.total = total
        self.trainer.lr_scheduler.cfg.max_update = total
        self.trainer.lr_step_update()

    def measure(self) -> dict[str, float]:
        """The measures on all that is held out."""
        found = self.evaluate()
        return {measure: float(found[measure]) for measure in self.measures}

    def is_due(self) -> bool:
        return self.updates - self.curve["updates"][-1] >= self.total / VALIDATIONS

    def save(self, with_optimizer: bool = True) -> None:
        super().save(with_optimizer)
        self.clock.keep()


def pretrain(settings: DemoSettings, data: Path, folder: Path, clock: Clock) -> list[Run]:
    """Pre-trains all MODELS, or resumes; each has its checkpoints in `folder`/NAME."""
    most = settings.updates
    runs = [
        Run(name, settings.pretraining_command(name, data), folder / name, ("loss", "accuracy"), clock, most)
        for name in MODELS
    ]
    _train_until("pre-training", runs, most, clock, PRETRAINED_BY)
    return runs


def finetune(settings: DemoSettings, task: Path, pretrained: Path, folder: Path, clock: Clock) -> list[Run]:
    """Fine-tunes the models on the acceptability task, or resumes; each has its checkpoints in `folder`/NAME."""
    runs = []
    for name in MODELS:
        command = settings.finetuning_command(name, task, pretrained / name / "checkpoint_last.pt")
        runs.append(Run(name, command, folder / name, ("matthews",), clock, settings.finetuning_updates))
    _train_until("fine-tuning", runs, settings.finetuning_updates, clock, FINETUNED_BY)
    return runs


def _train_until(stage: str, runs: list[Run], most: int, clock: Clock, until: float) -> None:
    """Trains all to the same number of updates: `most`, or as many as fit until this share of the clock.

    How many fit is asked anew after every turn, for a machine may become slow halfway; the learning rate follows, and
    ends at zero at any pace.
    """
    if any(run.updates for run in runs):
        print(f"Resuming {stage} at {', '.join(f'{run.name}: update {run.updates}' for run in runs)}.")
    for run in runs:
        if not run.curve:
            run.validate()
    began = clock.seconds - sum(sum(run.seconds) for run in runs)
    with tqdm(initial=sum(run.updates for run in runs), desc=stage, unit=" updates") as progress:

        def plan() -> None:
            made = [run.updates for run in runs]
            if min(made) < max(made) and progress.total:
                return
            last_validations = sum(run.validation_seconds for run in runs)
            total = _updates_that_fit(made, most, clock.seconds - began, clock.left(until) - last_validations)
            progress.total = total * len(runs)
            for run in runs:
                run.plan(total)

        train_in_turn(runs, progress, plan)
    for run in runs:
        run.validate()
        run.save()


def _updates_that_fit(made: list[int], most: int, spent: float, left: float) -> int:
    """Updates of each model in all, by the time that those made so far took.

    Args:
        made: updates of each model.
        most: the answer is never more.
        spent: seconds that `made` took together.
        left: seconds from now.
    """
    if min(made) < FEWEST:
        return max(max(made), min(most, FEWEST)) if left <= 0 else most
    turns = left * sum(made) / (len(made) * max(spent, 1e-9))
    return int(max(max(made), min(most, max(made) + turns)))
