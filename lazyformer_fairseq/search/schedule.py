"""The search's timetable: temperature, the first architecture stage, the end."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """PAR Transformer, section 2.2; the temperature is FBNet's, which the paper follows.

    Attributes:
        constant_updates: of weights alone, before the first architecture stage.
        max_updates: of both kinds together.
        temperature: of the Gumbel-softmax at first.
        final_temperature: at `max_updates`.
        unchanged_share: of an architecture stage's updates; this many in a row without a new pattern end the search.
    """

    constant_updates: int = 10_000
    max_updates: int = 50_000
    temperature: float = 5.0
    final_temperature: float = 0.087
    unchanged_share: float = 0.75

    def temperature_at(self, update: int) -> float:
        """Constant while the architecture is, then exponential decay."""
        decaying = self.max_updates - self.constant_updates
        share = max(update - self.constant_updates, 0) / decaying
        return self.temperature * (self.final_temperature / self.temperature) ** share

    def is_converged(self, unchanged: int, stage_updates: int) -> bool:
        """Whether `unchanged` architecture updates in a row suffice; a stage has `stage_updates`."""
        return unchanged >= self.unchanged_share * stage_updates

    def first_architecture_update(self, weights_updates: int) -> int:
        """Weights updates before the first architecture update; a stage of weights has `weights_updates`."""
        stages = -(-self.constant_updates // weights_updates)
        return max(stages, 1) * weights_updates
