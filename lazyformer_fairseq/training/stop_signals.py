"""Stop requests by signal: SIGTERM, SIGUSR1 and Ctrl-C make a run save and end with exit code 75 (130 for Ctrl-C).

The signal handler only records the signal. The run checks it between updates, and its processes agree on it, so that
all of them save and end after the same update. Further signals change nothing, except that Ctrl-C then ends the process
at once. This module does not import torch, so that command-line code can import the exit codes quickly.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
INTERRUPTED = 128 + signal.SIGINT  # 130, the shell's exit code for a process that Ctrl-C ended
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
MANY = 2.0**20  # what a Ctrl-C adds to the sum over processes: more than the number of processes


class StopRequest:
    """The request to stop that this process received by a signal, and the one that all processes of the run agreed on.

    Attributes:
        signal: the first signal that this process received; None if it has received none.
    """

    def __init__(self) -> None:
        self.signal: Optional[signal.Signals] = None
        self._handlers: dict[int, Any] = {}  # the previous handlers
        self._agreed = 0.0

    def listen(self) -> None:
        """Install the signal handlers; does nothing outside the main thread, the only one that Python lets do so."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_IGN:  # whoever started this process wants the signal ignored
                continue
            before = signal.signal(number, self._hear)
            earlier = getattr(before, "__self__", None)  # an earlier run in the same process may have set the handler
            self._handlers[number] = earlier._handlers[number] if isinstance(earlier, StopRequest) else before

    def restore(self) -> None:
        """Restore the previous signal handlers, unless others have replaced this object's since."""
        for number, handler in self._handlers.items():
            if getattr(signal.getsignal(number), "__self__", None) is self or self.signal is not None:
                signal.signal(number, handler)

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Handle signals within a ``with`` block."""
        self.listen()
        try:
            yield self
        finally:
            self.restore()

    def _hear(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            return
        self.signal = signal.Signals(number)
        if signal.SIGINT in self._handlers:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next Ctrl-C works even if Python code is blocked
        if number == signal.SIGINT:
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Confirm a Ctrl-C on the terminal."""
        os.write(
            2,
            f"\nCtrl-C: the run saves and ends after this {self._under_way()}; press again to end at once\n".encode(),
        )

    def _under_way(self) -> str:
        return "update"

    def note(self) -> float:
        """Return this process's summand of the sum that :meth:`agree` takes."""
        if self.signal is None:
            return 0.0
        if self.signal == signal.SIGINT:
            return MANY
        return 1.0

    def agree(self, asked: float) -> None:
        """Store the sum over all processes of :meth:`note`."""
        self._agreed = asked

    def agreed_code(self) -> int:
        """Return the exit code with which all processes must end, or 0 if no process has received a signal."""
        if not self._agreed:
            return 0
        if self._agreed >= MANY:
            return INTERRUPTED
        return EXIT_CODE
