"""Autotuning: the fastest of several implementations is selected by timing them on the current machine.

The candidates are timed when a shape is first used. The result is stored by machine and shape in two places: in the
user's cache folder, so that later runs skip the timing, and in checkpoints, so that a resumed run has the same rounding
errors as before.

Three rules make selections reliable. First, the candidates are timed in interleaved order, and a candidate wins only if
it is ahead in most rounds; if none is, the order in which the caller lists the candidates decides. Second, more rounds
are required on a busy machine. Third, a result is stored in the cache folder only if it was clear and no other program
was using the CPU.
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
from lazyformer_fairseq.storage.json_files import cache_get, cache_set

logger = logging.getLogger(__name__)

FILE = "fastest.json"  # in the cache folder
# Maximum time in seconds for the rounds of one selection. All of a process's selections together may take this long
# plus a fraction of the time since the process started.
SECONDS = 2.0
SHARE_OF_TIME = 0.05

# Maximum time in seconds for an entire selection, including the first calls. If calls are long, the minimum number of
# rounds may take longer than SECONDS, but not longer than this.
MOST_SECONDS = 8.0

SAMPLE = 0.004  # minimum duration of a sample in seconds; faster candidates are called several times per sample
FEWEST_ROUNDS = 4  # rounds before a candidate can be ruled out on a quiet machine
HOPELESS = 1.25  # a candidate is ruled out after so few rounds only if its median slowdown exceeds this
TELLING_ROUNDS = 7  # rounds after which a candidate is ruled out if it was slower in three quarters of them
MOST_ROUNDS = 21
ALIKE = 1.02  # maximum median ratio at which two candidates count as equally fast

PROBE = 0.003  # seconds of matmuls after each round, to measure how much CPU time this process gets
QUIET = 0.85  # minimum fraction of its threads' time that this process gets if no other program is running

# Maximum relative difference, in norm, that rounding can cause between two candidates' results.
LARGEST_ERROR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

Call = Callable[[], Sequence[Tensor]]  # runs the computation, and returns all outputs and gradients
Prepare = Callable[[str], Call]  # returns the computation for the candidate with this name


@dataclass(frozen=True)
class Measurement:
    """The result of timing the candidates.

    Attributes:
        fastest: the name of the fastest candidate; None if all candidates failed.
        is_clear: whether there is a clear winner, or all remaining candidates are equally fast.
        granted: the fraction of its threads' time that the process got during the measurement.
    """

    fastest: Optional[str]
    is_clear: bool
    granted: float

    @property
    def is_lasting(self) -> bool:
        """True if the result is reliable enough to be cached for later processes."""
        return self.is_clear and self.granted >= QUIET


class Autotuner:
    """An autotuner that finds and stores the fastest candidate for each machine and shape, within a time budget.

    During training, a shape is timed when it is first used. The budget for all timings is :data:`SECONDS` plus
    :data:`SHARE_OF_TIME` times the time since the process started; compilation for a GPU does not count. During
    inference, a shape is timed once it has been used so often that timing takes only a twentieth of the total time.
    With several processes, the first one times the candidates and sends the result to the others, which use the
    candidate listed first until then.

    Attributes:
        known: the name of the fastest candidate for each machine and shape.
        measures: whether this process times candidates and reads the cache folder.
        waits: whether inference delays timing until it pays off; otherwise shapes are timed as early as in training.
        seconds: the time in seconds that all selections together may take, in addition to the fraction
            :data:`SHARE_OF_TIME` of the time so far.
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
        """Switch to timing every shape on first use, without a budget, as in programs that benchmark the candidates."""
        self.waits = False
        self.seconds = math.inf

    def known_fastest(self, device: str, shape: str) -> Optional[str]:
        """Return the fastest candidate if it has already been selected in this process, else None."""
        here = machine(device)
        if here not in self.known:
            for other in self.known:
                logger.info(
                    "the fastest methods were selected on %s; this machine is %s, so the methods are selected again",
                    other,
                    here,
                )
            self.known[here] = {}
        return self.known[here].get(shape)

    def is_worth_timing(self, shape: str, is_training: bool, candidates: int, uses: int = 1) -> bool:
        """Return True if a shape should be timed now, and count this call as a use of the shape.

        Args:
            shape: a description of the computation.
            is_training: whether the caller is training.
            candidates: the number of candidates.
            uses: the number of computations in each use, each of which takes as long as a timed one.
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
        """Return the fastest candidate, either from the cache or by timing all candidates.

        Args:
            device: the type of the device.
            shape: a description of the computation.
            names: the candidates, with the one that is usually fastest listed first; it wins if timing is inconclusive.
            prepare: returns the computation for a candidate.
            largest_error: the maximum relative difference from the first candidate's result; candidates that exceed it
                are excluded.
        """
        fastest = cache_get(FILE, machine(device), shape, is_valid=names.__contains__)
        if fastest is None:
            measurement = self._measure_in_thread(device, shape, names, prepare, largest_error)
            fastest = measurement.fastest or names[0]
            if measurement.is_lasting:
                fastest = cache_set(FILE, machine(device), shape, fastest, is_valid=names.__contains__)
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
        """Measure in a separate thread, where the caller's autograd mode, FLOP counter and transforms do not apply."""
        start = time.monotonic()
        spent = self._spent
        initializer: Optional[Callable[[], None]] = None
        if torch.cuda.is_initialized():  # a new thread would otherwise use the first GPU
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
        """Time the candidates in interleaved order until one wins or the time is up."""
        self._deadline = self._clock() + MOST_SECONDS
        calls = self._first_calls(names, prepare, largest_error)
        if len(calls) < 2:
            only = next(iter(calls), None)
            return Measurement(only, is_clear=only is not None and len(names) == 1, granted=1.0)

        samples: dict[str, list[float]] = {name: [] for name in calls}
        repeats: dict[str, int] = {}
        granted = CpuAvailability()
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
        """Call each candidate once to warm up torch, MKL and Triton; exclude candidates that fail or are inaccurate."""
        calls: dict[str, Call] = {}
        expected: Optional[Sequence[Tensor]] = None
        for name in names:
            if self._clock() > self._deadline:
                break
            try:
                call = prepare(name)
                seconds, found = self._timed(call)
                if torch.cuda.is_initialized():  # compilation counts toward neither the deadline nor the budget
                    self._deadline += seconds
                    self._compiled += seconds
                if expected is None:
                    expected = found
                error = difference(found, expected)
                if error > largest_error:
                    raise ValueError(f"the relative error of its result is {error:.2g}")
                calls[name] = call
            except Exception as error:  # a kernel may fail in any way on an untested device
                logger.warning("%s is not used here: %s", name, str(error).partition("\n")[0])
        return calls

    def _sample(self, call: Call, repeats: dict[str, int], name: str) -> float:
        """Return the seconds per call, averaged over the calls of one sample."""
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
        """Run a call; return its duration in seconds and its outputs."""
        start = self._clock()
        found = call()
        _wait_for_gpu()
        return self._clock() - start, found

    def _clock(self) -> float:
        """Return the current time in seconds, excluding nested selections.

        For example, attention that is being timed may itself trigger a selection for its matmuls.
        """
        return time.perf_counter() - self._spent

    def state_dict(self) -> dict[str, dict[str, str]]:
        """Return all selections, for a checkpoint or for other processes."""
        return {here: dict(shapes) for here, shapes in self.known.items()}

    def load_state_dict(self, state: Any) -> dict[str, dict[str, str]]:
        """Restore selections returned by :meth:`state_dict`; they apply only on machines with the same key.

        Returns:
            The restored selections. If the state is invalid, as in a damaged checkpoint, the result is empty, a warning
            is logged, and the candidates are timed again.
        """
        try:
            checked = as_type(
                dict[str, dict[str, str]], state, "selections in the checkpoint", "they are measured again"
            )
        except UserError as error:
            logger.warning("%s", error)
            return {}
        for here, shapes in checked.items():
            self.known.setdefault(here, {}).update(shapes)
        return checked


