"""Which back end computes an attention: the one the user names or, for ``auto``, the fastest one measured.

``auto`` reads tables of measurements by kind of device. One is shipped (:data:`SHIPPED`), one is the user's own, in the
cache folder, which ``lazyformer bench backends`` writes; the user's wins for a kind of device (:func:`device_kind`)
that both have. A file holds, by kind of device: `origin` (what else decides figures: versions, threads), `columns`, and
`rows`, one line each to keep it small.
"""

import functools
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import BACK_ENDS, back_ends
from lazyformer_fairseq.modules.processor import compute_capability, device_kind
from lazyformer_fairseq.storage.json_files import cache_file, read_json, write_json

logger = logging.getLogger(__name__)

AUTO = "auto"
SHIPPED = Path(__file__).with_name("measured.json")
NOTHING_LEARNED = "nothing"
NOTHING = "-"  # in place of a back end's milliseconds: left out
BACKENDS = tuple(BACK_ENDS)
# Share of a device's memory that the distributions of all blocks may take under ``auto``.
SHARE_OF_MEMORY = 0.4
# From so many queries on, and below such a share of pairs shown, ``tiles`` is taken without a measurement. Time of
# ``tiles`` over that of the faster of ``eager`` and ``recompute``, training and inference, 12 heads of 64, batch 1,
# fp32, one thread of a Zen 5 (processor time, in turn, medians of 3 to 5, on a machine with other work): 2.3 to 3.0 at
# n = 64, 0.9 to 2.2 at 128; with 0.24 of all pairs shown 0.5 to 0.8 at 256 and 0.4 to 0.7 at 512, with 0.44 1.1 and
# 1.0, with 0.6 0.7 to 1.6 and 1.0 to 1.1; with positions, 0.06 to 0.19 shown, 0.5 to 0.8 and 0.3 to 0.4. With attention
# dropout, forward and backward, a window over a quarter of all pairs: 0.5 at 256, 0.4 at 512, 0.2 at 1,024 and 2,048;
# over half of them 1.0, 0.8, 0.5; with a consumer 0.4 to 0.7, 0.4 to 0.6, 0.2 to 0.4, 0.2.
FEWEST_IN_TILES = 256
SHARE_IN_TILES = 0.5


class Block(NamedTuple):
    """A lazy block whose attention was measured, or is to be computed.

    Attributes:
        training: forward and backward; else forward alone.
        learned: the part of the scores that learns in training: "nothing", "bias" (T5's, relative) or "positions"
            (Transformer-XL's, in causal attention over segment and memory).
        padded: whether keys are masked.
        precision: of the activations, as in "float32".
        layers: m, an ``s`` and those that read it.
        batch: B.
        time: T.
        heads: N.
        head_size: D.
        share: of all pairs of query and key, those that a mask shows (:func:`~.masks.count_share`). 0 without
            one, which is not the same as a mask of all: fewer back ends compute that.
    """

    training: bool
    learned: str
    padded: bool
    precision: str
    layers: int
    batch: int
    time: int
    heads: int
    head_size: int
    share: float = 0.0

    def __str__(self) -> str:
        learned = "" if self.learned == NOTHING_LEARNED else self.learned
        shown = f"{self.share:.3g} of all pairs shown" if self.share else ""
        kind = "training" if self.training else "inference"
        parts = filter(None, [kind, learned, "padding" if self.padded else "", shown, self.precision])
        block = f"blocks of {self.layers}" if self.layers > 1 else "single layers"
        return f"{', '.join(parts)}, {block}, {self.batch} x {self.time} tokens, {self.heads} heads of {self.head_size}"

    def distance(self, other: "Block") -> tuple[float, ...]:
        """How unlike two are: precision counts first, then sizes, in octaves, of which padding is worth half a one.

        The share counts as a size.
        """
        sizes = ((mine, its) for mine, its in zip(self[4:], other[4:], strict=True) if mine and its)
        octaves = sum(abs(math.log2(mine / its)) for mine, its in sizes)
        return self.precision != other.precision, octaves + 0.5 * (self.padded != other.padded)


Rows = dict[Block, dict[str, float]]  # milliseconds by back end, without those that were left out


class Table(NamedTuple):
    """What was measured on a kind of device.

    Attributes:
        where: a file.
        origin: what else decides figures: versions, threads.
        rows: the figures.
    """

    where: Path
    origin: Mapping[str, Any]
    rows: Rows

    def nearest(self, block: Block, back_ends: Sequence[str]) -> Optional[Block]:
        """The measured block most like `block`, among those on which one of `back_ends` ran.

        With a mask, among those with a mask.
        """
        run = [other for other, milliseconds in self.rows.items() if not milliseconds.keys().isdisjoint(back_ends)]
        alike = (each for each in run if each[:2] == block[:2] and bool(each.share) == bool(block.share))
        return min(alike, key=block.distance, default=None)


