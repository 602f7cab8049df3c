"""The usual loss: the median over recent updates."""

from collections import deque
from collections.abc import Iterable
from statistics import median

RECENT = 100  # updates that the median is taken over
ENOUGH = 20  # updates before the median means something: in the first ones the loss falls fast


class LossHistory:
    """Losses of the last good updates, in the criterion's own unit.

    Args:
        spike: a loss of more than this many times their median is a spike; 0 for never.
    """

    def __init__(self, spike: float):
        self.spike = spike
        self.losses: deque[float] = deque(maxlen=RECENT)

    def is_spike(self, loss: float) -> bool:
        if not self.spike or len(self.losses) < ENOUGH:
            return False
        return loss > self.spike * median(self.losses) > 0

    def add(self, loss: float) -> None:
        self.losses.append(loss)

    def replace(self, losses: Iterable[float]) -> None:
        self.losses = deque(losses, maxlen=RECENT)
