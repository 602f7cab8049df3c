"""What ``lazyformer pattern`` prints and draws: plans with their costs, what sublayers look at, learned spans."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.costs.flops import (
    count_flops,
    count_parameters,
    count_sublayer_flops,
    count_sublayer_parameters,
)
from lazyformer_fairseq.measure.pattern.look import Seen
from lazyformer_fairseq.patterns.grammar import PlannedSublayer, places_read, plan
from lazyformer_fairseq.patterns.kinds import Sizes
from lazyformer_fairseq.report.tables import markdown_table

COLUMNS = 5  # of panels
SHARES = ".inner.choices.span.shares"
SEEN, FAINT, UNSEEN = "■", "□", "·"
LEGEND = (
    f"rows: queries, columns: keys; {SEEN} seen, {FAINT} with less than half the weight of its row's most, {UNSEEN} not"
)


def plan_table(pattern: str, sizes: Sizes, time: int, memory: int = 0) -> str:
    """A Markdown table: a row for each sublayer, one for what is around them, one for all.

    Args:
        sizes: of the model, its direction included.
        time: T, tokens of the sequence whose FLOPs count; the head predicts all of them.
        memory: M, remembered positions.

    Raises:
        UserError: the pattern cannot be read, or is not for this direction.
    """
    sublayers = plan(pattern, sizes.direction)
    rows, inside = [], [0, 0]
    for number, (planned, reads) in enumerate(zip(sublayers, _what_each_reads(sublayers), strict=True), 1):
        costs = count_sublayer_parameters(planned, sizes), count_sublayer_flops(planned, sizes, time, memory)
        inside = [before + cost for before, cost in zip(inside, costs, strict=True)]
        rows.append(_row(str(number), planned.text, planned.kind.name, reads, *costs))
    costs = count_parameters(pattern, sizes), count_flops(pattern, sizes, time, memory)
    rows.append(
        _row("", "", "shared, embeddings, head", "", *(all_ - part for all_, part in zip(costs, inside, strict=True)))
    )
    rows.append(_row("all", "", "", "", *costs))
    return markdown_table(rows, left=("sublayer", "kind", "reads"))


def _row(number: str, text: str, kind: str, reads: str, parameters: int, flops: int) -> dict[str, str]:
    return {
        "": number,
        "sublayer": text,
        "kind": kind,
        "reads": reads,
        "parameters": f"{parameters:,}",
        "MFLOP": f"{flops / 1e6:,.2f}",
    }


def _what_each_reads(sublayers: Sequence[PlannedSublayer]) -> Iterator[str]:
    """``distribution of 3`` for a sublayer that reads the third's, nothing for one that reads none."""
    for planned, place in zip(sublayers, places_read(sublayers), strict=True):
        yield "" if place is None else f"{planned.kind.reads} of {place + 1}"


def text_picture(seen: Seen) -> str:
    """What a sublayer looks at, a line for each query."""
    blocks = []
    for heads, weights_TK in seen.by_heads:
        title = seen.title if len(seen.by_heads) == 1 else f"{seen.title}, {name_heads(heads)}"
        blocks.append("\n".join([title, *map(_line, weights_TK)]))
    return "\n\n".join(blocks)


def name_heads(heads: range) -> str:
    """``head 1`` or ``heads 1 to 8``."""
    return f"head {heads.start + 1}" if len(heads) == 1 else f"heads {heads.start + 1} to {heads.stop}"


def _line(weights_K: Tensor) -> str:
    return " ".join(UNSEEN if weight == 0 else FAINT if weight < 0.5 else SEEN for weight in weights_K.tolist())


def draw_seen(all_seen: Sequence[Seen], path: Path) -> None:
    """A panel for each sublayer and group of heads: rows are queries, columns keys, darker where a key weighs more."""
    panels = [
        (seen.title if len(seen.by_heads) == 1 else f"{seen.title}\n{name_heads(heads)}", weights)
        for seen in all_seen
        for heads, weights in seen.by_heads
    ]
    from matplotlib.figure import Figure

    from lazyformer_fairseq.report.figures import write_picture

    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(2.2 * columns, 2.55 * rows), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.1)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axis in grid.flat:
        axis.set_axis_off()
    for axis, (title, weights_TK) in zip(grid.flat, panels, strict=False):
        axis.set_axis_on()
        axis.imshow(weights_TK.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(title.replace(",", ",\n") if len(title) > 26 else title, fontsize=7)
        axis.tick_params(labelsize=6)
    for axis in grid[:, 0]:
        axis.set_ylabel("query", fontsize=7)
    for axis in grid[-1]:
        axis.set_xlabel("key", fontsize=7)
    write_picture(figure, path)


class Spans(NamedTuple):
    """Of one sublayer.

    Attributes:
        number: among all sublayers, from 1, the lowest first.
        limit: the longest that its heads may learn, in tokens.
        ramp: tokens over which weights fall beyond the span.
        tokens: z of each head.
    """

    number: int
    limit: int
    ramp: int
    tokens: list[float]


def read_spans(checkpoint: Path) -> list[Spans]:
    """The spans in a checkpoint of a model of ours, the lowest sublayer first.

    Raises:
        UserError: it is no checkpoint, or its model has no spans.
    """
    from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_loading import load_safely

    state = load_safely(checkpoint)
    pattern = ((state.get("cfg") or {}).get("model") or {}).get("sublayer_pattern")
    if pattern is None:
        raise UserError(f"{checkpoint}: is of no model of this package")
    weights: dict[str, Tensor] = {name: weight for name, weight in state["model"].items() if name.endswith(SHARES)}
    if not weights:
        raise UserError(f"{checkpoint}: its sublayers ({pattern}) learn no spans, as those of s[span=1024] do")
    found = []
    for name, shares in weights.items():
        number = int(name.removesuffix(SHARES).rpartition(".")[2])
        values = plan(pattern)[number].values
        tokens = (shares.float().clamp(0, 1) * values["span"]).tolist()
        found.append(Spans(number + 1, values["span"], values["ramp"], tokens))
    return sorted(found)


def spans_table(found: list[Spans]) -> str:
    """A line for each sublayer."""
    lines = [f"{'sublayer':>8} {'ramp':>8} {'mean':>8}   each head, in tokens; beyond, weights fall to 0 over the ramp"]
    for spans in found:
        heads = " ".join(f"{tokens:.0f}" for tokens in sorted(spans.tokens))
        lines.append(f"{spans.number:>8} {spans.ramp:>8} {np.mean(spans.tokens):>8.1f}   {heads}")
    return "\n".join(lines)


def draw_spans(found: list[Spans], path: Path) -> None:
    """A bar for each head, from the shortest to the longest in each sublayer."""
    from matplotlib.figure import Figure

    from lazyformer_fairseq.report.figures import COLOURS, write_picture

    figure = Figure(figsize=(1.5 + 0.14 * sum(len(spans.tokens) + 1 for spans in found), 3))
    axis = figure.subplots()
    start, ticks = 0, []
    for spans in found:
        places = start + np.arange(len(spans.tokens))
        axis.bar(places, sorted(spans.tokens), width=0.8, color=COLOURS[0])
        ticks.append(places.mean())
        start = places[-1] + 2
    axis.set_xticks(ticks, [str(spans.number) for spans in found])
    axis.set_xlabel("sublayer, a bar for each head")
    axis.set_ylabel("span z, tokens")
    axis.spines[["top", "right"]].set_visible(False)
    write_picture(figure, path)
