"""Pictures of a search: the probabilities as in the paper's Figure 2, and how they evolved."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from lazyformer_fairseq.patterns.grammar import read_sublayer, split_sublayers
from lazyformer_fairseq.patterns.kinds import kinds
from lazyformer_fairseq.report.figures import write_picture

STAGES = {"weights": ("o", "#0072B2", "on the weights' data"), "architecture": ("s", "#D55E00", "on held-apart data")}
LINES = ("--", ":", "-.")  # of one kind with several settings


def draw_probabilities(probabilities: Sequence[Sequence[float]], candidates: Sequence[str], path: Path) -> None:
    """Layers along x, candidates as rows, brighter where more probable (PAR Transformer, Figure 2); a dot: the choice.

    `probabilities` has L rows of K.
    """
    table = np.asarray(probabilities).T
    layers = table.shape[1]
    figure = Figure(figsize=(max(5.0, 0.32 * layers + 2.5), 0.5 * len(candidates) + 1.4))
    axis = figure.subplots()
    image = axis.imshow(table, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    axis.scatter(range(layers), table.argmax(axis=0), s=14, color="white", edgecolors="black", linewidths=0.6)
    axis.set_yticks(range(len(candidates)), [_label(name) for name in candidates])
    axis.set_xticks(range(layers), range(1, layers + 1), fontsize=7)
    axis.set_xlabel("layer, the lowest first")
    figure.colorbar(image, label="probability", pad=0.02)
    write_picture(figure, path)


def draw_history(history: Sequence[dict[str, Any]], baseline_latency: float, path: Path) -> None:
    """Loss by stage, entropy and temperature, expected latency, and the kinds in the pattern, against updates."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    updates = [row["update"] for row in history]
    _draw_loss(axes[0, 0], history)
    axes[0, 1].plot(updates, [row["entropy"] for row in history], color="#0072B2")
    axes[0, 1].set_ylabel("entropy, bits a layer", color="#0072B2")
    axes[0, 1].set_ylim(0, 1.05 * history[0]["entropy"])
    beside = axes[0, 1].twinx()
    beside.plot(updates, [row["temperature"] for row in history], color="#E69F00", linestyle="--")
    beside.set_ylabel("temperature", color="#E69F00")
    beside.set_ylim(bottom=0)
    axes[1, 0].plot(updates, [row["expected_latency"] for row in history], color="#009E73", label="expected")
    axes[1, 0].axhline(baseline_latency, color="0.45", linestyle="--", label="baseline")
    axes[1, 0].set_ylabel("latency, ms")
    layers = [split_sublayers(row["by_layer"]) for row in history]
    for number, name in enumerate(sorted({name for row in layers for name in row}, key=_place)):
        counts = [row.count(name) for row in layers]
        style = {"color": read_sublayer(name).kind.colour, "linestyle": "-" if len(name) == 1 else LINES[number % 3]}
        axes[1, 1].step(updates, counts, where="post", label=_label(name), **style)
    axes[1, 1].set_ylabel("layers that prefer it")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set(xlabel="updates", ylim=(0, None))
        axis.legend(fontsize=8)
    write_picture(figure, path)


def _label(name: str) -> str:
    """``self-attention``, and its settings if it has any."""
    sublayer = read_sublayer(name)
    return sublayer.kind.name + sublayer.text[1:]


def _place(name: str) -> tuple[int, str]:
    """Sort key: the order of the table of kinds."""
    return kinds().index(read_sublayer(name).kind), name


def _draw_loss(axis, history: Sequence[dict[str, Any]]) -> None:
    for stage, (mark, colour, label) in STAGES.items():
        rows = [(row["update"], row["loss"]) for row in history if row["stage"] == stage]
        if rows:
            axis.plot(*zip(*rows, strict=True), marker=mark, markersize=3, color=colour, label=label)
    axis.set_ylabel("loss, bits a prediction")
    axis.legend(fontsize=8)
