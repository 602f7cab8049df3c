"""A run of several phases, such as PAR BERT's of 128 and of 512 tokens, as one history.

Each phase has a folder of its own, ``phase1``, ``phase2``, ..., and counts its updates from zero.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Optional, Union

import numpy as np

from lazyformer_fairseq.experiments.curves.history import History, read_history

FOLDERS = "phase[0-9]*"
NUMBER = re.compile(r"phase(\d+)")


def phase_of(log: Path) -> int:
    """The number of the phase by the log's folder; 0 for a run of one."""
    found = NUMBER.fullmatch(log.absolute().parent.name)
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class Phases:
    """Several histories, one after the other. What is not described here is as in :class:`History`.

    Attributes:
        parts: in their order. Arch, pattern and task are those of the first.
    """

    parts: tuple[History, ...]

    @property
    def arch(self) -> str:
        return self.parts[0].arch

    @property
    def task(self) -> str:
        return self.parts[0].task

    @property
    def pattern(self) -> str:
        return self.parts[0].pattern

    @property
    def measure(self) -> str:
        return self.parts[0].measure

    @property
    def why_no_flops(self) -> str:
        return next(filter(None, (part.why_no_flops for part in self.parts)), "")

    @cached_property
    def starts(self) -> list[int]:
        """Updates before each part."""
        return [0, *accumulate(part.last_update for part in self.parts[:-1])]

    @property
    def borders(self) -> list[int]:
        """Updates at which a phase ends and another begins."""
        return self.starts[1:]

    @property
    def last_update(self) -> int:
        return self.starts[-1] + self.parts[-1].last_update

    @property
    def losses(self) -> Mapping[int, float]:
        return self._joined([part.losses for part in self.parts])

    @property
    def training(self) -> Mapping[int, float]:
        return self._joined([part.training for part in self.parts])

    @property
    def splits(self) -> Mapping[str, Mapping[int, float]]:
        names = dict.fromkeys(name for part in self.parts for name in part.splits)
        return {name: self._joined([part.splits.get(name, {}) for part in self.parts]) for name in names}

    def _joined(self, losses_of_parts: Sequence[Mapping[int, float]]) -> dict[int, float]:
        """Without what is measured before a phase's first update: it would stand where the phase before it ends."""
        return {
            start + updates: loss
            for start, losses in zip(self.starts, losses_of_parts, strict=True)
            for updates, loss in losses.items()
            if updates or not start
        }

    def at(self, axis: str, updates: Iterable[int]) -> np.ndarray:
        """As :meth:`History.at`: what all earlier phases took, and what the phase of an update took by then."""
        wanted = np.array(list(updates), dtype=float)
        total = np.zeros(len(wanted))
        for start, part in zip(self.starts, self.parts, strict=True):
            within = wanted - start if part is self.parts[-1] else np.minimum(wanted - start, part.last_update)
            total += np.where(within > 0, part.at(axis, np.maximum(within, 0)), 0)
        return total


def read_phases(logs: Sequence[Path]) -> Union[History, Phases]:
    """Reads the logs of one run: of one phase, or of several, each in the order in which they were written.

    Raises:
        UserError: a log cannot be read.
    """
    parts = [read_history(list(same)) for _, same in groupby(sorted(logs, key=phase_of), key=phase_of)]
    return parts[0] if len(parts) == 1 else Phases(tuple(parts))


def logs_of_phases(folder: Path) -> Optional[list[Path]]:
    """The logs in a folder's ``phase1``, ``phase2``, ...; None where it has no such folders with logs."""
    return list(folder.glob(f"{FOLDERS}/*.log")) or None
