"""``lazyformer pattern spans``: how far the heads of a trained model look (``s[span=...]``)."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_loading import load_safely
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.report.figures import COLOURS, write_picture

SHARES = ".inner.choices.span.shares"


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
