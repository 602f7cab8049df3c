"""The wall time that a whole demo may take, over all its starts."""

import math
import os
import time
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Optional

from lazyformer_fairseq.storage.json_files import read_json, write_json


class Clock:
    """Goes on from what `path` has, so that a demo that is stopped and run again gets no more time than another.

    Args:
        minutes: of the whole; None for no limit.
        path: of the JSON file that keeps the time; what passes after :meth:`keep` and before a kill is not counted.
        spent: seconds that count already.
    """

    def __init__(self, minutes: Optional[float], path: Path, spent: float = 0.0):
        self._limit = math.inf if minutes is None else 60 * minutes
        self._path = path
        kept = read_json(path)["seconds"] if path.exists() else 0.0
        self._began = monotonic() - kept - spent

    @property
    def seconds(self) -> float:
        """That have passed."""
        return monotonic() - self._began

    def left(self, share: float) -> float:
        """Seconds until this share of the whole has passed; infinite without a limit, negative afterwards."""
        return share * self._limit - self.seconds

    def keep(self) -> None:
        write_json(self._path, {"seconds": self.seconds})


def seconds_of_this_process() -> float:
    """Since it was started, imports and all; 0 where the system does not tell."""
    with suppress(OSError, AttributeError):  # elsewhere than on Linux
        ticks_after_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks_after_boot / os.sysconf("SC_CLK_TCK")
    return 0.0
