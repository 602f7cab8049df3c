"""Attention alone, on this machine: back ends, from whose table ``--attention-backend auto`` chooses, and kinds."""

import bisect
import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Optional

import torch
from torch import Tensor

from lazyformer_fairseq.measure.bench.settings import BackEndSettings
from lazyformer_fairseq.measure.costs.latency import Things, in_a_line, measure_in_turn, try_out
from lazyformer_fairseq.measure.costs.machine import PRECISIONS
from lazyformer_fairseq.modules.attention import BACK_ENDS, attend
from lazyformer_fairseq.modules.attention.choice import (
    NOTHING_LEARNED,
    Block,
    Workload,
    back_ends_of,
    choose_with_reason,
)
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, count_share
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.encoder import Encoder, RelativePositionBias
from lazyformer_fairseq.report.numbers import FEWEST_FOR_QUARTILES, spread, with_spread
from lazyformer_fairseq.report.tables import markdown_table

logger = logging.getLogger(__name__)

LEARNED = (NOTHING_LEARNED, "bias", "positions")
MOST_TOKENS = 4096  # of a batch
BLOCKS = 3  # they share a bias, as in a model; some back ends write it out once for all of them
# Largest rounding error: relative, by norm, between outputs and gradients of two back ends.
LARGEST_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


def blocks_to_measure(settings: BackEndSettings) -> list[Block]:
    """Every combination of the settings, in training and inference, with each part that may learn, and with padding.

    Positions come with causal attention, over a memory as long as the segment, and without padding. Windows too come
    without; windows of causal attention look to the left alone. A batch has at most :data:`MOST_TOKENS`, but for a
    longer sequence.
    """
    precision = str(PRECISIONS[settings.precision]).removeprefix("torch.")
    flags, blocks = (True, False), []
    sizes = (settings.layers, settings.batches, settings.lengths, settings.heads, settings.windows)
    for training, learned, padded, m, batch, time, (number, size), window in product(flags, LEARNED, flags, *sizes):
        # One sequence alone has no padding.
        is_empty = padded and (batch == 1 or learned == "positions" or window > 0)
        if not is_empty and (batch * time <= MOST_TOKENS or batch == 1):
            block = Block(training, learned, padded, precision, m, batch, time, number, size)
            blocks.append(block._replace(share=_share(block, window)) if window else block)
    return list(dict.fromkeys(blocks))  # all windows that are longer than the text are one


def _share(block: Block, window: int) -> float:
    is_causal = block.learned == "positions"
    return count_share(_window(window, block.heads, is_causal), block.time, _keys(block), is_causal)


def _window(window: int, heads: int, is_causal: bool) -> AttentionMask:
    return AttentionMask(((heads, (Band(window, 0 if is_causal else window),)),))


def _mask(block: Block) -> Optional[AttentionMask]:
    """The smallest window that shows as much as the block says."""
    if not block.share:
        return None
    window = bisect.bisect_left(range(_keys(block)), block.share, key=lambda size: _share(block, size))
    return _window(window, block.heads, block.learned == "positions")


def measure_back_ends(
    blocks: Sequence[Block], device: str, rounds: int = 10, budget: Optional[float] = None
) -> dict[Block, dict[str, float]]:
    """Milliseconds of every back end for every block; the back ends of a block take turns.

    Ctrl-C or SIGTERM ends it early: it then returns the blocks measured so far, if any.

    Args:
        rounds: samples; the median counts.
        budget: see :func:`~lazyformer_fairseq.measure.costs.latency.measure_in_turn`.

    Returns:
        By block milliseconds by back end, leaving out those that failed, ran out of memory or computed something else.
    """

    def things_of(block: Block) -> Things:
        precision = getattr(torch, block.precision)
        return _agreeing(block, _Attention(block, device, precision), LARGEST_ERROR[precision])

    rows: dict[Block, dict[str, float]] = {}
    hasty = 0
    for block, timings in measure_in_turn(blocks, things_of, device, rounds, budget):
        hasty += any(len(timing.samples) < min(rounds, FEWEST_FOR_QUARTILES) for timing in timings.values())
        rows[block] = {name: float(f"{1000 * timing.median / BLOCKS:.3g}") for name, timing in timings.items()}
    if hasty:
        logger.warning("%d of %d blocks had time for fewer than %d rounds: give a longer --budget, or fewer blocks",
                       hasty, len(rows), FEWEST_FOR_QUARTILES)  # fmt: skip
    return rows


