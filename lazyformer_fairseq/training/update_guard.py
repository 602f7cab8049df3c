"""Protection against NaN, Inf and loss spikes: bad updates are skipped, and too many cause a rollback or a stop.

An update is checked after its gradient has been summed over all processes and before the optimizer steps, so a bad
update leaves the weights and the optimizer untouched. It still counts as an update: the schedule, the data and the
checkpoints continue as usual. After many bad updates in a row, the run rolls back to a checkpoint or stops.
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

RECENT = 100  # number of updates to compute the median loss over
ENOUGH = 20  # number of updates before the median is used, because the loss falls quickly at first
REPORT = "bad_updates.json"
MOST_SKIPPED = 10  # default number of skipped updates in a row after which the run rolls back or stops

WHAT_TO_TRY = (
    "Compare 'samples': if the same few batches recur, the data is bad; if not, check the settings",
    "Lower --lr, raise --warmup-ratio, or set --clip-norm",
    "Train in bf16 (--bf16) or full precision instead of fp16; both can represent larger numbers",
    "Raise --max-rollbacks and rerun the same command, which resumes from the last checkpoint",
    "Replace checkpoint_last.pt with a copy of a checkpoint from before the losses began to rise",
    "Raise or remove --loss-spike if the reason is a spike from which the loss recovered by itself",
)


class BadUpdateError(Exception):
    """Raised before the optimizer steps if an update's loss or gradient cannot be trusted."""


class Reaction(Enum):
    """The run's reaction to a skipped update."""

    CONTINUE = auto()
    ROLL_BACK = auto()
    STOP = auto()


@dataclass(frozen=True)
class SkippedUpdate:
    """The report's entry for a skipped update.

    Attributes:
        update: the number of the update, from 1.
        epoch: the epoch of its data; None if epochs are not counted.
        reason: why the update was skipped.
        loss: the loss per prediction, in the report's unit; None if nothing was predicted.
        gradient_norm: the gradient norm before clipping.
        learning_rate: the learning rate that the update would have used.
        samples: the dataset indices of its samples, per batch.
    """

    update: int
    epoch: Optional[int]
    reason: str
    loss: Optional[float]
    gradient_norm: Optional[float]
    learning_rate: float
    samples: Sequence[Any]


class UpdateGuard:
    """A check on each of a run's updates. All processes see the same numbers, so they make the same decisions.

    Args:
        max_in_a_row: the number of bad updates in a row after which the run rolls back or stops.
        max_rollbacks: the number of rollbacks allowed in the whole run.
        spike: the multiple of the recent median loss above which a loss is bad; 0 disables this check.

    Attributes:
        skipped, rollbacks: counts over the whole run, saved with checkpoints.
        skipped_in_a_row: the number of updates skipped since the last good update or rollback.
        first_bad: the number of updates before the first of those counted in `skipped_in_a_row`.
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
        """Check an update before the optimizer steps.

        Args:
            loss: the loss per prediction; None if nothing was predicted.
            gradient_norm: the norm of the whole gradient.

        Raises:
            BadUpdateError: the update is bad, so the optimizer must not step.
        """
        if not math.isfinite(gradient_norm):
            raise BadUpdateError("the gradient is NaN or Inf")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise BadUpdateError("the loss is NaN or Inf")
        knows_median = self.spike and len(self.losses) >= ENOUGH
        if knows_median and loss > self.spike * median(self.losses) > 0:
            raise BadUpdateError(f"the loss is more than {self.spike:g} times the recent median (--loss-spike)")

    def accept(self, loss: Optional[float]) -> None:
        """Record a good update and its loss, if any."""
        self.skipped_in_a_row = 0
        if loss is not None:
            self.losses.append(loss)

    def skip(self, update: SkippedUpdate) -> Reaction:
        """Record a skipped update and decide how the run continues."""
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
        """Return the state to store in checkpoints."""
        return {"skipped": self.skipped, "rollbacks": self.rollbacks, "losses": list(self.losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
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
            bad_of_processes: the last bad updates, per process; the lists differ only in their samples.
            losses: the losses of the last good updates, in `unit`.
            unit: the unit of the losses, such as bits per masked token.
        """
        updates = []
        for same_update in zip(*bad_of_processes, strict=True):
            samples = [of_process.samples for of_process in same_update]
            updates.append({**asdict(same_update[0]), "samples": samples})
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
        # JSON has neither NaN nor Inf, so they become strings.
        content = json.loads(json.dumps(report), parse_constant=lambda word: str(float(word)))
        write_json(folder / REPORT, content)
