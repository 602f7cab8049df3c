"""The back ends of lazy attention alone, on this machine: the table from which ``--lazy-backend auto`` chooses."""

import copy
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from lazyformer_fairseq.costs.latency import measure
from lazyformer_fairseq.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.files.json_files import write_json
from lazyformer_fairseq.modules.attention import attend
from lazyformer_fairseq.modules.attention.choice import BACKENDS
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.position_bias import RelativePositionBias

logger = logging.getLogger(__name__)

# What rounding may amount to: relative, by norm, of outputs and gradients on one back end from those on another.
LARGEST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


class Block(NamedTuple):
    """A lazy block to measure: its attention without the projections.

    Attributes:
        training: forward and backward; else forward alone.
        biased: T5's relative bias of 32 buckets, learned in training.
        layers: m.
        time: T.
    """

    training: bool
    biased: bool
    layers: int
    time: int


def measure_back_ends(
    lengths: Sequence[int],
    layers: Sequence[int],
    device: str,
    precision: torch.dtype,
    tokens: int,
    rounds: int = 10,
    minutes: Optional[float] = None,
    heads: int = 12,
    head_size: int = 64,
) -> dict[str, Any]:
    """Milliseconds of every back end for every block, those of a block in turn.

    After Ctrl-C or SIGTERM, of the blocks that were measured until then, if any were.

    Args:
        lengths: T.
        layers: m.
        device: cpu or cuda.
        precision: of queries, keys and values.
        tokens: of a batch; at least one sequence.
        rounds: samples; the median counts.
        minutes: that all rounds together may take, but for one of each; None for no limit.
        heads: N.
        head_size: D.

    Returns:
        `machine`, `versions`, `precision`, `blocks_planned`, more than there are rows where it was stopped, and `rows`
        of `device`, `training`, `biased`, `layers`, `time` and `milliseconds` by back end, without those that failed,
        ran out of memory or computed something else.
    """
    blocks = [Block(*one) for one in itertools.product((True, False), (True, False), layers, lengths)]
    seconds = None if minutes is None else 60 * minutes / len(blocks)
    rows = []
    try:
        for block in tqdm(blocks, desc="back ends", unit=" blocks"):
            shape = (max(1, tokens // block.time), heads, block.time, head_size)
            things = _agreeing(block, _Attention(block, shape, device, precision), LARGEST_ERROR[precision])
            timings = measure(things, rounds, 1, device, description=str(block), seconds=seconds)
            milliseconds = {name: round(1000 * timing.median, 4) for name, timing in timings.items()}
            rows.append({"device": device, **block._asdict(), "milliseconds": milliseconds})
    except KeyboardInterrupt:
        if not rows:
            raise
    return {
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "precision": str(precision).removeprefix("torch."),
        "blocks_planned": len(blocks),
        "rows": rows,
    }


def _agreeing(block: Block, attention: "_Attention", largest_error: float) -> dict[str, Callable[[], object]]:
    """What to measure, by back end: what runs here, and computes what eager does in single precision.

    Where there is no memory for that, what the first one does.
    """
    things, expected = {}, None
    with suppress(torch.OutOfMemoryError):
        expected = attention.in_single_precision().run("eager")
    for name in BACKENDS:
        try:
            found = attention.run(name)
        except torch.OutOfMemoryError:
            continue
        except Exception as error:  # a kernel may fail in any way on a GPU that is new to it: the others' figures stay
            logger.warning("%s: %s fails, left out (%s: %s)", block, name, type(error).__name__, error)
            continue
        expected = found if expected is None else expected
        error = _error(found, expected)
        if error > largest_error:
            logger.warning("%s: %s is off by %.2g of its size: left out", block, name, error)
            continue
        things[name] = partial(attention.run, name)
    return things


def add_to_file(path: Path, before: dict[str, Any], measured: dict[str, Any]) -> None:
    """Writes what :func:`measure_back_ends` returned.

    What `before` has of another kind of device stays, and so does what it has from this very machine, software and
    precision of blocks that were not measured now.

    Raises:
        UserError: it cannot be written.
    """
    device = measured["rows"][0]["device"]
    origin = {key: measured[key] for key in ("machine", "versions", "precision")}
    is_from_here = before.get("measured_on", {}).get(device) == origin
    measured_on = {**before.get("measured_on", {}), device: origin}
    new = {_block_of(row) for row in measured["rows"]}
    others = [
        row for row in before.get("rows", []) if row["device"] != device or (is_from_here and _block_of(row) not in new)
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"measured_on": measured_on, "rows": [*others, *measured["rows"]]})
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); give another --output") from error


def _block_of(row: dict[str, Any]) -> Block:
    return Block(*(row[name] for name in Block._fields))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; the fastest is marked."""
    lines = []
    for row in rows:
        fastest = min(row["milliseconds"].values(), default=None)
        times = [row["milliseconds"].get(name) for name in BACKENDS]
        cells = ["left out" if ms is None else f"{ms:.2f}{' *' if ms == fastest else ''}" for ms in times]
        what = "forward and backward" if row["training"] else "forward"
        lines.append([what, "learned" if row["biased"] else "none", row["layers"], row["time"], *cells])
    headers = ["pass", "bias", "layers", "n", *(f"{name}, ms" for name in BACKENDS)]
    aligned = ("left", "left", *["right"] * (2 + len(BACKENDS)))
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True, colalign=aligned)


class _Attention:
    """The attention of a block, from the same random inputs on every back end."""

    def __init__(self, block: Block, shape: tuple[int, ...], device: str, precision: torch.dtype):
        like = {"device": device, "dtype": precision}
        batch, heads, time, size = shape

        def heads_side_by_side() -> Tensor:  # in memory, as a model's projections leave them
            return torch.randn(batch, time, heads, size, **like).transpose(1, 2)

        self.block = block
        self.q, self.k, *self.values = (
            heads_side_by_side().requires_grad_(block.training) for _ in range(2 + block.layers)
        )
        self.gradients = [heads_side_by_side() for _ in self.values]
        self.bias = RelativePositionBias(shape[1]).to(**like)
        torch.nn.init.normal_(self.bias.table)

    def in_single_precision(self) -> "_Attention":
        """The same numbers, in float32."""
        if self.q.dtype == torch.float32:
            return self
        other, training = copy.copy(self), self.block.training
        other.q, other.k, *other.values = (
            part.detach().float().requires_grad_(training) for part in (self.q, self.k, *self.values)
        )
        other.gradients = [gradient.float() for gradient in self.gradients]
        other.bias = copy.deepcopy(self.bias).float()
        return other

    def run(self, backend: str) -> list[Tensor]:
        """Outputs of all layers; in training also the gradients of all that goes in."""
        with torch.inference_mode(not self.block.training):
            bias = self.bias(self.block.time) if self.block.biased else Scores()
            output, reusable = attend(self.q, self.k, self.values[0], bias, 0.0, self.block.layers - 1, backend)
            outputs = [output, *(reusable.attend(value, 0.0) for value in self.values[1:])]
        if not self.block.training:
            return outputs
        leaves = [self.q, self.k, *self.values, *([self.bias.table] if self.block.biased else [])]
        return [*outputs, *torch.autograd.grad(outputs, leaves, self.gradients)]


def _error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error of a tensor, by norm; NaN counts as infinite."""
    errors = [
        ((one.float() - other.float()).norm() / other.float().norm()).nan_to_num(nan=math.inf).item()
        for one, other in zip(found, expected, strict=True)
    ]
    return max(errors)
