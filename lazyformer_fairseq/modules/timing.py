"""Selection of the fastest of several methods of the same computation, by timing them on the machine of the run.

The candidates are timed when a shape is first used. The result is stored by machine and shape in the user's cache
folder, so that the next run need not time them, and in the checkpoint, so that a resumed run rounds as before.

Three rules make a selection reliable. The candidates take turns, and one of them wins only if it is ahead in most
rounds; otherwise the order in which the caller lists them decides. A busy machine needs more rounds. A result is stored
in the cache folder only if the candidates could be told apart while no other program was using the CPU.
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
# Seconds that the rounds of one selection may take. A process may spend this time plus a share of the time since its
# start on all selections.
SECONDS = 2.0
SHARE_OF_TIME = 0.05

MOST_SECONDS = 8.0  # limit for a selection including its first calls, and for the few rounds that long calls need

SAMPLE = 0.004  # shortest sample in seconds; a faster candidate is called several times per sample
FEWEST_ROUNDS = 4  # rounds before a candidate may be ruled out on a quiet machine
HOPELESS = 1.25  # median ratio to the fastest candidate above which a candidate is ruled out after so few rounds
TELLING_ROUNDS = 7  # rounds after which a candidate is ruled out that was slower in three quarters of them
MOST_ROUNDS = 21
ALIKE = 1.02  # median ratio up to which two candidates count as equally fast

PROBE = 0.003  # seconds of matrix products after each round, which measure how much CPU time this process gets
QUIET = 0.85  # share of its threads' time that a process gets at least if no other program runs

# The largest relative difference between the results of two candidates, by norm, that rounding explains.
LARGEST_ERROR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

Call = Callable[[], Sequence[Tensor]]  # runs the computation and returns all outputs and gradients
Prepare = Callable[[str], Call]  # returns the computation by the candidate of that name


@dataclass(frozen=True)
class Measurement:
    """Result of timing the candidates.

    Attributes:
        fastest: the name of the fastest candidate; None if all candidates failed.
        is_clear: whether the candidates could be told apart or are equally fast.
        granted: the share of its threads' time that the process got during the measurement.
    """

    fastest: Optional[str]
    is_clear: bool
    granted: float

    @property
    def is_lasting(self) -> bool:
        """True if later processes may rely on the result."""
        return self.is_clear and self.granted >= QUIET


class TimedSelector:
    """Selections of this process by machine and shape, and the budget of time for further selections.

    Training times a shape when it is first used, until it has spent :data:`SECONDS` plus :data:`SHARE_OF_TIME` of the
    time since its start on timing; the time of a GPU's compilers does not count. Inference times a shape once it has
    been used so often that timing takes a twentieth of the time. If there are several processes, the first one times
    the candidates and sends the result to the others, which until then use the candidate that the caller lists first.

    Attributes:
        known: the name of the fastest candidate by machine and shape.
        measures: whether this process times candidates and reads the cache folder.
        waits: whether inference waits until timing pays; otherwise it times as early as training does.
        seconds: the seconds to spend on all selections, in addition to :data:`SHARE_OF_TIME`.
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
        """Time every shape at its first use, as needed by programs that measure the selected candidates."""
        self.waits = False
        self.seconds = math.inf

    def known_fastest(self, device: str, shape: str) -> Optional[str]:
        """Return the fastest candidate if this process knows it, otherwise None."""
        here = machine(device)
        if here not in self.known:
            for other in self.known:
                logger.info("the fastest methods were selected on %s; this is %s, which selects them anew", other, here)
            self.known[here] = {}
        return self.known[here].get(shape)

    def pays(self, shape: str, is_training: bool, candidates: int, uses: int = 1) -> bool:
        """Return whether to time a shape now, and count this call as a use of the shape.

        Args:
            shape: a description of the computation.
            is_training: whether the caller trains.
            candidates: the number of candidates.
            uses: the number of computations in one use, each as long as a timed one.
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
            device: the type of the device.
            shape: a description of the computation.
            names: the candidates, in the order in which they are usually fastest; it decides if timing does not.
            prepare: returns the computation by a candidate.
            largest_error: the largest relative difference from the result of the first candidate; a candidate that
                exceeds it is left out.
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
        """Measure in another thread, to which the caller's autograd mode, FLOP counter and transforms do not apply."""
        start = time.monotonic()
        spent = self._spent
        initializer: Optional[Callable[[], None]] = None
        if torch.cuda.is_initialized():  # a new thread would use the first GPU
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
        """Call each candidate once to warm up torch, MKL and Triton; leave out those that fail or are inaccurate."""
        calls: dict[str, Call] = {}
        expected: Optional[Sequence[Tensor]] = None
        for name in names:
            if self._clock() > self._deadline:
                break
            try:
                call = prepare(name)
                seconds, found = self._timed(call)
                if torch.cuda.is_initialized():  # compilation counts towards neither limit
                    self._deadline += seconds
                    self._compiled += seconds
                if expected is None:
                    expected = found
                error = difference(found, expected)
                if error > largest_error:
                    raise ValueError(f"the relative error of its result is {error:.2g}")
                calls[name] = call
            except Exception as error:  # a kernel may fail in any way on a device that is new to it
                logger.warning("%s is left out here: %s", name, str(error).partition("\n")[0])
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
        """Return the seconds that a call takes, and its outputs."""
        start = self._clock()
        found = call()
        _wait_for_gpu()
        return self._clock() - start, found

    def _clock(self) -> float:
        """Return the time in seconds, without the time of nested selections.

        Attention that is being timed may itself select how to multiply matrices.
        """
        return time.perf_counter() - self._spent

    def state_dict(self) -> dict[str, dict[str, str]]:
        """Return the known selections, for a checkpoint or for other processes."""
        return {here: dict(shapes) for here, shapes in self.known.items()}

    def load_state_dict(self, state: Any) -> dict[str, dict[str, str]]:
        """Restore selections that :meth:`state_dict` returned; they apply only on machines with the same key.

        Returns:
            The restored selections. They are empty if the state is invalid, as in a damaged checkpoint: a warning is
            enough, because the candidates can be timed again.
        """
        try:
            checked = as_type(dict[str, dict[str, str]], state, "selections in the checkpoint", "they are made anew")
        except UserError as error:
            logger.warning("%s", error)
            return {}
        for here, shapes in checked.items():
            self.known.setdefault(here, {}).update(shapes)
        return checked