def user_file() -> Path:
    """Where ``lazyformer bench backends`` writes."""
    return cache_file("backends.json")


@functools.cache
def table_of(kind: str) -> Optional[Table]:
    """The measurements on such a device: the user's, or else the shipped ones; None if there are none."""
    for path in (user_file(), SHIPPED):
        if (table := read_table(path, kind)) is not None:
            return table
    return None


def read_table(path: Path, kind: str) -> Optional[Table]:
    """A file's measurements for a kind of device; None if it has none or does not exist.

    Raises:
        UserError: it is damaged.
    """
    found = read_json(path).get(kind) if path.is_file() else None
    if found is None:
        return None
    try:
        columns, rows = found["columns"].split(), [line.split() for line in found["rows"]]
        return Table(path, found["origin"], dict(_read_row(dict(zip(columns, row, strict=True))) for row in rows))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: no table of back ends for {kind} ({type(error).__name__}: {error}); remove it and run "
            "`lazyformer bench backends` again"
        ) from None


def add_rows(path: Path, kind: str, origin: Mapping[str, Any], rows: Rows) -> None:
    """Writes measurements of a kind of device.

    Other kinds stay in the file, and so do rows of the same origin for blocks that were not measured now.

    Raises:
        UserError: the file is damaged, or cannot be written.
    """
    before = read_table(path, kind)
    if before is not None and before.origin == origin:
        rows = {**before.rows, **rows}
    back_ends = list(dict.fromkeys(name for milliseconds in rows.values() for name in milliseconds))
    lines = [
        " ".join([*(f"{part:g}" if isinstance(part, (bool, float)) else str(part) for part in block),
                  *(str(milliseconds.get(name, NOTHING)) for name in back_ends)])
        for block, milliseconds in sorted(rows.items())
    ]  # fmt: skip
    table = {"origin": origin, "columns": " ".join([*Block._fields, *back_ends]), "rows": lines}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**(read_json(path) if path.is_file() else {}), kind: table})
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); give another --output") from error


def _read_row(cells: dict[str, str]) -> tuple[Block, dict[str, float]]:
    # Tables of before there were masks have no shares.
    read = {str: str, int: int, float: float, bool: lambda cell: bool(int(cell))}
    of_block = {name: read[kind](cells.pop(name)) for name, kind in Block.__annotations__.items()
                if name in cells or name != "share"}  # fmt: skip
    return Block(**of_block), {name: float(cell) for name, cell in cells.items() if cell != NOTHING}


def back_ends_of(device: str) -> tuple[str, ...]:
    """Those that train on such a type of device."""
    return tuple(name for name, row in BACK_ENDS.items() if row.supports(device, frozenset(), 64))


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
        share: of all pairs of query and key, those that a mask shows; 0 without a mask. See :class:`Block`.
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
    def learned(self) -> str:
        """The part of the scores that has gradients in training."""
        return "+".join(sorted(self.features & {"bias", "positions"})) or NOTHING_LEARNED


def check_backend(name: str, attention_dropout: float) -> None:
    """Raises UserError for an unknown name, and for a back end that lacks the requested dropout."""
    if name not in (AUTO, *BACKENDS):
        raise UserError(f"--attention-backend {name}: choose from {', '.join((AUTO, *BACKENDS))}")
    if name == "fused" and attention_dropout:
        raise UserError(
            f"--attention-backend fused never writes the distribution that --attention-dropout {attention_dropout} "
            "would thin out: give --attention-dropout 0, or another back end"
        )


def choose(name: str, workload: Workload, consumers: int, among: tuple[str, ...] = BACKENDS) -> str:
    """The back end for an ``s`` with this many consumers.

    Raises:
        BackEndNotHereError: the one that the user names does not run on this device.
    """
    if name == AUTO:
        return choose_automatically(workload, consumers, among)
    if not BACK_ENDS[name].runs_on(workload.device):
        major, minor = compute_capability()
        raise BackEndNotHereError(
            f"--attention-backend {name}: needs a GPU of compute capability 8.0 or above, this one has {major}.{minor}"
            f": give {AUTO} or recompute"
        )
    return name


@functools.lru_cache(maxsize=1024)
def choose_automatically(workload: Workload, consumers: int, among: tuple[str, ...] = BACKENDS) -> str:
    """Chooses, and logs what and why."""
    name, why = choose_with_reason(workload, consumers, among)
    _log_choice(name, why)
    return name


@functools.cache  # many lengths and batches have the same reason
def _log_choice(name: str, why: str) -> None:
    logger.info("lazy back end: %s (%s)", name, why)


