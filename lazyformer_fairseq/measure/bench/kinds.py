"""Kinds of attention alone, on this machine: of given queries, keys and values, beside torch's fused full attention."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.bench.longformer import HuggingFaceLongformer, plain_window
from lazyformer_fairseq.measure.costs.latency import Timing, measure
from lazyformer_fairseq.measure.costs.peak_memory import peak_memory
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.sublayers.attention_heads import merge_heads, split_heads
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import ENCODER
from lazyformer_fairseq.report.numbers import spread, with_spread
from lazyformer_fairseq.report.tables import markdown_table

logger = logging.getLogger(__name__)

FULL = "torch's full attention"
LETTERS = "slc"


class Row(NamedTuple):
    """What one kind took for one length.

    Attributes:
        kind: as the user gave it.
        length: T.
        timing: of forward and backward.
        memory: peak bytes.
    """

    kind: str
    length: int
    timing: Timing
    memory: int


def measure_kinds(
    kinds: Sequence[str],
    lengths: Sequence[int],
    batch: int,
    heads: tuple[int, int],
    device: str,
    precision: torch.dtype,
    back_end: str = "auto",
    rounds: int = 10,
    minutes: Optional[float] = None,
) -> list[Row]:
    """Forward and backward of each kind and of torch's full attention, which take turns.

    Beside a plain window runs Hugging Face's Longformer, where it is installed and the length fits its blocks.
    Projections to queries, keys and values and of the output are left out; what a kind projects besides, such as
    Linformer's E and F, counts. Ctrl-C ends it early: it then returns the lengths measured so far, if any.

    Args:
        kinds: patterns of ``s``, ``l`` and ``c``, such as ``s[window=256]``.
        lengths: T.
        batch: B.
        heads: N and D.
        back_end: of all kinds.
        rounds: samples.
        minutes: limit for all lengths together; one round of each always runs. None for no limit.

    Raises:
        UserError: a pattern has letters other than s, l and c, or cannot be read.
    """
    for kind in kinds:
        if other := sorted({planned.kind.letter for planned in plan(kind, ENCODER)} - set(LETTERS)):
            raise UserError(f"--kinds {kind}: give patterns of s, l and c, without {other[0]}")
    rows: list[Row] = []
    try:
        for length in lengths:
            things = _things(kinds, length, batch, heads, device, precision, back_end)
            seconds = None if minutes is None else 60 * minutes / len(lengths)
            timings = measure(things, rounds, 1, device, description=f"{length} tokens", seconds=seconds)
            rows += [Row(name, length, timings[name], peak_memory(thing, device)) for name, thing in things.items()]
    except KeyboardInterrupt:
        if not rows:
            raise
    return rows


def table(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    full = {row.length: row.timing.median for row in rows if row.kind == FULL}
    lines = [
        {
            "attention": row.kind,
            "n": row.length,
            "ms": with_spread(spread([1000 * taken for taken in row.timing.samples])),
            # Torch's own may not fit into memory.
            "speed-up": f"{full[row.length] / row.timing.median:.2f}x" if row.length in full else "",
            "MiB": f"{row.memory / 2**20:.1f}",
        }
        for row in rows
    ]
    return markdown_table(lines)


def _things(
    kinds: Sequence[str],
    length: int,
    batch: int,
    heads: tuple[int, int],
    device: str,
    precision: torch.dtype,
    back_end: str,
) -> Mapping[str, Callable[[], object]]:
    """By name what to measure. What does not fit into a GPU's memory is left out."""
    like = {"device": device, "dtype": precision}
    width = heads[0] * heads[1]
    projected = torch.randn(batch, length, 3 * width, **like, requires_grad=True)
    gradient = torch.randn(batch, length, width, **like)
    things: dict[str, Callable[[], object]] = {FULL: partial(_full, projected, gradient, heads[0])}
    for kind in kinds:
        things[kind] = _Given(kind, projected, gradient, heads[0], back_end)
        if (window := plain_window(kind, length)) is not None:
            things[f"Hugging Face's Longformer, {kind}"] = HuggingFaceLongformer(window, projected, gradient, heads[0])
    for name in list(things):
        try:
            things[name]()
        except torch.OutOfMemoryError:
            logger.warning("%s, %d tokens: does not fit into memory, left out", name, length)
            del things[name]
    return things


def _full(projected: Tensor, gradient: Tensor, heads: int) -> tuple[Tensor, ...]:
    q, k, v = (split_heads(part, heads) for part in projected.chunk(3, -1))
    output = merge_heads(F.scaled_dot_product_attention(q, k, v))
    return torch.autograd.grad(output, projected, gradient)


class _Given:
    """The attention (the filters) of a pattern's sublayers, whose projections are given."""

    def __init__(self, pattern: str, projected: Tensor, gradient: Tensor, heads: int, back_end: str):
        width = gradient.size(-1)
        self.encoder = Encoder(
            pattern,
            None,
            width,
            width,
            heads,
            max_positions=projected.size(1),
            relative_position_buckets=0,
            attention_backend=back_end,
        ).to(gradient)
        self.x = torch.randn_like(gradient, requires_grad=True)
        self.gradient = gradient
        given = []
        for sublayer in self.encoder.sublayers:
            for name in ("qkv_proj", "v_proj", "in_proj"):
                if (projection := getattr(sublayer.inner, name, None)) is not None:
                    mine = projected[..., : projection.out_features].detach().clone().requires_grad_()
                    setattr(sublayer.inner, name, _Projection(mine))
                    given.append(mine)
            sublayer.inner.out_proj = nn.Identity()
        learned = [parameter for sublayer in self.encoder.sublayers for parameter in sublayer.inner.parameters()]
        self.leaves = [self.x, *given, *learned]

    def __call__(self) -> tuple[Optional[Tensor], ...]:
        shared, below = self.encoder.context(self.x), {}
        outputs = []
        for sublayer in self.encoder.sublayers:
            output, handed_on = sublayer.inner(self.x, below, shared)
            below = {**below, **handed_on}
            outputs.append(output)
        return torch.autograd.grad(outputs, self.leaves, [self.gradient] * len(outputs), allow_unused=True)


class _Projection(nn.Module):
    """Stands for a linear map, and gives what is given; what a kind has mixed before it projects stays as it is."""

    def __init__(self, given: Tensor):
        super().__init__()
        self.given = given
        self.bias: Optional[Any] = None

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.given

    def part(self, x_BTC: Tensor, start: int, stop: int, has_bias: bool = True) -> Tensor:
        return self.given[..., start:stop] if x_BTC.size(1) == self.given.size(1) else x_BTC
