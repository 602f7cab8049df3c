"""Kinds of attention alone, on this machine: of given queries, keys and values, beside torch's fused full attention."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.models.huggingface_bert import has_transformers
from lazyformer_fairseq.measure.bench.measuring import Things, measured, try_out
from lazyformer_fairseq.measure.bench.settings import KindSettings
from lazyformer_fairseq.measure.costs.latency import Timing
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.sublayers.attention import merge_heads, split_heads
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


def measure_kinds(settings: KindSettings, heads: tuple[int, int], device: str, precision: torch.dtype) -> list[Row]:
    """Forward and backward of each kind and of torch's full attention, which take turns.

    Beside a plain window runs Hugging Face's Longformer, where it is installed and the length fits its blocks.
    Projections to queries, keys and values and of the output are left out; what a kind projects besides, such as
    Linformer's E and F, counts. Ctrl-C ends it early: it then returns the lengths measured so far, if any.

    Args:
        heads: N and D.

    Raises:
        UserError: a pattern has letters other than s, l and c, or cannot be read.
    """
    for kind in settings.kinds:
        if other := sorted({planned.kind.letter for planned in plan(kind, ENCODER)} - set(LETTERS)):
            raise UserError(f"--kinds {kind}: give patterns of s, l and c, without {other[0]}")
    memory: dict[str, int] = {}

    def things_of(length: int) -> Things:
        tried = try_out(_things(settings, length, heads, device, precision), device)
        for name, reason in tried.left_out.items():
            logger.warning("%s, %d tokens: %s, left out", name, length, reason)
        memory.update(tried.memory)
        return tried.things

    rows: list[Row] = []
    for length, timings in measured(settings.lengths, things_of, device, settings.rounds, settings.budget):
        rows += [Row(name, length, timing, memory[name]) for name, timing in timings.items()]
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


def _things(settings: KindSettings, length: int, heads: tuple[int, int], device: str, precision: torch.dtype) -> Things:
    """By name what to measure."""
    like = {"device": device, "dtype": precision}
    width = heads[0] * heads[1]
    projected = torch.randn(settings.batch, length, 3 * width, **like, requires_grad=True)
    gradient = torch.randn(settings.batch, length, width, **like)
    things: dict[str, Callable[[], object]] = {FULL: partial(_full, projected, gradient, heads[0])}
    for kind in settings.kinds:
        things[kind] = _Given(kind, projected, gradient, heads[0], settings.back_end)
        if (window := plain_window(kind, length)) is not None:
            things[f"Hugging Face's Longformer, {kind}"] = HuggingFaceLongformer(window, projected, gradient, heads[0])
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
        self.weight = torch.arange(given.size(-1))  # which of its outputs, for `multiply_by_part`
        self.bias: Optional[Any] = None

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.given

    def multiply(self, x_BTC: Tensor, which: Tensor, bias: Optional[Tensor]) -> Tensor:
        return self.given[..., which[0] : which[-1] + 1] if x_BTC.size(1) == self.given.size(1) else x_BTC


class HuggingFaceLongformer:
    """Forward and backward of `LongformerSelfAttention` whose projections give what is given.

    Args:
        window: keys to either side.
        projected: (B, T, 3 C), queries, keys and values; T must be a multiple of twice the window.
        gradient: of the output, (B, T, C).
        heads: N.
    """

    def __init__(self, window: int, projected: Tensor, gradient: Tensor, heads: int):
        from transformers.models.longformer.modeling_longformer import LongformerConfig, LongformerSelfAttention

        batch, time, width = gradient.shape
        config = LongformerConfig(
            hidden_size=width,
            num_attention_heads=heads,
            attention_window=[2 * window],
            attention_probs_dropout_prob=0.0,
        )
        self.layer = LongformerSelfAttention(config, 0)
        parts = (part.detach().transpose(0, 1).clone().requires_grad_() for part in projected.chunk(3, -1))
        self.given = [_Part(part) for part in parts]
        self.layer.query, self.layer.key, self.layer.value = self.given
        self.x = torch.zeros_like(gradient)
        self.mask = gradient.new_zeros(batch, time)
        self.nowhere = torch.zeros(batch, time, dtype=torch.bool, device=gradient.device)
        self.gradient = gradient

    def __call__(self) -> tuple[Tensor, ...]:
        """Gradients of queries, keys and values, each (T, B, C)."""
        output = self.layer(self.x, self.mask, self.nowhere, self.nowhere, False)[0]
        return torch.autograd.grad(output, [given.part for given in self.given], self.gradient)


class _Part(nn.Module):
    def __init__(self, part: Tensor):
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part * 1  # the layer divides queries in place


def plain_window(kind: str, time: int) -> Optional[int]:
    """w of ``s[window=w]`` where Hugging Face's layer computes the same; None elsewhere, and without the package."""
    first, *others = plan(kind, ENCODER)
    names = [name for name, _ in first.settings]
    if others or names != ["window"] or time % (2 * first.values["window"]) or not has_transformers():
        return None
    return first.values["window"]
