"""Which back end computes an attention: the one the user names or, for ``auto``, the fastest where the run is.

The first pass over a shape times the back ends that can compute it, on the model's own sublayers (:class:`Choices`).
What was chosen is kept in the user's cache folder, by machine and shape, so that the next run need not time it.
"""

import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import BACK_ENDS, back_ends
from lazyformer_fairseq.modules.processor import compute_capability, device_kind
from lazyformer_fairseq.storage.json_files import remembered

logger = logging.getLogger(__name__)

AUTO = "auto"
BACKENDS = tuple(BACK_ENDS)
FILE = "back_ends.json"  # in the cache folder
# Share of a device's memory that the distributions of all blocks may take under ``auto``.
SHARE_OF_MEMORY = 0.4
WORTH_IT = 2**22  # multiply-adds of queries and keys; below, any back end takes less time than choosing one
SECONDS = 2.0  # of a process, for all that it times, and
SHARE_OF_TIME = 0.05  # of what it has run so far
ROUNDS = 4  # each back end's fastest counts
HOPELESS = 1.5  # times the fastest: not timed again
LONG = 0.1  # seconds, beside which what the first call prepares does not count
TOKENS = 2048  # of a batch that is timed on a processor, whose back ends compute one sequence after the other
_LIKELY = ("tiles", "materialize", "recompute", "fused", "flex", "eager")  # in this order they are timed
# Without a measurement a mask is for ``tiles`` from so many queries on, and below such a share of pairs shown.
FEWEST_IN_TILES = 256
SHARE_IN_TILES = 0.5

# Between back ends, by rounding: relative, by norm.
LARGEST_ERROR = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}

# From the name of a back end to what is timed: the sublayers of a lazy block, forward and, in training, backward. It
# returns all outputs and gradients.
Timed = Callable[[str], Callable[[], Sequence[Tensor]]]


class BackEndNotHereError(UserError, RuntimeError):
    """A RuntimeError too: on any other error in an update fairseq first writes a whole checkpoint, crash.pt."""


class Workload(NamedTuple):
    """What decides the choice in a forward pass.

    Attributes:
        device: type of the device.
        precision: of the activations.
        batch: B.
        heads: N.
        time: T, queries.
        keys: K.
        head_size: D.
        is_training: whether there will be gradients.
        features: of the scores, see :attr:`~lazyformer_fairseq.modules.attention.scores.Scores.features`.
        has_dropout: whether the distribution goes through dropout.
        blocks: sublayers of the network that make a distribution.
        share: of all pairs of query and key, those that a mask shows (:func:`~.masks.count_share`). 0 without a mask,
            which is not the same as a mask of all: fewer back ends compute that.
    """

    device: str
    precision: torch.dtype
    batch: int
    heads: int
    time: int
    keys: int
    head_size: int
    is_training: bool
    features: frozenset[str]
    has_dropout: bool
    blocks: int
    share: float = 0.0

    @property
    def learns(self) -> bool:
        """Whether additions to the scores have gradients in training."""
        return not self.features.isdisjoint({"bias", "positions", "learned"})

    @property
    def multiply_adds(self) -> int:
        """Of all queries with all keys."""
        return self.batch * self.heads * self.time * self.keys * self.head_size

    def shape(self, consumers: int) -> str:
        """In words what a choice holds for: lengths, batch and share in steps of half an octave."""
        batch, length, keys = (f"{2 ** (_half_octaves(size) / 2):.0f}" for size in (self.batch, self.time, self.keys))
        shown = f"{2 ** (_half_octaves(self.share) / 2):.2g} of them shown" if self.share else ""
        kind = "training" if self.is_training else "inference"
        dropout = "dropout" if self.has_dropout else ""
        precision = str(self.precision).removeprefix("torch.")
        block = f"blocks of {consumers + 1}" if consumers else "single layers"
        sizes = f"about {batch} x {length} queries, {keys} keys", f"{self.heads} heads of {self.head_size}"
        return ", ".join(filter(None, [kind, precision, *sorted(self.features), dropout, block, *sizes, shown]))


