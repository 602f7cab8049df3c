"""The picture of a comparison: perplexity against latency and against the number of self-attention sublayers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lazyformer_fairseq.patterns.kinds import DISTRIBUTION, kinds

# Okabe and Ito's colours, which colour-blind readers tell apart; each also has a mark of its own.
LOOKS = tuple(zip(("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"), "os^DvP", strict=True))


def draw(models: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """Writes a PNG of two panels; a large mark is a median, bars its spread, a small mark one seed.

    Args:
        models: as in results.json.
        title: names the training and evaluation.
    """
    figure, (by_latency, by_attention) = pyplot.subplots(1, 2, figsize=(10, 4.4), sharey=True, layout="constrained")
    attention = [kind for kind in kinds() if DISTRIBUTION in kind.hands_on]
    letters = [kind.letter for kind in attention]
    places = _places([sum(model["sublayers"].get(letter, 0) for letter in letters) for model in models.values()])
    for number, ((name, model), place) in enumerate(zip(models.items(), places, strict=True)):
        colour, mark = LOOKS[number % len(LOOKS)]
        look = {"color": colour, "marker": mark}
        latency = model["latency_milliseconds"]
        by_latency.hlines(model["test_perplexity"]["median"], latency["low"], latency["high"], color=colour)
        _draw_model(by_latency, latency["median"], model, look, name)
        _draw_model(by_attention, place, model, look, name)
    by_latency.set_xlabel("latency of a segment at batch 1, ms (quartiles)")
    by_latency.set_ylabel("test perplexity (range of the seeds)")
    by_latency.set_xlim(left=0)
    names = " or ".join(f"{kind.name} sublayers ({kind.letter})" for kind in attention)
    by_attention.set_xlabel(names)
    by_attention.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (by_latency, by_attention):
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=11)
    handles, labels = by_latency.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(models), 4), frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _places(counts: Sequence[int]) -> list[float]:
    """Where each model stands on an axis of counts: models of equal counts side by side, so that none hides another."""
    found = []
    for number, count in enumerate(counts):
        same, before = counts.count(count), counts[:number].count(count)
        found.append(count + 0.15 * (before - (same - 1) / 2))
    return found


def _draw_model(axis: Axes, x: float, model: Mapping[str, Any], look: Mapping[str, str], name: str) -> None:
    perplexity = model["test_perplexity"]
    seeds = [run["test_perplexity"] for run in model["runs"].values()]
    axis.plot([x] * len(seeds), seeds, linestyle="", markersize=4, alpha=0.6, **look)
    axis.vlines(x, perplexity["low"], perplexity["high"], color=look["color"])
    axis.plot([x], [perplexity["median"]], linestyle="", markersize=9, label=name, **look)
