"""What sublayers look at, as a PNG."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lazyformer_fairseq.pattern.report import name_heads
from lazyformer_fairseq.pattern.seen import Seen
from lazyformer_fairseq.report.figures import write_picture

COLUMNS = 5


def draw_seen(all_seen: Sequence[Seen], path: Path) -> None:
    """A panel for each sublayer and group of heads: rows are queries, columns keys, darker where a key weighs more."""
    panels = [
        (seen.title if len(seen.by_heads) == 1 else f"{seen.title}\n{name_heads(heads)}", weights)
        for seen in all_seen
        for heads, weights in seen.by_heads
    ]
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