def _half_octaves(size: float) -> int:
    return round(2 * math.log2(size))


def check_backend(name: str, attention_dropout: float) -> None:
    """Raises UserError for an unknown name, and for a back end that lacks the requested dropout."""
    if name not in (AUTO, *BACKENDS):
        raise UserError(f"--attention-backend {name}: choose from {', '.join((AUTO, *BACKENDS))}")
    if name == "fused" and attention_dropout:
        raise UserError(
            f"--attention-backend fused never writes the distribution that --attention-dropout {attention_dropout} "
            "would thin out: give --attention-dropout 0, or another back end"
        )


def choose(
    name: str,
    workload: Workload,
    consumers: int,
    among: tuple[str, ...] = BACKENDS,
    timed: Optional[Timed] = None,
) -> str:
    """The back end for an ``s`` with this many consumers.

    Args:
        timed: for ``auto``; None where there is nothing to time.

    Raises:
        BackEndNotHereError: the one that the user names does not run on this device.
    """
    if name == AUTO:
        possible = _possible(workload, among)
        return CHOICES.choose(workload, consumers, possible, timed)
    if not BACK_ENDS[name].runs_on(workload.device):
        major, minor = compute_capability()
        raise BackEndNotHereError(
            f"--attention-backend {name}: needs a GPU of compute capability 8.0 or above, this one has {major}.{minor}"
            f": give {AUTO} or recompute"
        )
    return name


class Choices:
    """What ``auto`` has chosen in this process, by shape, and what it may still time.

    A training times a shape when it first sees it, for at most :data:`SECONDS` and :data:`SHARE_OF_TIME` of its time so
    far; inference when it has seen it so often that this takes a twentieth of its time. What a checkpoint or the cache
    folder knows is taken: so a resumed run rounds as before. Of several processes the first one times, and tells the
    others; these take what :func:`unmeasured` says until then.

    Attributes:
        known: by machine and shape, the names of back ends.
        measures: whether this process times anything, and asks the cache folder.
        waits: whether inference waits until it pays; else it times as training does.
        seconds: for all that it times; :data:`SHARE_OF_TIME` adds to them.
    """

    def __init__(self) -> None:
        self.known: dict[str, dict[str, str]] = {}
        self.measures = self.waits = True
        self.seconds = SECONDS
        self._seen: Counter[str] = Counter()
        self._began, self._spent = time.monotonic(), 0.0

    def at_once(self) -> None:
        """For those who measure what is chosen: every shape is timed when it is first seen."""
        self.waits, self.seconds = False, math.inf

    def choose(self, workload: Workload, consumers: int, possible: tuple[str, ...], timed: Optional[Timed]) -> str:
        """One of `possible`."""
        otherwise = unmeasured(workload, consumers, possible)
        is_watched = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if is_watched or len(possible) < 2 or workload.multiply_adds < WORTH_IT:
            return otherwise
        here, shape = machine(workload.device), f"{workload.shape(consumers)}: {' or '.join(possible)}"
        if (found := self._known_on(here).get(shape)) is None:
            if timed is None or not self.measures or not self._pays(shape, workload, len(possible)):
                return otherwise
            fits = [name for name in sorted(possible, key=_LIKELY.index) if _has_room(name, workload)]
            likely = sorted(fits, key=lambda name: name != otherwise)  # it comes first
            largest = math.inf if workload.has_dropout else LARGEST_ERROR[workload.precision]
            try:
                found = remembered(FILE, here, shape, lambda: self._fastest(shape, likely, timed, largest))
            except _UnsureError as error:
                found = error.name or otherwise
            self.known[here][shape] = found
        return found if found in possible else otherwise

    def _known_on(self, here: str) -> dict[str, str]:
        if here not in self.known:
            for other in self.known:
                logger.info("attention back ends were chosen on %s; this is %s, which chooses anew", other, here)
            self.known[here] = {}
        return self.known[here]

    def _pays(self, shape: str, workload: Workload, candidates: int) -> bool:
        if workload.is_training or not self.waits:
            return self._spent < self.seconds + SHARE_OF_TIME * (time.monotonic() - self._began)
        self._seen[shape] += 1
        return self._seen[shape] > candidates * (1 + ROUNDS) / workload.blocks / SHARE_OF_TIME

    def _fastest(self, shape: str, names: Sequence[str], timed: Timed, largest_error: float) -> str:
        """Times them in turn, in a thread, which escapes the caller's autograd, FLOP counter and transforms."""
        start = time.monotonic()
        with ThreadPoolExecutor(1) as thread:
            seconds = thread.submit(_seconds, names, timed, largest_error).result()
        self._spent += time.monotonic() - start
        ordered = sorted((name for name in seconds if seconds[name] < math.inf), key=seconds.get)
        if ordered:
            figures = ", ".join(f"{name} {1000 * seconds[name]:.3g} ms" for name in ordered)
            logger.info("attention back end for %s (%s)", shape.partition(":")[0], figures)
        if not ordered or len(seconds) < len(names):
            raise _UnsureError(name="".join(ordered[:1]))
        return ordered[0]

    def state_dict(self) -> dict[str, dict[str, str]]:
        """For a checkpoint, and for other processes."""
        return {here: dict(shapes) for here, shapes in self.known.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, str]]) -> None:
        """Takes what :meth:`state_dict` returned, on a machine like this; on another one it chooses anew."""
        for here, shapes in state.items():
            self.known.setdefault(here, {}).update(shapes)