def _agreeing(block: Block, attention: "_Attention", largest_error: float) -> dict[str, Callable[[], object]]:
    """Things to measure, by back end: those that run here and agree with eager in single precision.

    Where memory does not suffice for that, those that agree with the first one.
    """
    things, expected = {}, None
    with suppress(torch.OutOfMemoryError):
        expected = attention.in_single_precision().run("eager")
    for name in back_ends_of(attention.q.device.type):
        if not BACK_ENDS[name].lacks.isdisjoint(attention.scores().features):
            continue
        try:
            found = attention.run(name)
        except torch.OutOfMemoryError:
            continue
        except Exception as error:  # a kernel may fail in any way on a GPU that is new to it: the others' figures stay
            logger.warning("%s: %s fails, left out (%s)", block, name, in_a_line(error))
            continue
        expected = found if expected is None else expected
        error = _error(found, expected)
        if error > largest_error:
            logger.warning("%s: %s is off by %.2g of its size: left out", block, name, error)
            continue
        things[name] = partial(attention.run, name)
    return things


def table(rows: Mapping[Block, Mapping[str, float]], device: str) -> str:
    """A Markdown table that marks the fastest."""
    lines = []
    for block, milliseconds in rows.items():
        fastest = min(milliseconds.values(), default=None)
        shown = {name: f"{ms:.3g}{' *' if ms == fastest else ''}" for name, ms in milliseconds.items()}
        lines.append(_cells(block) | {f"{name}, ms": shown.get(name, "left out") for name in back_ends_of(device)})
    return markdown_table(lines, left=("learned", "padding"))


def choices(blocks: Sequence[Block], device: str) -> str:
    """A Markdown table: what ``auto`` takes for each block here, and the measurement that decides."""
    lines = []
    for block in blocks:
        features = {"bias": {"bias"}, "positions": {"causal", "positions"}}.get(block.learned, set())
        features |= {name for name, has in (("padding", block.padded), ("mask", block.share)) if has}
        same = {name: getattr(block, name) for name in ("batch", "heads", "time", "head_size", "share")}
        how = {"precision": getattr(torch, block.precision), "is_training": block.training, "has_dropout": False}
        workload = Workload(
            device=device, keys=_keys(block), features=frozenset(features), blocks=BLOCKS, **same, **how
        )
        chosen, reason = choose_with_reason(workload, block.layers - 1)
        lines.append({**_cells(block), "auto takes": chosen, "because of": reason})
    return markdown_table(lines, left=("learned", "padding", "auto takes", "because of"))


def _keys(block: Block) -> int:
    return 2 * block.time if block.learned == "positions" else block.time


def _cells(block: Block) -> dict[str, object]:
    return {
        "pass": "forward and backward" if block.training else "forward",
        **{"learned": block.learned, "padding": "yes" if block.padded else "no"},
        "shown": f"{block.share:.3g}" if block.share else "all",
        "layers": block.layers,
        "B x n": f"{block.batch} x {block.time}",
        "heads": f"{block.heads} x {block.head_size}",
    }


