"""The wall time that a whole demo may take, over all its starts."""

import math
from pathlib import Path
from time import monotonic
from typing import Optional

from lazyformer_fairseq.files.json_files import read_json, write_json


class Clock:
    """Goes on from what `path` has, so that a demo that is stopped and run again gets no more time than another.

    Args:
        minutes: of the whole; None for no limit.
        path: of the JSON file that keeps the time; what passes after :meth:`keep` and before a kill is not counted.
    """

    def __init__(self, minutes: Optional[float], path: Path):
        self._limit = math.inf if minutes is None else 60 * minutes
        self._path = path
        kept = read_json(path)["seconds"] if path.exists() else 0.0
        self._began = monotonic() - kept

    @property
    def seconds(self) -> float:
        """That have passed."""
        return monotonic() - self._began

    def left(self, share: float) -> float:
        """Seconds until this share of the whole has passed; infinite without a limit, negative afterwards."""
        return share * self._limit - self.seconds

    def keep(self) -> None:
        write_json(self._path, {"seconds": self.seconds})