class _UnsureError(AttributeError):
    """Not all were timed: not to be remembered. Its `name` is the fastest of those that were; empty for none."""


def _seconds(names: Sequence[str], timed: Timed, largest_error: float) -> dict[str, float]:
    """The fastest call of each, without those that time did not suffice for; those far behind are called once.

    Infinite for those that fail here, or compute something else than the first one.
    """
    things: dict[str, Callable[[], Sequence[Tensor]]] = {}
    seconds: dict[str, float] = {}
    start, expected = time.monotonic(), None
    for name in names:
        if time.monotonic() - start > SECONDS:
            break
        try:
            things[name] = timed(name)
            first, found = _call(things[name])  # prepares: torch, MKL and Triton
            expected = found if expected is None else expected
            if (error := _difference(found, expected)) > largest_error:
                raise ValueError(f"it is off by {error:.2g} of what it should be")
            seconds[name] = first if first > LONG else _call(things[name])[0]
        except Exception as error:  # a kernel may fail in any way on a device that is new to it
            logger.warning("attention back end %s is left out here: %s", name, str(error).partition("\n")[0])
            seconds[name] = math.inf
    for _ in range(ROUNDS - 1):
        for name in seconds:
            if time.monotonic() - start < SECONDS / 2 and seconds[name] < HOPELESS * min(seconds.values()):
                seconds[name] = min(seconds[name], _call(things[name])[0])
    return seconds


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error among the tensors, by norm; NaN counts as infinite."""
    pairs = [(one.float(), other.float()) for one, other in zip(found, expected, strict=True)]
    errors = [((one - other).norm() / other.norm().clamp(min=1e-6)).nan_to_num(nan=math.inf) for one, other in pairs]
    return max((error.item() for error in errors), default=0.0)


def _call(thing: Callable[[], Sequence[Tensor]]) -> tuple[float, Sequence[Tensor]]:
    start = time.perf_counter()
    found = thing()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start, found


CHOICES = Choices()


def machine(device: str) -> str:
    """What a choice holds for, besides the shape."""
    threads = f", {torch.get_num_threads()} threads" if device == "cpu" else ""
    return f"{device_kind(device)}, torch {torch.__version__}{threads}"


def unmeasured(workload: Workload, consumers: int, possible: tuple[str, ...]) -> str:
    """What is taken where nothing is timed: `tiles`, or on a GPU `flex`, for a mask that hides most; else torch's own.

    On a processor ``eager`` where torch would write what it cannot fuse out again and again; on a GPU torch fuses a
    bias that learns too (:mod:`.back_ends`).
    """
    is_on_gpu = workload.device == "cuda"
    hides_most = workload.time >= FEWEST_IN_TILES and 0 < workload.share < SHARE_IN_TILES
    order = ["recompute", "eager", *(["fused"] if is_on_gpu else []), "tiles"]
    if not is_on_gpu and workload.has_dropout and consumers:
        order = ["eager", "tiles"]
    elif not is_on_gpu and workload.learns:
        writes = consumers if "positions" in workload.features else workload.is_training
        order = ["eager", *order] if writes else order
    if hides_most and not (is_on_gpu and workload.has_dropout):
        order = ["tiles", *order]
    if workload.share and is_on_gpu:
        order = ["flex", *order]
    return next((name for name in order if name in possible), "eager")


def _possible(workload: Workload, among: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `among` that can compute this in the memory that the device has."""
    return tuple(name for name in among if _is_possible(name, workload))


