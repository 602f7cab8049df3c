"""Graceful stops: on SIGTERM, SIGUSR1 or Ctrl-C, a run saves a checkpoint and exits with code 75 (130 for Ctrl-C).

The signal handler only records the signal. Between updates, the run's processes agree on whether to stop, so all of
them save and exit after the same update. Later signals are ignored, except Ctrl-C, which then ends the process
immediately. This module does not import torch, so command-line code can import the exit codes quickly.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

EXIT_CODE = 75  # EX_TEMPFAIL in sysexits.h: try again later
INTERRUPTED = 128 + signal.SIGINT  # 130, the shell's exit code for a process ended by Ctrl-C
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
MANY = 2.0**20  # a Ctrl-C's contribution to the sum over processes; it exceeds any possible number of processes


class StopRequest:
    """A stop request: the signal received by this process, and the request that all of the run's processes agreed on.

    Attributes:
        signal: the first signal received by this process; None if it has received none.
    """

    def __init__(self) -> None:
        self.signal: Optional[signal.Signals] = None
        self._handlers: dict[int, Any] = {}  # the previous handlers
        self._agreed = 0.0

    def listen(self) -> None:
        """Install the signal handlers, except outside the main thread, where Python would raise an error."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_IGN:  # the parent process wants this signal ignored
                continue
            before = signal.signal(number, self._on_signal)
            earlier = getattr(before, "__self__", None)  # an earlier run in the same process may have set the handler
            if isinstance(earlier, StopRequest):
                before = earlier._handlers[number]
            self._handlers[number] = before

    def restore(self) -> None:
        """Restore the previous signal handlers, unless other code has replaced this object's handlers since."""
        for number, handler in self._handlers.items():
            is_own = getattr(signal.getsignal(number), "__self__", None) is self
            if is_own or self.signal is not None:
                signal.signal(number, handler)

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Handle signals within a ``with`` block."""
        self.listen()
        try:
            yield self
        finally:
            self.restore()

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            return
        self.signal = signal.Signals(number)
        if signal.SIGINT in self._handlers:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next Ctrl-C works even while Python code is blocked
        if number == signal.SIGINT:
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Confirm a Ctrl-C on the terminal."""
        os.write(
            2,
            f"\nCtrl-C: saving and exiting after this {self._under_way()}; press again to exit immediately\n".encode(),
        )

    def _under_way(self) -> str:
        return "update"

    def note(self) -> float:
        """Return this process's contribution to the sum passed to :meth:`agree`."""
        if self.signal is None:
            return 0.0
        if self.signal == signal.SIGINT:
            return MANY
        return 1.0

    def agree(self, asked: float) -> None:
        """Store the sum of :meth:`note` over all processes."""
        self._agreed = asked

    def agreed_code(self) -> int:
        """Return the exit code for all processes, or 0 if no process has received a signal."""
        if not self._agreed:
            return 0
        if self._agreed >= MANY:
            return INTERRUPTED
        return EXIT_CODE