class CpuAvailability:
    """A meter for the fraction of CPU time that this process's threads get, which falls if other programs run."""

    def __init__(self) -> None:
        self._used = 0.0
        self._wanted = 0.0
        self._matrix = torch.ones(384, 384)

    def probe(self) -> None:
        """Run matmuls on all threads for a moment, and compare CPU time with wall time."""
        start = time.perf_counter()
        used = time.process_time()
        while time.perf_counter() - start < PROBE:
            torch.mm(self._matrix, self._matrix)
        self._used += time.process_time() - used
        self._wanted += (time.perf_counter() - start) * torch.get_num_threads()

    @property
    def share(self) -> float:
        """The fraction of CPU time over all probes so far; 1 before the first probe."""
        if not self._wanted:
            return 1.0
        return self._used / self._wanted


def _ratios(samples: dict[str, list[float]], name: str, fastest: str) -> np.ndarray:
    """Return a candidate's time divided by the fastest candidate's time, per round."""
    rounds = min(len(samples[name]), len(samples[fastest]))
    times = np.array(samples[name][:rounds])
    fastest_times = np.array(samples[fastest][:rounds])
    return times / fastest_times


def _contenders(samples: dict[str, list[float]], contenders: Sequence[str], is_quiet: bool) -> list[str]:
    """Return the candidates that can still be the fastest, in their original order.

    If other programs are running, a few rounds are not conclusive, because the same candidate may have been slowed down
    in each round.
    """
    fewest = FEWEST_ROUNDS if is_quiet else TELLING_ROUNDS
    fastest = min(contenders, key=lambda name: np.median(samples[name]))
    found = []
    for name in contenders:
        ratios = _ratios(samples, name, fastest)
        if len(ratios) >= fewest:
            median = np.median(ratios)
            is_hopeless = median > HOPELESS and ratios.min() > 1
            is_slower = len(ratios) >= TELLING_ROUNDS and median > ALIKE and np.quantile(ratios, 0.25) > 1
            if is_hopeless or is_slower:
                continue
        found.append(name)
    return found


def _is_clear(samples: dict[str, list[float]], contenders: Sequence[str]) -> bool:
    """Return True if only one candidate is left, or all remaining candidates are equally fast."""
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
        distance = (one.float() - exact).norm()
        error = distance / exact.norm().clamp(min=1e-6)
        largest = max(largest, error.nan_to_num(nan=math.inf).item())
    return largest


SELECTOR = Autotuner()


def machine(device: str) -> str:
    """Return the key that identifies this machine in stored selections: CPU or GPU, torch version and thread count."""
    threads = ""
    if device == "cpu":
        threads = f", {torch.get_num_threads()} threads"
    return f"{device_key(device)}, torch {torch.__version__}{threads}"


def half_octaves(size: float) -> float:
    """Round a size to a power of the square root of 2, so that similar sizes share a selection."""
    return 2 ** (round(2 * math.log2(size)) / 2)