class _Attention:
    """The attention of :data:`BLOCKS` blocks, from the same random inputs on every back end."""

    def __init__(self, block: Block, device: str, precision: torch.dtype):
        like = {"device": device, "dtype": precision}

        def heads_side_by_side(length: int) -> Tensor:  # in memory, as a model's projections leave them
            return torch.randn(block.batch, length, block.heads, block.head_size, **like).transpose(1, 2)

        keys = _keys(block)
        self.block = block
        self.mask = _mask(block)
        self.q = heads_side_by_side(block.time)
        self.k, *self.values = (heads_side_by_side(keys) for _ in range(1 + block.layers))
        self.gradients = [heads_side_by_side(block.time) for _ in self.values]
        self.learned = [torch.randn(32, block.heads, **like)] if block.learned == "bias" else []
        if block.learned == "positions":
            distances = torch.randn(block.heads, keys + 1, block.head_size, **like)
            self.learned = [heads_side_by_side(block.time), distances]
        for leaf in self.leaves:
            leaf.requires_grad_(block.training)
        # Lengths from half of the batch's width to all of it.
        shortest = block.time if block.batch == 1 else (block.time + 1) // 2
        self.lengths = torch.linspace(shortest, block.time, block.batch, device=device).long() if block.padded else None

    @property
    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, *self.values, *self.learned]

    def in_single_precision(self) -> "_Attention":
        """The same numbers, in float32."""
        if self.q.dtype == torch.float32:
            return self
        other, training = copy.copy(self), self.block.training
        other.q, other.k, *others = (leaf.detach().float().requires_grad_(training) for leaf in self.leaves)
        other.values, other.learned = others[: len(self.values)], others[len(self.values) :]
        other.gradients = [gradient.float() for gradient in self.gradients]
        return other

    def scores(self) -> Scores:
        """Scores that sublayers of a forward pass share."""
        if self.block.learned == "bias":
            shared = RelativePositionBias(self.block.heads).to(self.q.device)(self.block.time)
            parts = self.learned[0], shared.bucket_by_distance, shared.far, self.lengths
            return Scores(*parts, mask=self.mask)
        return Scores(lengths_B=self.lengths, is_causal=self.block.learned == "positions", mask=self.mask)

    def run(self, back_end: str) -> list[Tensor]:
        """Outputs of all layers; in training also the gradients of all inputs."""
        with torch.inference_mode(not self.block.training):
            shared = self.scores()
            outputs = [output for _ in range(BLOCKS) for output in self._outputs(shared, back_end)]
        if not self.block.training:
            return outputs
        return [*outputs, *torch.autograd.grad(outputs, self.leaves, self.gradients * BLOCKS)]

    def _outputs(self, scores: Scores, back_end: str) -> list[Tensor]:
        if self.block.learned == "positions":
            scores = scores.with_own(position_queries_BNTD=self.learned[0], distances_NKD=self.learned[1])
        output, reusable = attend(self.q, self.k, self.values[0], scores, 0.0, self.block.layers - 1, back_end)
        return [output, *(reusable.attend(value, 0.0) for value in self.values[1:])]


def _error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error among the tensors, by norm; NaN counts as infinite."""
    pairs = zip((one.float() for one in found), (other.float() for other in expected), strict=True)
    return max(((one - other).norm() / other.norm()).nan_to_num(nan=math.inf).item() for one, other in pairs)


FULL = "s, torch's full attention"


def measure_kinds(settings: BackEndSettings, heads: tuple[int, int]) -> tuple[str, bool]:
    """Forward and backward of each kind's sublayers, projections and all, and of a plain ``s``; they take turns.

    Args:
        heads: N and D.

    Returns:
        A Markdown table, and whether it has all lengths: Ctrl-C ends it early.

    Raises:
        UserError: a pattern cannot be read.
    """
    rows: list[dict[str, object]] = []
    memory: dict[str, int] = {}

    def things_of(length: int) -> Things:
        things = {FULL: _sublayers("s", "recompute", length, heads, settings)}
        tried = try_out(things | {each: _sublayers(each, "auto", length, heads, settings) for each in settings.kinds},
                        settings.device)  # fmt: skip
        for name, reason in tried.left_out.items():
            logger.warning("%s, %d tokens: %s, left out", name, length, reason)
        memory.update(tried.memory)
        return tried.things

    taken = measure_in_turn(settings.lengths, things_of, settings.device, settings.rounds, settings.budget)
    length = 0
    for length, timings in taken:
        full = timings.get(FULL)  # it may not fit into memory
        rows += [
            {
                "attention": name,
                "n": length,
                "ms": with_spread(spread([1000 * seconds for seconds in timing.samples])),
                "speed-up": f"{full.median / timing.median:.2f}x" if full else "",
                "MiB": f"{memory[name] / 2**20:.1f}",
            }
            for name, timing in timings.items()
        ]
    return markdown_table(rows), length == settings.lengths[-1]


def _sublayers(
    pattern: str, back_end: str, time: int, heads: tuple[int, int], settings: BackEndSettings
) -> Callable[[], object]:
    width = heads[0] * heads[1]
    how = {"max_positions": time, "relative_position_buckets": 0, "attention_backend": back_end}
    encoder = Encoder(pattern, None, width, width, heads[0], **how).to(settings.device, PRECISIONS[settings.precision])
    x_BTC = torch.randn(settings.batches[0], time, width).to(next(encoder.parameters())).requires_grad_()
    gradient_BTC = torch.randn_like(x_BTC)
    leaves = [x_BTC, *encoder.parameters()]
    return lambda: torch.autograd.grad(encoder(x_BTC)[0], leaves, gradient_BTC, allow_unused=True)
