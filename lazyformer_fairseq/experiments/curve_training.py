"""Trainings that keep a curve of validations, and take turns update by update, so that their times compare.

One process, one machine state: what slows one model down for a moment slows the others too.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic

from tqdm import tqdm

from lazyformer_fairseq.measure.stepwise import StepwiseTraining


class CurveTraining(StepwiseTraining):
    """A training of known length whose validations make a curve, kept with its checkpoints.

    Args:
        name: for progress bars.
        total: updates, unless they are planned anew.

    Attributes:
        curve: by validation, lists: `updates`, `seconds` (of training alone), and what else is measured.
        validation_seconds: of the last validation since the start.
    """

    def __init__(self, name: str, command: list[str], folder: Path, total: int):
        super().__init__(command, folder)
        self.name = name
        self.total = total
        self.validation_seconds = 0.0
        points = self._kept("curve", {})
        here = sum(updates <= self.updates for updates in points.get("updates", ()))
        self.curve: dict[str, list[float]] = {of: values[:here] for of, values in points.items() if here}

    @abstractmethod
    def measure(self) -> Mapping[str, float]:
        """What a point of the curve has beside updates and seconds; the first is shown as progress."""

    @abstractmethod
    def is_due(self) -> bool:
        """Whether it is to be validated and saved after this update."""

    @property
    def share_done(self) -> float:
        return self.updates / self.total

    def validate(self) -> None:
        """Adds a point to the curve, unless it has one of this update."""
        if self.curve and self.curve["updates"][-1] == self.updates:
            return
        began = monotonic()
        point = {"updates": self.updates, "seconds": sum(self.seconds), **self.measure()}
        for name, value in point.items():
            self.curve.setdefault(name, []).append(value)
        self.validation_seconds = monotonic() - began

    def save(self, with_optimizer: bool = True) -> None:
        """Also keeps the curve."""
        self._keep("curve", self.curve)
        super().save(with_optimizer)


def train_in_turn(
    trainings: Sequence[CurveTraining], progress: tqdm, plan: Callable[[], object] = lambda: None
) -> None:
    """Trains all to their ends; the one farthest behind is next, so that equal totals mean strict turns.

    Args:
        progress: counts updates.
        plan: called before every update; may change totals.
    """
    for training in trainings:
        if not training.curve:
            training.validate()
    progress.unpause()  # else the time left would begin with that of these validations for every update
    while True:
        plan()
        behind = min(trainings, key=lambda training: training.share_done)
        if behind.updates >= behind.total:
            break
        behind.update()
        progress.update()
        if behind.is_due():
            behind.validate()
            behind.save()
            progress.unpause()
            progress.set_postfix_str(", ".join(f"{each.name} {_shown(each.curve)}" for each in trainings))


def _shown(curve: Mapping[str, Sequence[float]]) -> str:
    measure = next(name for name in curve if name not in ("updates", "seconds"))
    return f"{curve[measure][-1]:.2f}"
