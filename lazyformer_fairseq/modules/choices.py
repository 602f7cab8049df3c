"""What is chosen by time, where the run is: the fastest of several ways to compute the same.

The first use of a shape times the ways that there are. What was chosen is kept in the user's cache folder, by machine
and shape, so that the next run need not time it; and in the checkpoint, so that a resumed run rounds as before.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.processor import device_kind
from lazyformer_fairseq.storage.checked import as_kind
from lazyformer_fairseq.storage.json_files import remembered

logger = logging.getLogger(__name__)

FILE = "fastest.json"  # in the cache folder
SECONDS = 2.0  # of a process, for all that it times, and
SHARE_OF_TIME = 0.05  # of what it has run so far
ROUNDS, ROUNDS_OF_NEAR, MOST_ROUNDS = 4, 8, 50  # each one's fastest counts
HOPELESS, NEAR = 1.25, 1.1  # times the fastest: not timed again; timed in more rounds
ENOUGH = 0.02  # seconds of calls of each: shorter ones say little, as noise may double them
LONG = 1.0  # seconds, beside which what the first call prepares does not count: oneDNN's code, new memory
# Between two ways, by rounding: relative, by norm.
LARGEST_ERROR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

# From the name of a way to what is timed; it returns all outputs and gradients.
Timed = Callable[[str], Callable[[], Sequence[Tensor]]]


class Choices:
    """What this process has chosen, by shape, and what it may still time.

    A training times a shape when it first sees it, for at most :data:`SECONDS` and :data:`SHARE_OF_TIME` of its time so
    far, what a GPU's compilers take not counted; inference when it has seen it so often that this takes a twentieth of
    its time. What a checkpoint or the cache folder knows is taken. Of several processes the first one times, and tells
    the others; these take what they would unmeasured until then.

    Attributes:
        known: by machine and shape, the names of the fastest.
        measures: whether this process times anything, and asks the cache folder.
        waits: whether inference waits until it pays; else it times as training does.
        seconds: for all that it times; :data:`SHARE_OF_TIME` adds to them.
    """

    def __init__(self) -> None:
        self.known: dict[str, dict[str, str]] = {}
        self.measures = self.waits = True
        self.seconds = SECONDS
        self._seen: Counter[str] = Counter()
        self._began, self._spent, self._compiled = time.monotonic(), 0.0, 0.0

    def at_once(self) -> None:
        """For those who measure what is chosen: every shape is timed when it is first seen."""
        self.waits, self.seconds = False, math.inf

    def known_of(self, device: str, shape: str) -> str | None:
        """The fastest, where this process knows it."""
        here = machine(device)
        if here not in self.known:
            for other in self.known:
                logger.info("the fastest ways were chosen on %s; this is %s, which chooses anew", other, here)
            self.known[here] = {}
        return self.known[here].get(shape)

    def pays(self, shape: str, is_training: bool, candidates: int, uses: int = 1) -> bool:
        """Whether to time a shape now; each call is a use of it.

        Args:
            uses: in a pass, each as long as a timed call.
        """
        if not self.measures:
            return False
        if is_training or not self.waits:
            return self._spent - self._compiled < self.seconds + SHARE_OF_TIME * (time.monotonic() - self._began)
        self._seen[shape] += 1
        return self._seen[shape] > candidates * (1 + ROUNDS_OF_NEAR) / uses / SHARE_OF_TIME

    def choose(self, device: str, shape: str, names: Sequence[str], timed: Timed, largest_error: float) -> str:
        """The fastest of `names`, timed now or by an earlier process; the first one where all fail."""
        try:
            measure = partial(self._fastest, shape, names, timed, largest_error)
            found = remembered(FILE, machine(device), shape, measure, is_valid=names.__contains__)
        except _UnsureError as error:
            found = error.name or names[0]
        self.known[machine(device)][shape] = found
        return found

    def _fastest(self, shape: str, names: Sequence[str], timed: Timed, largest_error: float) -> str:
        """Times them in turn, in a thread, which escapes the caller's autograd, FLOP counter and transforms."""
        start, spent = time.monotonic(), self._spent
        # A thread starts on the first GPU.
        here = (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_initialized() else (None, ())
        with ThreadPoolExecutor(1, "", *here) as thread:
            seconds = thread.submit(self._seconds, names, timed, largest_error).result()
        self._spent = spent + time.monotonic() - start
        ordered = sorted((name for name in seconds if seconds[name] < math.inf), key=seconds.get)
        if ordered:
            figures = ", ".join(f"{name} {1000 * seconds[name]:.3g} ms" for name in ordered)
            logger.info("fastest for %s: %s", shape.partition(":")[0], figures)
        if not ordered or len(seconds) < min(2, len(names)):
            raise _UnsureError(name="".join(ordered[:1]))
        return ordered[0]

    def _seconds(self, names: Sequence[str], timed: Timed, largest_error: float) -> dict[str, float]:
        """The fastest call of each, without those that time did not suffice for; those far behind are called once.

        Infinite for those that fail here, or compute something else than the first one.
        """
        things: dict[str, Callable[[], Sequence[Tensor]]] = {}
        seconds: dict[str, float] = {}
        start, expected = self._clock(), None
        for name in names:
            if self._clock() - start > SECONDS:
                break
            try:
                things[name] = timed(name)
                first, found = self._call(things[name])  # prepares: torch, MKL and Triton
                if torch.cuda.is_initialized():  # what compilers take counts for nobody
                    start, self._compiled, first = start + first, self._compiled + first, 0.0
                expected = found if expected is None else expected
                if (error := difference(found, expected)) > largest_error:
                    raise ValueError(f"it is off by {error:.2g} of what it should be")
                seconds[name] = first if first > LONG else self._call(things[name])[0]
            except Exception as error:  # a kernel may fail in any way on a device that is new to it
                logger.warning("%s is left out here: %s", name, str(error).partition("\n")[0])
                seconds[name] = math.inf
        taken = Counter(seconds)
        for turn in range(1, MOST_ROUNDS):
            share = HOPELESS if turn < ROUNDS else NEAR if turn < ROUNDS_OF_NEAR else 0
            likely = [name for name in seconds if seconds[name] < share * min(seconds.values())]
            likely = likely if turn < ROUNDS or len(likely) > 1 else []  # who is alone has won
            again = [name for name in seconds if name in likely or taken[name] < ENOUGH]
            for name in again:
                if self._clock() - start > SECONDS:
                    return seconds
                found = self._call(things[name])[0]
                taken[name] += found
                seconds[name] = min(seconds[name], found)
        return seconds

    def _call(self, thing: Callable[[], Sequence[Tensor]]) -> tuple[float, Sequence[Tensor]]:
        """What it took, and what it returned."""
        start = self._clock()
        found = thing()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return self._clock() - start, found

    def _clock(self) -> float:
        """Seconds, without those spent on choosing meanwhile: a block that is timed multiplies matrices itself."""
        return time.perf_counter() - self._spent

    def state_dict(self) -> dict[str, dict[str, str]]:
        """For a checkpoint, and for other processes."""
        return {here: dict(shapes) for here, shapes in self.known.items()}

    def load_state_dict(self, state: Any) -> dict[str, dict[str, str]]:
        """Takes what :meth:`state_dict` returned, on a machine like this; on another one it chooses anew.

        Returns:
            The same; nothing where the state is anything else, as in a damaged checkpoint: no run ends for what it can
            time again.
        """
        try:
            checked = as_kind(dict[str, dict[str, str]], state, "the choices in the checkpoint", "they are made anew")
        except UserError as error:
            logger.warning("%s", error)
            return {}
        for here, shapes in checked.items():
            self.known.setdefault(here, {}).update(shapes)
        return checked


class _UnsureError(AttributeError):
    """Less than two were timed: not to be remembered. Its `name` is that of one that was; empty for none."""


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error among the tensors, by norm; NaN counts as infinite."""
    pairs = [(one.float(), other.float()) for one, other in zip(found, expected, strict=True)]
    errors = [((one - other).norm() / other.norm().clamp(min=1e-6)).nan_to_num(nan=math.inf) for one, other in pairs]
    return max((error.item() for error in errors), default=0.0)


CHOICES = Choices()


def machine(device: str) -> str:
    """What a choice holds for, besides the shape."""
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    return f"{device_kind(device)}, torch {torch.__version__}{threads}"


def half_octaves(size: float) -> float:
    """The size in steps of half an octave, as choices hold for those near it."""
    return 2 ** (round(2 * math.log2(size)) / 2)