class _GrantedShare:
    """Measurement of the share of its threads' CPU time that this process gets, below 1 if other programs run too."""

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
        """Share over all probes so far; 1 before the first probe."""
        if not self._wanted:
            return 1.0
        return self._used / self._wanted


def _ratios(samples: dict[str, list[float]], name: str, fastest: str) -> np.ndarray:
    """Return the seconds of a candidate divided by those of the fastest one, per round."""
    rounds = min(len(samples[name]), len(samples[fastest]))
    return np.array(samples[name][:rounds]) / np.array(samples[fastest][:rounds])


def _contenders(samples: dict[str, list[float]], contenders: Sequence[str], is_quiet: bool) -> list[str]:
    """Return the candidates that may still be the fastest, in their order.

    If other programs run, a few rounds prove nothing: these may have slowed down the same candidate in each round.
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
    """Return whether a single candidate is left, or all that are left are equally fast."""
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
    """Return the key of the machine for which a selection is valid: CPU or GPU, version of torch, and threads."""
    threads = ""
    if device == "cpu":
        threads = f", {torch.get_num_threads()} threads"
    return f"{device_key(device)}, torch {torch.__version__}{threads}"


def half_octaves(size: float) -> float:
    """Round a size to a power of the square root of 2, so that one selection is valid for similar sizes."""
    return 2 ** (round(2 * math.log2(size)) / 2)
