"""The back ends of lazy attention alone, on this machine: the table from which ``--lazy-backend auto`` chooses."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from lazyformer_fairseq.benchmark.latency import measure
from lazyformer_fairseq.benchmark.machine import describe_machine, describe_versions
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.json_files import write_json
from lazyformer_fairseq.modules.lazy_backends import attend
from lazyformer_fairseq.modules.lazy_backends.choice import BACKENDS
from lazyformer_fairseq.modules.lazy_backends.score_bias import ScoreBias
from lazyformer_fairseq.modules.position_bias import RelativePositionBias


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
        `machine`, `versions`, `precision`, and `rows` of `device`, `training`, `biased`, `layers`, `time` and
        `milliseconds` by back end, without those that ran out of memory.
    """
    blocks = [Block(*one) for one in itertools.product((True, False), (True, False), layers, lengths)]
    seconds = None if minutes is None else 60 * minutes / len(blocks)
    rows = []
    for block in tqdm(blocks, desc="back ends", unit=" blocks"):
        batch = max(1, tokens // block.time)
        things = {}
        for name in BACKENDS:
            thing = _thing(block, name, (batch, heads, block.time, head_size), device, precision)
            try:
                thing()
            except torch.OutOfMemoryError:
                continue
            things[name] = thing
        timings = measure(things, rounds, 1, device, description=str(block), seconds=seconds)
        milliseconds = {name: round(1000 * timing.median, 4) for name, timing in timings.items()}
        rows.append({"device": device, **block._asdict(), "milliseconds": milliseconds})
    return {
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "precision": str(precision).removeprefix("torch."),
        "rows": rows,
    }


def add_to_file(path: Path, before: dict[str, Any], measured: dict[str, Any]) -> None:
    """Writes what :func:`measure_back_ends` returned; rows of another kind of device that `before` has stay.

    Raises:
        UserError: it cannot be written.
    """
    device = measured["rows"][0]["device"]
    origin = {key: value for key, value in measured.items() if key != "rows"}
    measured_on = {**before.get("measured_on", {}), device: origin}
    others = [row for row in before.get("rows", []) if row["device"] != device]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"measured_on": measured_on, "rows": [*others, *measured["rows"]]})
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); give another --output") from error


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; the fastest is marked."""
    lines = []
    for row in rows:
        fastest = min(row["milliseconds"].values())
        times = [row["milliseconds"].get(name) for name in BACKENDS]
        cells = ["out of memory" if ms is None else f"{ms:.2f}{' *' if ms == fastest else ''}" for ms in times]
        what = "forward and backward" if row["training"] else "forward"
        lines.append([what, "learned" if row["biased"] else "none", row["layers"], row["time"], *cells])
    headers = ["pass", "bias", "layers", "n", *(f"{name}, ms" for name in BACKENDS)]
    aligned = ("left", "left", *["right"] * (2 + len(BACKENDS)))
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True, colalign=aligned)


def _thing(
    block: Block, name: str, shape: tuple[int, ...], device: str, precision: torch.dtype
) -> Callable[[], Optional[Tensor]]:
    """The attention of a block on a back end; in training with the gradients of all that goes in."""
    like = {"device": device, "dtype": precision}
    q, k, *values = (torch.randn(shape, **like, requires_grad=block.training) for _ in range(2 + block.layers))
    gradients = [torch.randn(shape, **like) for _ in values]
    bias = RelativePositionBias(shape[1]).to(**like)

    def forward() -> list[Tensor]:
        score_bias = bias(block.time, None) if block.biased else ScoreBias()
        output, reusable = attend(q, k, values[0], score_bias, 0.0, block.layers - 1, name)
        return [output, *(reusable.attend(value, 0.0) for value in values[1:])]

    def forward_and_backward() -> None:
        torch.autograd.backward(forward(), gradients)
        for tensor in (q, k, *values, bias.table):
            tensor.grad = None

    return forward_and_backward if block.training else torch.inference_mode()(forward)
