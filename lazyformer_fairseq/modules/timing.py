"""Selection by time: the fastest of several ways to compute the same, found where the run is.

The first use of a shape times the candidates. The result is kept in the user's cache folder, by machine and shape, so
that the next run need not time it, and in the checkpoint, so that a resumed run rounds as before.

Three things keep a selection trustworthy. Candidates take turns, and one of them wins only where it is ahead in most
rounds; otherwise the order in which the caller names them decides. On a busy machine that takes more rounds. And
a result goes into the cache folder only if the candidates could be told apart while no other program wanted the
processor.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.processor import device_key
from lazyformer_fairseq.storage.checked import as_type
from lazyformer_fairseq.storage.json_files import recall, remember

logger = logging.getLogger(__name__)

FILE = "fastest.json"  # in the cache folder
SECONDS = 2.0  # that the rounds of one selection may take, and that a process may spend on all of them in addition to
SHARE_OF_TIME = 0.05  # of the time since it started

MOST_SECONDS = 8.0  # that a selection may take with its first calls, and if a few rounds of long calls need more

SAMPLE = 0.004  # seconds that one sample takes at least; a candidate that is faster is called several times for it
FEWEST_ROUNDS = 4  # before a candidate may be given up on a quiet machine
HOPELESS = 1.25  # median ratio to the fastest from which a candidate is given up after so few rounds
TELLING_ROUNDS = 7  # after which a candidate that was slower in three quarters of them is given up
MOST_ROUNDS = 21
ALIKE = 1.02  # median ratio up to which it does not matter which candidate is taken

PROBE = 0.003  # seconds of matrix products between two rounds, which show how much of the processor this process gets
QUIET = 0.85  # share of its threads' time that a process gets on a machine where nothing else runs

# Between two candidates, by rounding: relative, by norm.
LARGEST_ERROR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

Call = Callable[[], Sequence[Tensor]]  # computes, and returns all outputs and gradients
Prepare = Callable[[str], Call]  # from the name of a candidate


@dataclass(frozen=True)
class Measurement:
    """Result of timing candidates.

    Attributes:
        fastest: the winner; None where no candidate computed anything.
        is_clear: whether it was told apart from the others.
        granted: share of its threads' time that the process got meanwhile.
    """

    fastest: Optional[str]
    is_clear: bool
    granted: float

    @property
    def is_lasting(self) -> bool:
        """True if later processes may rely on it."""
        return self.is_clear and self.granted >= QUIET


class TimedSelector:
    """The selections of this process, by machine and shape, and the time that it may still spend on others.

    Training times a shape when it first sees it, for at most :data:`SECONDS` and :data:`SHARE_OF_TIME` of its time so
    far; what a GPU's compilers take does not count. Inference times a shape once it has seen it so often that this
    takes a twentieth of its time. Of several processes the first one times and tells the others, which use the first
    name of the caller's order until then.

    Attributes:
        known: by machine and shape, the names of the fastest.
        measures: whether this process times anything, and asks the cache folder.
        waits: whether inference waits until timing pays; else it times as training does.
        seconds: for all that it times; :data:`SHARE_OF_TIME` adds to them.
    """

    def __init__(self) -> None:
        self.known: dict[str, dict[str, str]] = {}
        self.measures = True
        self.waits = True
        self.seconds = SECONDS
        self._seen: Counter[str] = Counter()
        self._started = time.monotonic()
        self._spent = 0.0
        self._compiled = 0.0

    def time_at_once(self) -> None:
        """Time every shape when it is first seen, for programs that measure what is selected."""
        self.waits = False
        self.seconds = math.inf

    def known_fastest(self, device: str, shape: str) -> Optional[str]:
        """Return the fastest candidate where this process knows it."""
        here = machine(device)
        if here not in self.known:
            for other in self.known:
                logger.info("the fastest ways were chosen on %s; this is %s, which chooses anew", other, here)
            self.known[here] = {}
        return self.known[here].get(shape)

    def pays(self, shape: str, is_training: bool, candidates: int, uses: int = 1) -> bool:
        """Return whether to time a shape now; each call is a use of it.

        Args:
            shape: what is computed.
            is_training: whether the caller trains.
            candidates: how many there are.
            uses: calls in a pass, each as long as a timed one.
        """
        if not self.measures:
            return False
        if is_training or not self.waits:
            allowed = self.seconds + SHARE_OF_TIME * (time.monotonic() - self._started)
            return self._spent - self._compiled < allowed
        self._seen[shape] += 1
        calls = candidates * TELLING_ROUNDS
        return self._seen[shape] > calls / uses / SHARE_OF_TIME

    def select(self, device: str, shape: str, names: Sequence[str], prepare: Prepare, largest_error: float) -> str:
        """Return the fastest candidate, timed now or by an earlier process.

        Args:
            device: type of the device.
            shape: what is computed, in words.
            names: the candidates, those that are usually fastest first; this order decides where time does not.
            prepare: returns what is timed.
            largest_error: relative difference from the first candidate beyond which another one is left out.
        """
        fastest = recall(FILE, machine(device), shape, is_valid=names.__contains__)
        if fastest is None:
            measurement = self._measure_in_thread(device, shape, names, prepare, largest_error)
            fastest = measurement.fastest or names[0]
            if measurement.is_lasting:
                fastest = remember(FILE, machine(device), shape, fastest, is_valid=names.__contains__)
        self.known[machine(device)][shape] = fastest
        return fastest

    def _measure_in_thread(
        self,
        device: str,
        shape: str,
        names: Sequence[str],
        prepare: Prepare,
        largest_error: float,
    ) -> Measurement:
        """Measure in a thread, which escapes the caller's autograd, FLOP counter and transforms."""
        start = time.monotonic()
        spent = self._spent
        initializer: Optional[Callable[[], None]] = None
        if torch.cuda.is_initialized():  # a thread starts on the first GPU
            initializer = partial(torch.cuda.set_device, torch.cuda.current_device())
        with ThreadPoolExecutor(1, initializer=initializer) as thread:
            found = thread.submit(self._measure, device, shape, names, prepare, largest_error).result()
        self._spent = spent + time.monotonic() - start
        return found

    def _measure(
        self,
        device: str,
        shape: str,
        names: Sequence[str],
        prepare: Prepare,
        largest_error: float,
    ) -> Measurement:
        """Time the candidates in turn until one wins or the time is up."""
        self._deadline = self._clock() + MOST_SECONDS
        calls = self._first_calls(names, prepare, largest_error)
        if len(calls) < 2:
            only = next(iter(calls), None)
            return Measurement(only, is_clear=only is not None and len(names) == 1, granted=1.0)

        samples: dict[str, list[float]] = {name: [] for name in calls}
        repeats: dict[str, int] = {}
        granted = _GrantedShare()
        contenders = list(calls)
        enough = self._clock() + SECONDS
        for turn in range(MOST_ROUNDS):
            is_enough = self._clock() > enough and turn >= TELLING_ROUNDS
            if len(contenders) < 2 or is_enough or self._clock() > self._deadline:
                break
            first = turn % len(contenders)
            for name in contenders[first:] + contenders[:first]:
                samples[name].append(self._sample(calls[name], repeats, name))
            if device == "cpu":
                granted.probe()
            contenders = _contenders(samples, contenders, granted.share >= QUIET)

        medians = {name: float(np.median(samples[name])) for name in calls if samples[name]}
        if not medians:  # the first calls took all the time
            return Measurement(contenders[0], is_clear=False, granted=granted.share)
        ordered = sorted(medians, key=medians.__getitem__)
        figures = ", ".join(f"{name} {1000 * medians[name]:.3g} ms" for name in ordered)
        logger.info("fastest for %s: %s", shape.partition(":")[0], figures)
        return Measurement(contenders[0], _is_clear(samples, contenders), granted.share)

    def _first_calls(self, names: Sequence[str], prepare: Prepare, largest_error: float) -> dict[str, Call]:
        """Call each candidate once, which prepares torch, MKL and Triton; leave out those that fail or err."""
        calls: dict[str, Call] = {}
        expected: Optional[Sequence[Tensor]] = None
        for name in names:
            if self._clock() > self._deadline:
                break
            try:
                call = prepare(name)
                seconds, found = self._timed(call)
                if torch.cuda.is_initialized():  # what compilers take counts for nobody
                    self._deadline += seconds
                    self._compiled += seconds
                if expected is None:
                    expected = found
                error = difference(found, expected)
                if error > largest_error:
                    raise ValueError(f"it is off by {error:.2g} of what it should be")
                calls[name] = call
            except Exception as error:  # a kernel may fail in any way on a device that is new to it
                logger.warning("%s is left out here: %s", name, str(error).partition("\n")[0])
        return calls

    def _sample(self, call: Call, repeats: dict[str, int], name: str) -> float:
        """Return the seconds of one call, averaged over as many as a sample needs."""
        if name not in repeats:
            seconds, _ = self._timed(call)
            repeats[name] = max(1, math.ceil(SAMPLE / max(seconds, 1e-6)))
            if repeats[name] == 1:
                return seconds
        start = self._clock()
        for _ in range(repeats[name]):
            call()
        _wait_for_gpu()
        return (self._clock() - start) / repeats[name]

    def _timed(self, call: Call) -> tuple[float, Sequence[Tensor]]:
        """Return the seconds that a call takes, and its outputs."""
        start = self._clock()
        found = call()
        _wait_for_gpu()
        return self._clock() - start, found

    def _clock(self) -> float:
        """Return seconds without those of selections meanwhile: timed attention selects how it multiplies matrices."""
        return time.perf_counter() - self._spent

    def state_dict(self) -> dict[str, dict[str, str]]:
        """Return what is known, for a checkpoint and for other processes."""
        return {here: dict(shapes) for here, shapes in self.known.items()}

    def load_state_dict(self, state: Any) -> dict[str, dict[str, str]]:
        """Take what :meth:`state_dict` returned, on a machine like this; another machine chooses anew.

        Returns:
            The same; nothing where the state is anything else, as in a damaged checkpoint: no run ends for what it can
            time again.
        """
        try:
            checked = as_type(dict[str, dict[str, str]], state, "the choices in the checkpoint", "they are made anew")
        except UserError as error:
            logger.warning("%s", error)
            return {}
        for here, shapes in checked.items():
            self.known.setdefault(here, {}).update(shapes)
        return checked


