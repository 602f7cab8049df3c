"""Progress reporting for all commands: a bar in a terminal, or one line per minute in a log or pipe."""

import sys
import time
from typing import Any, Optional

from tqdm import tqdm

SECONDS = 60.0  # between two log lines
LINE = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt}{unit}, {elapsed} so far, {remaining} left{postfix}"
WITHOUT_TOTAL = "{desc}: {n_fmt}{unit}, {elapsed} so far{postfix}"


class Progress(tqdm):
    """A tqdm bar, on standard error by default, that prints lines instead if the output is not a terminal.

    If the work takes less than a minute, no lines are printed.
    """

    def __init__(self, iterable: Any = None, *args: Any, **options: Any):
        self.is_bar = (options.get("file") or sys.stderr).isatty()
        self._said = time.monotonic()
        self._has_said = False
        if not self.is_bar:
            total = options.get("total") or (len(iterable) if hasattr(iterable, "__len__") else None)
            options.setdefault("bar_format", WITHOUT_TOTAL if total is None else LINE)
        super().__init__(iterable, *args, **options)
        # By default, tqdm uses the wall clock, and its bar would freeze for an hour if the clock were set back an hour.
        self._time = time.monotonic
        self.last_print_t = self.start_t = self._time()

    def __str__(self) -> str:
        """Return the progress line, omitting the remaining time while it is unknown."""
        return super().__str__().replace(", ? left", "")

    def update(self, n: float = 1) -> Optional[bool]:
        """Advance by `n`; 0 only refreshes the display.

        tqdm ignores updates by 0 and would therefore underestimate the remaining time.
        """
        if n or self.disable:
            return super().update(n)
        return self.refresh()

    def display(self, msg: Optional[str] = None, pos: Optional[int] = None) -> None:
        """Show the progress: redraw the bar, or print a line if the last one is a minute old."""
        if self.is_bar:
            super().display(msg, pos)
        elif time.monotonic() - self._said >= SECONDS:
            self._say()

    def clear(self, *args: Any, **options: Any) -> None:
        """Clear the bar so that other output can be printed; lines need no clearing."""
        if self.is_bar:
            super().clear(*args, **options)

    def close(self) -> None:
        """Close the bar, or print a final line if any line has been printed."""
        if self.is_bar or self.disable:
            super().close()
            return
        self.disable = True
        self._decr_instances(self)
        if self._has_said:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        self._has_said = True
        print(self, file=self.fp, flush=True)
