"""NaN, Inf and loss spikes: judges the numbers of each update, and decides what follows after bad ones.

An update is judged once its gradient has been summed over all processes, before the optimizer steps, so that a bad one
leaves weights and optimizer untouched. It counts as an update all the same: schedule, data and checkpoints continue as
without it. After many bad updates in a row the run goes back to a checkpoint, or stops.
"""

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, auto
from pathlib import Path
from statistics import median
from typing import Any, Optional

from lazyformer_fairseq.storage.json_files import write_json

RECENT = 100  # updates that the median loss is taken over
ENOUGH = 20  # updates before the median means something: in the first ones the loss falls fast
REPORT = "bad_updates.json"
MOST_SKIPPED = 10  # updates in a row

WHAT_TO_TRY = (
    "Read 'samples': a few batches alone point to bad data, ever new ones to the settings",
    "Lower --lr, lengthen --warmup-ratio, or set --clip-norm",
    "Train in bf16 (--bf16) rather than fp16, or in full precision, which has room for larger numbers",
    "Give --max-rollbacks a larger number and run the same command again: it resumes from the last checkpoint",
    "Copy an older checkpoint over checkpoint_last.pt; where losses rise before the first bad update, one from before",
    "Raise or leave out --loss-spike if the reason is a spike and the loss came down again by itself",
)


class BadUpdateError(Exception):
    """The numbers of an update cannot be trusted; raised before the optimizer steps."""


class Reaction(Enum):
    """The reaction to an update that was skipped."""

    CONTINUE = auto()
    ROLL_BACK = auto()
    STOP = auto()


@dataclass(frozen=True)
class SkippedUpdate:
    """An update that was skipped, for the report.

    Attributes:
        update: its number, from 1.
        epoch: the epoch that its data is from; None where nobody counts.
        reason: why it was skipped.
        loss: per prediction, in the report's unit; None where there was none.
        gradient_norm: before clipping.
        learning_rate: the learning rate that it would have had.
        samples: indices in the dataset, by batch.
    """

    update: int
    epoch: Optional[int]
    reason: str
    loss: Optional[float]
    gradient_norm: Optional[float]
    learning_rate: float
    samples: Sequence[Any]


class UpdateGuard:
    """Judge of the updates of one run. All processes of a run see the same numbers, so all decide the same.

    Args:
        max_in_a_row: bad updates in a row, after which the run goes back or stops.
        max_rollbacks: how often it goes back over the whole run.
        spike: the loss is bad above so many times its recent median; 0 for never.

    Attributes:
        skipped, rollbacks: counts over the whole run, saved with checkpoints.
        skipped_in_a_row: since the last good update or rollback.
        first_bad: the number of updates before the first of these.
        losses: the losses of the last good updates, in nats or the criterion's own unit.
        bad: the last bad updates, for the report.
    """

    def __init__(self, max_in_a_row: int = MOST_SKIPPED, max_rollbacks: int = 0, spike: float = 0.0):
        self.max_in_a_row = max_in_a_row
        self.max_rollbacks = max_rollbacks
        self.spike = spike
        self.skipped = 0
        self.skipped_in_a_row = 0
        self.rollbacks = 0
        self.first_bad = 0
        self.losses: deque[float] = deque(maxlen=RECENT)
        self.bad: deque[SkippedUpdate] = deque(maxlen=100)

    def judge(self, loss: Optional[float], gradient_norm: float) -> None:
        """Judge an update before the optimizer steps.

        Args:
            loss: per prediction; None where nothing was predicted.
            gradient_norm: the norm of the whole gradient.

        Raises:
            BadUpdateError: the optimizer must not step.
        """
        if not math.isfinite(gradient_norm):
            raise BadUpdateError("the gradient is NaN or Inf")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise BadUpdateError("the loss is NaN or Inf")
        knows_median = self.spike and len(self.losses) >= ENOUGH
        if knows_median and loss > self.spike * median(self.losses) > 0:
            raise BadUpdateError(f"the loss is more than --loss-spike {self.spike:g} times the recent median")

    def accept(self, loss: Optional[float]) -> None:
        """Count an update that was made."""
        self.skipped_in_a_row = 0
        if loss is not None:
            self.losses.append(loss)

    def skip(self, update: SkippedUpdate) -> Reaction:
        """Count an update that was skipped, and decide what follows."""
        if not self.skipped_in_a_row:
            self.first_bad = update.update - 1
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.bad.append(update)
        if self.skipped_in_a_row < self.max_in_a_row:
            return Reaction.CONTINUE
        if self.rollbacks < self.max_rollbacks:
            return Reaction.ROLL_BACK
        return Reaction.STOP

    def state_dict(self) -> dict[str, Any]:
        """Return what checkpoints keep."""
        return {"skipped": self.skipped, "rollbacks": self.rollbacks, "losses": list(self.losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what a checkpoint kept."""
        self.skipped = state["skipped"]
        self.rollbacks = state["rollbacks"]
        self.losses = deque(state["losses"], maxlen=RECENT)

    def write_report(
        self,
        folder: Path,
        bad_of_processes: Sequence[Sequence[SkippedUpdate]],
        losses: Sequence[float],
        unit: str,
    ) -> None:
        """Write ``bad_updates.json``.

        Args:
            folder: the folder of the run's checkpoints.
            bad_of_processes: the last bad updates, as each process has them: they differ in their samples alone.
            losses: the losses of the last good updates, in the unit.
            unit: the unit of losses, per unit of sample size, such as bits per masked token.
        """
        updates = [
            {**asdict(same_update[0]), "samples": [of_process.samples for of_process in same_update]}
            for same_update in zip(*bad_of_processes, strict=True)
        ]
        report = {
            "stopped_at_update": updates[-1]["update"],
            "reason": updates[-1]["reason"],
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "rollbacks": self.rollbacks,
            "max_skipped_updates": self.max_in_a_row,
            "max_rollbacks": self.max_rollbacks,
            "loss_spike": self.spike,
            "bad_updates": updates,
            "unit_of_losses": unit,
            "losses_of_last_good_updates": list(losses),
            "what_to_try": WHAT_TO_TRY,
        }
        # JSON has no NaN and no Inf: they become strings.
        content = json.loads(json.dumps(report), parse_constant=lambda word: str(float(word)))
        write_json(folder / REPORT, content)