class _GrantedShare:
    """The share of its threads' processor time that this process gets: below one where other programs run too."""

    def __init__(self) -> None:
        self._used = 0.0
        self._wanted = 0.0
        self._matrix = torch.ones(384, 384)

    def probe(self) -> None:
        """Multiply matrices for a moment on all threads, and compare processor time with wall time."""
        start = time.perf_counter()
        used = time.process_time()
        while time.perf_counter() - start < PROBE:
            torch.mm(self._matrix, self._matrix)
        self._used += time.process_time() - used
        self._wanted += (time.perf_counter() - start) * torch.get_num_threads()

    @property
    def share(self) -> float:
        """The share so far; one before the first probe."""
        if not self._wanted:
            return 1.0
        return self._used / self._wanted


def _ratios(samples: dict[str, list[float]], name: str, fastest: str) -> np.ndarray:
    """Return a candidate's seconds divided by the fastest one's, round by round."""
    rounds = min(len(samples[name]), len(samples[fastest]))
    return np.array(samples[name][:rounds]) / np.array(samples[fastest][:rounds])


def _contenders(samples: dict[str, list[float]], contenders: Sequence[str], is_quiet: bool) -> list[str]:
    """Return those of the candidates, in their order, that may still be the fastest.

    Beside other programs a few rounds say nothing: these may have hit the same candidate in each.
    """
    fewest = FEWEST_ROUNDS if is_quiet else TELLING_ROUNDS
    fastest = min(contenders, key=lambda name: np.median(samples[name]))
    found = []
    for name in contenders:
        ratios = _ratios(samples, name, fastest)
        is_hopeless = len(ratios) >= fewest and np.median(ratios) > HOPELESS and ratios.min() > 1
        is_slower = len(ratios) >= TELLING_ROUNDS and np.median(ratios) > ALIKE and np.quantile(ratios, 0.25) > 1
        if not is_hopeless and not is_slower:
            found.append(name)
    return found


def _is_clear(samples: dict[str, list[float]], contenders: Sequence[str]) -> bool:
    """Return whether one candidate is left, or only some between which there is no difference."""
    if len(contenders) == 1:
        return True
    fastest = min(contenders, key=lambda name: np.median(samples[name]))
    rounds = len(samples[fastest])
    ratios = [np.median(_ratios(samples, name, fastest)) for name in contenders]
    return rounds >= TELLING_ROUNDS and max(ratios) <= ALIKE


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative error among the tensors, by norm; NaN counts as infinite."""
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        exact = other.float()
        error = (one.float() - exact).norm() / exact.norm().clamp(min=1e-6)
        largest = max(largest, error.nan_to_num(nan=math.inf).item())
    return largest


SELECTOR = TimedSelector()


def machine(device: str) -> str:
    """Return what a selection holds for besides its shape: the processor or GPU, torch, and its threads."""
    threads = ""
    if device == "cpu":
        threads = f", {torch.get_num_threads()} threads"
    return f"{device_key(device)}, torch {torch.__version__}{threads}"


def half_octaves(size: float) -> float:
    """Return a size in steps of half an octave: a selection holds for the sizes near its own."""
    return 2 ** (round(2 * math.log2(size)) / 2)