def _is_possible(name: str, workload: Workload) -> bool:
    row = BACK_ENDS[name]
    can = (row.has_dropout or not workload.has_dropout) and (name != "tiles" or "mask" in workload.features)
    can = can and row.lacks.isdisjoint(workload.features) and row.runs_on(workload.device)
    if not (can and row.supports(workload.device, workload.features, workload.head_size)):
        return False
    if name == "recompute" and workload.is_training and not _torch_fuses(workload):
        return False  # `fused` would compute under its name, or torch would write the distribution
    written = _numbers_written(name, workload) * workload.precision.itemsize
    return not written or written <= SHARE_OF_MEMORY * memory_of(workload.device)


def timed_batch(workload: Workload) -> int:
    """Sequences of the batch that is timed."""
    return workload.batch if workload.device == "cuda" else min(workload.batch, max(1, TOKENS // workload.time))


def _has_room(name: str, workload: Workload) -> bool:
    """Whether free memory suffices to time it: some four matrices of a block."""
    block = workload._replace(batch=timed_batch(workload), blocks=1)
    return 4 * _numbers_written(name, block) * workload.precision.itemsize <= _free_memory(workload.device)


def _torch_fuses(workload: Workload) -> bool:
    """Whether torch fuses an attention whose additions to scores learn: a bias, dense scores.

    Positions count as fused on a processor: timing tells what they cost there.
    """
    if workload.device != "cuda":
        return "learned" not in workload.features
    return not workload.learns or back_ends.has_kernel(workload.precision, workload.head_size, compute_capability())


def _numbers_written(name: str, workload: Workload) -> int:
    """Numbers of T x K matrices that are in memory at once."""
    matrix = workload.heads * workload.time * workload.keys
    distribution = workload.batch * matrix
    if BACK_ENDS[name].keeps_distribution:
        return distribution * (workload.blocks if workload.is_training else 1)
    if name == "flex" and "positions" in workload.features:  # of keys that a mask may hide
        return 2 * distribution * (workload.blocks if workload.is_training else 1)  # in single precision
    if name != "recompute":
        return 0
    if "mask" in workload.features:  # a mask, for each head if there is a bias
        return distribution
    own = {"positions", "learned"} & workload.features
    if workload.device != "cuda" or not workload.is_training or not (own or "bias" in workload.features):
        return 0
    # The additions, of each sublayer or for all; and their gradient, a piece at a time.
    added = distribution * workload.blocks if own else distribution if "padding" in workload.features else matrix
    return added + min(distribution, max(matrix, back_ends.PIECE_NUMBERS))


def memory_of(device: str) -> int:
    """The device's memory in bytes, used or free: a choice must not depend on what else is running."""
    if device == "cuda":
        return torch.cuda.get_device_properties().total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_memory(device: str) -> int:
    """Bytes; all of it where Linux does not say."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        kilobytes = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        kilobytes = None
    return 1024 * int(kilobytes[1]) if kilobytes else memory_of(device)
