"""The trainings of a comparison: who, with which seed and rate, how long, and in which folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.experiments.compare.contestants import Contestant
from lazyformer_fairseq.storage.json_files import read_json

RESULT, LOG, CHECKPOINT = "result.json", "train.log", "checkpoint_last.pt"


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        entry: of the results, such as ``mine@0.7``.
        folder: for its checkpoint, curve and result.
    """

    entry: str
    contestant: Contestant
    seed: int
    rate: float
    updates: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.entry}, seed {self.seed}, rate {self.rate:g}"

    def result(self) -> Optional[dict[str, Any]]:
        """What it came to; None until it is over. The file is written last and whole."""
        path = self.folder / RESULT
        return read_json(path) if path.exists() else None

    def updates_saved(self) -> int:
        """Of a training under way in another process."""
        curve = self.folder / "curve.json"
        return read_json(curve)["curve"]["updates"][-1] if curve.exists() else 0


@dataclass(frozen=True)
class Jobs:
    """Makes the jobs of a comparison.

    Attributes:
        folder: of the comparison.
        contestants: by name, their widths decided.
        entries: by entry, the model's name, and updates.
    """

    folder: Path
    contestants: Mapping[str, Contestant]
    entries: Mapping[str, tuple[str, int]]

    def run(self, entry: str, seed: int, rate: float) -> Job:
        name, updates = self.entries[entry]
        folder = self.folder / "runs" / f"{entry}-seed{seed}-rate{rate:g}"
        return Job(entry, self.contestants[name], seed, rate, updates, folder)

    def attempt(self, entry: str, seed: int, rate: float, updates: Optional[int]) -> Job:
        """A try of a rate; in full length it is the run of that seed and rate."""
        whole = self.run(entry, seed, rate)
        if updates is None or updates >= whole.updates:
            return whole
        folder = self.folder / "tries" / f"{entry}-rate{rate:g}"
        return Job(entry, whole.contestant, seed, rate, updates, folder)
