"""The progress of every command: a bar in a terminal; elsewhere, as in a log or a pipe, a line a minute."""

import sys
import time
from typing import Any, Optional

from tqdm import tqdm

SECONDS = 60.0  # between two lines
LINE = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt}{unit}, {elapsed} so far, {remaining} left{postfix}"
WITHOUT_TOTAL = "{desc}: {n_fmt}{unit}, {elapsed} so far{postfix}"


class Progress(tqdm):
    """tqdm's bar, by default of standard error; what takes less than a minute leaves no line."""

    def __init__(self, iterable: Any = None, *args: Any, **options: Any):
        self.is_bar = (options.get("file") or sys.stderr).isatty()
        self._said = time.monotonic()
        self._has_said = False
        if not self.is_bar:
            total = options.get("total") or (len(iterable) if hasattr(iterable, "__len__") else None)
            options.setdefault("bar_format", WITHOUT_TOTAL if total is None else LINE)
        super().__init__(iterable, *args, **options)
        # tqdm goes by the wall clock, which may jump: back by an hour, and a bar stands still for as long.
        self._time = time.monotonic
        self.last_print_t = self.start_t = self._time()

    def __str__(self) -> str:
        """Return the line, without the time left while nobody can tell it."""
        return super().__str__().replace(", ? left", "")

    def update(self, n: float = 1) -> Optional[bool]:
        """Count `n` more, or none, to show that time passes: tqdm would not count that, and say that little is left."""
        if n or self.disable:
            return super().update(n)
        return self.refresh()

    def display(self, msg: Optional[str] = None, pos: Optional[int] = None) -> None:
        """Show the line, once a minute where this is no bar."""
        if self.is_bar:
            super().display(msg, pos)
        elif time.monotonic() - self._said >= SECONDS:
            self._say()

    def clear(self, *args: Any, **options: Any) -> None:
        """Make place for another line; lines need none."""
        if self.is_bar:
            super().clear(*args, **options)

    def close(self) -> None:
        """Say where it ended, if it has said anything."""
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
