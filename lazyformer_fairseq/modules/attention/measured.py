"""The tables from which ``--attention-backend auto`` chooses: measurements by kind of device.

One is shipped (:data:`SHIPPED`), one is the user's own, in the cache folder, which ``lazyformer bench backends``
writes; the user's wins for a kind of device (:func:`device_kind`) that both have. A file holds, by kind of device:
`origin` (what else decides figures: versions, threads), `columns`, and `rows`, one line each to keep it small.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.cache import cache_file
from lazyformer_fairseq.storage.json_files import read_json, write_json

SHIPPED = Path(__file__).with_name("measured.json")
NOTHING_LEARNED = "nothing"
NOTHING = "-"  # in place of a back end's milliseconds: left out


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
        kind = "training" if self.training else "inference"
        parts = [
            kind,
            *([] if self.learned == NOTHING_LEARNED else [self.learned]),
            *(["padding"] if self.padded else []),
            *([f"{self.share:.3g} of all pairs shown"] if self.share else []),
            self.precision,
        ]
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
        alike = (
            other
            for other, milliseconds in self.rows.items()
            if other[:2] == block[:2]
            and bool(other.share) == bool(block.share)
            and not milliseconds.keys().isdisjoint(back_ends)
        )
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
        return Table(path, found["origin"], dict(_row(dict(zip(columns, row, strict=True))) for row in rows))
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


def _row(cells: dict[str, str]) -> tuple[Block, dict[str, float]]:
    # Tables of before there were masks have no shares.
    of_block = {name: cells.pop(name) for name in Block._fields if name in cells or name != "share"}
    share = float(of_block.pop("share", 0))
    words = {name: of_block.pop(name) for name in ("learned", "precision")}
    numbers = {name: int(cell) for name, cell in of_block.items()}
    flags = {name: bool(numbers.pop(name)) for name in ("training", "padded")}
    return (
        Block(**flags, **words, **numbers, share=share),
        {name: float(cell) for name, cell in cells.items() if cell != NOTHING},
    )
