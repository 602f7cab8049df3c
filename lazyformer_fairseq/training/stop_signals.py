"""SIGTERM, SIGUSR1 and Ctrl-C ask a run to save and end with exit code 75, or 130 after Ctrl-C.

A signal's handler only takes a note. The run looks at it between updates, and its processes agree, so that all save and
end after the same update. Another signal changes nothing; a Ctrl-C after any other signal ends the process at once.
Imports no torch, so that command lines can read the exit codes.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
INTERRUPTED = 128 + signal.SIGINT  # 130, as shells have it for a process that Ctrl-C ended
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
MANY = 2.0**20  # a Ctrl-C in the sum of signals: more than there are processes


class StopRequest:
    """The note that a process takes of signals, and what all processes of its run agree on.

    Attributes:
        signal: the first signal that this process received; None for none.
    """

    def __init__(self) -> None:
        self.signal: Optional[signal.Signals] = None
        self._handlers: dict[int, Any] = {}  # what stood there before
        self._agreed = 0.0

    def listen(self) -> None:
        """Take the signals over, from the main thread; Python delivers them to no other."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) == signal.SIG_IGN:  # as whoever started this process wants it
                continue
            before = signal.signal(number, self._hear)
            earlier = getattr(before, "__self__", None)  # of an earlier run in the same process
            self._handlers[number] = earlier._handlers[number] if isinstance(earlier, StopRequest) else before

    def restore(self) -> None:
        """Give the signals back, where this object still has them."""
        for number, handler in self._handlers.items():
            if getattr(signal.getsignal(number), "__self__", None) is self or self.signal is not None:
                signal.signal(number, handler)

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Hear signals within a block."""
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
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next Ctrl-C need not wait for Python
        if number == signal.SIGINT:
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Tell the terminal that a Ctrl-C was heard."""
        os.write(
            2,
            f"\nCtrl-C: the run saves after this {self._under_way()} and ends; once more ends it at once\n".encode(),
        )

    def _under_way(self) -> str:
        return "update"

    def note(self) -> float:
        """Return this process's part of the sum that :meth:`agree` takes."""
        if self.signal is None:
            return 0.0
        if self.signal == signal.SIGINT:
            return MANY
        return 1.0

    def agree(self, asked: float) -> None:
        """Take the sum of all processes' notes."""
        self._agreed = asked

    def agreed_code(self) -> int:
        """Return the exit code that all processes end with; 0 as long as none was sent a signal."""
        if not self._agreed:
            return 0
        if self._agreed >= MANY:
            return INTERRUPTED
        return EXIT_CODE
