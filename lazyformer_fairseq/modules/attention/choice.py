"""Which back end computes an attention: the one the user names or, for ``auto``, the fastest where the run is.

The first pass over a shape times the back ends that can compute it, on the model's own sublayers
(:mod:`lazyformer_fairseq.modules.choices`).
"""

import math
import os
import re
from pathlib import Path
from typing import NamedTuple, Optional

import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import BACK_ENDS, back_ends
from lazyformer_fairseq.modules.choices import CHOICES, LARGEST_ERROR, Timed, half_octaves
from lazyformer_fairseq.modules.processor import compute_capability

AUTO = "auto"
BACKENDS = tuple(BACK_ENDS)
# Share of a device's memory that the distributions of all blocks may take under ``auto``.
SHARE_OF_MEMORY = 0.4
WORTH_IT = 2**22  # multiply-adds of queries and keys; below, any back end takes less time than choosing one
TOKENS = 2048  # of a batch that is timed on a processor, whose back ends compute one sequence after the other
FOR_MASKS = frozenset({"tiles", "flex"})  # without one they compute what the others do, and take longer
_LIKELY = ("tiles", "materialize", "recompute", "fused", "flex", "eager")  # in this order they are timed
# Without a measurement a mask is for ``tiles`` from so many queries on, and below such a share of pairs shown.
FEWEST_IN_TILES = 256
SHARE_IN_TILES = 0.5


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
        batch, length, keys = (f"{half_octaves(size):.0f}" for size in (self.batch, self.time, self.keys))
        shown = f"{half_octaves(self.share):.2g} of them shown" if self.share else ""
        kind = "training" if self.is_training else "inference"
        dropout = "dropout" if self.has_dropout else ""
        precision = str(self.precision).removeprefix("torch.")
        block = f"blocks of {consumers + 1}" if consumers else "single layers"
        sizes = f"about {batch} x {length} queries, {keys} keys", f"{self.heads} heads of {self.head_size}"
        return ", ".join(filter(None, [kind, precision, *sorted(self.features), dropout, block, *sizes, shown]))


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
        UserError: the one that the user names does not run on this device.
    """
    if name == AUTO:
        return _fastest(workload, consumers, _possible(workload, among), timed)
    if not BACK_ENDS[name].runs_on(workload.device):
        major, minor = compute_capability()
        raise UserError(
            f"--attention-backend {name}: needs a GPU of compute capability 8.0 or above, this one has {major}.{minor}"
            f": give {AUTO} or recompute"
        )
    return name


def _fastest(workload: Workload, consumers: int, possible: tuple[str, ...], timed: Optional[Timed]) -> str:
    otherwise = unmeasured(workload, consumers, possible)
    is_watched = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if is_watched or len(possible) < 2 or workload.multiply_adds < WORTH_IT:
        return otherwise
    device, shape = workload.device, f"attention, {workload.shape(consumers)}: {' or '.join(possible)}"
    if (found := CHOICES.known_of(device, shape)) is not None:
        return found if found in possible else otherwise
    if timed is None or not CHOICES.pays(shape, workload.is_training, len(possible), workload.blocks):
        return otherwise
    fits = [name for name in sorted(possible, key=_LIKELY.index) if _has_room(name, workload)]
    likely = sorted(fits, key=lambda name: name != otherwise)  # it comes first
    largest = math.inf if workload.has_dropout else LARGEST_ERROR[workload.precision]
    return CHOICES.choose(device, shape, likely, timed, largest) if likely else otherwise


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
    can = (row.has_dropout or not workload.has_dropout) and (name not in FOR_MASKS or "mask" in workload.features)
    can = can and row.lacks.isdisjoint(workload.features) and row.runs_on(workload.device)
    needed = workload.features | ({"oblong"} if workload.time != workload.keys else frozenset())
    if not (can and row.supports(workload.device, needed, workload.head_size)):
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