def choose_with_reason(workload: Workload, consumers: int, among: tuple[str, ...] = BACKENDS) -> tuple[str, str]:
    """The back end that ``auto`` takes for an ``s`` with this many consumers, and the measurement that decides.

    A run chooses from tables alone and never measures: so it rounds the same way when it resumes, and on all of its
    processes.
    """
    if workload.has_dropout:
        if _is_for_tiles_with_dropout(workload, among):
            return "tiles", "attention dropout, and it leaves most pairs out"
        if not BACK_ENDS["recompute"].lacks.isdisjoint(workload.features):
            return "eager", "attention dropout on weights that no kernel of torch has"
        if consumers and (workload.device == "cpu" or not _is_possible("recompute", workload)):
            return "eager", "attention dropout, which no fused kernel has here"
        return "recompute", "attention dropout"
    possible = [name for name in among if _is_possible(name, workload)]
    if workload.keys < workload.time:  # no table has this; torch's was the fastest for 0 to 2 consumers
        return _torchs_own(workload, consumers, possible), "torch's own, as there are fewer keys than queries"
    block, table = _block(workload, consumers), table_of(device_kind(workload.device))
    nearest = None if table is None else table.nearest(block, possible)
    if nearest is None:
        _say_that_nothing_was_measured(device_kind(workload.device), bool(workload.share))
        if workload.share and "flex" in possible:  # on a GPU
            return "flex", "made for attention to some of the keys, and nothing like it was measured here"
        if "tiles" in possible and _leaves_most_out(workload):
            return "tiles", "it leaves most pairs out, and nothing like it was measured here"
        return _torchs_own(workload, consumers, possible), "torch's own, as nothing like it was measured here"
    times = sorted((taken, name) for name, taken in table.rows[nearest].items() if name in possible)
    return times[0][1], f"{nearest}: {', '.join(f'{name} {taken:g}' for taken, name in times)} ms"


def _leaves_most_out(workload: Workload) -> bool:
    return workload.time >= FEWEST_IN_TILES and 0 < workload.share < SHARE_IN_TILES


def _is_for_tiles_with_dropout(workload: Workload, among: tuple[str, ...]) -> bool:
    """Where most pairs are left out: on a GPU, whose `tiles` with dropout are no kernels, if nothing else has room."""
    can = "tiles" in among and _is_possible("tiles", workload) and _leaves_most_out(workload)
    return can and (workload.device == "cpu" or not _is_possible("recompute", workload))


def _torchs_own(workload: Workload, consumers: int, possible: list[str]) -> str:
    """Fused attention; on a processor ``eager`` where torch would write what it cannot fuse out again and again.

    On a GPU torch fuses a bias that learns too (:mod:`.recompute`).
    """
    if workload.device == "cuda":
        return next((name for name in ("recompute", "eager", "fused", "tiles") if name in possible), "eager")
    writes = bool(consumers) if workload.learned == "positions" else workload.is_training
    first = ["eager"] if writes and workload.learned != NOTHING_LEARNED else []
    return next((name for name in [*first, "recompute", "eager", "tiles"] if name in possible), "eager")


@functools.cache
def _say_that_nothing_was_measured(kind: str, has_mask: bool) -> None:
    logger.warning(
        "no back end of %s was measured on %s: what is taken may not be the fastest; `lazyformer bench backends` "
        "measures all, once for every later run",
        "attention to some of the keys" if has_mask else "lazy attention",
        kind,
    )


def _block(workload: Workload, consumers: int) -> Block:
    precision = str(workload.precision).removeprefix("torch.")
    sizes = consumers + 1, workload.batch, workload.time, workload.heads, workload.head_size
    is_padded = "padding" in workload.features
    return Block(workload.is_training, workload.learned, is_padded, precision, *sizes, workload.share)


def _is_possible(name: str, workload: Workload) -> bool:
    """Whether a back end can compute this in the memory available."""
    row = BACK_ENDS[name]
    if not row.lacks.isdisjoint(workload.features) or not row.supports(
        workload.device, workload.features, workload.head_size
    ):
        return False
    if name == "recompute" and workload.is_training and not _torch_fuses(workload):
        return False  # `fused` would compute under its name, or torch would write the distribution
    written = _numbers_written(name, workload) * torch.empty((), dtype=workload.precision).element_size()
    return not written or written <= SHARE_OF_MEMORY * memory_of(workload.device)


def _torch_fuses(workload: Workload) -> bool:
    """Whether torch fuses an attention whose additions to scores learn: a bias, dense scores.

    Positions count as fused on a processor: a table tells what they cost there.
    """
    if workload.device != "cuda":
        return "learned" not in workload.features
    if workload.learned == NOTHING_LEARNED and "learned" not in workload.features:
        return True
    return back_ends.has_kernel(workload.precision, workload.head_size, compute_capability())


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
