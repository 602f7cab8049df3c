"""The report on a comparison, generated from results.json alone: a verdict, two tables, notes and a plot."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

import numpy as np
from matplotlib.lines import Line2D

from lazyformer_fairseq.evaluation.costs.machine import short_device_name
from lazyformer_fairseq.experiments.compare import results
from lazyformer_fairseq.experiments.compare.settings import AXES
from lazyformer_fairseq.experiments.yardsticks import Yardsticks
from lazyformer_fairseq.report.figures import draw_band, handles, label_cost, picture, styles
from lazyformer_fairseq.report.numbers import NOTHING, noise_warning, number, with_range
from lazyformer_fairseq.report.page import Notes, write_page
from lazyformer_fairseq.report.tables import Table

NOT_REACHED = "not reached"
NAMES_OF_OTHERS = {"fairseq": "fairseq's own model", "huggingface": "Hugging Face's own model"}
AS_PLANNED = 0.2  # runs that miss the budget by a larger fraction than this get a note
EQUAL = 0.02  # parameter counts within this fraction count as equal, because integer widths rule out an exact match


def write_report(
    comparison: results.Comparison,
    folder: Path,
    target: results.Target = results.BASELINE,
    against: Sequence[str] = AXES,
) -> str:
    """Write `table.md` and `curves.png` atomically, and return the report as Markdown for the terminal.

    Args:
        comparison: the comparison.
        folder: the folder to write to.
        target: a metric value, or ``baseline`` for the final value of each model's baseline.
        against: the horizontal axes of the plot's panels, from AXES.
    """
    times = results.times_to_target(comparison, target)
    draw_curves(comparison, times, folder / "curves.png", against)
    blocks = [
        *(verdict(comparison, times, baseline) for baseline in comparison.baselines),
        cost_table(comparison),
        time_table(times),
        Notes(list(notes(comparison))),
        "Patterns:",
        Notes(list(_patterns(comparison))),
    ]
    return write_page(blocks, folder, "table")


def describe(comparison: results.Comparison) -> str:
    """Describe the sizes, seeds and device that all models have in common, for a plot title."""
    sizes = comparison.facts["settings"].get("sizes", {})
    parts = []
    for name, label in (("embed_dim", "width"), ("tokens_per_sample", "n ="), ("tgt_len", "n =")):
        if name in sizes:
            parts.append(f"{label} {sizes[name]:,}")
    counts = sorted({len(model.runs) for model in comparison.models.values()})
    parts.append(f"seeds: {' to '.join(map(str, counts))}")
    parts.append(short_device_name(comparison.facts["machine"]["device"]))
    return "; ".join(parts)


def verdict(comparison: results.Comparison, times: Sequence[results.TimeToTarget], baseline: str) -> str:
    """Return a sentence that states the target and each model's time to the target, relative to `baseline`."""
    found = []
    target = 0.0
    for time in times:
        if time.model == baseline:
            target = time.target
        elif comparison.longest(time.model).baseline == baseline:
            found.append(f"{time.model} {_ratio_with_range(time.ratios.get('seconds'))} ({time.clock} clock)")
    model = comparison.longest(baseline)
    seconds = float(np.median(model.totals("seconds")))
    sentence = (
        f"Target: {target:.4f} ({comparison.measure.label}); {baseline} trained for {seconds:,.1f} s (median; seeds: "
        f"{len(model.runs)})."
    )
    if found:
        sentence += f" Time to the target, relative to {baseline}: {'; '.join(found)}."
    return sentence


def _patterns(comparison: results.Comparison) -> Iterator[str]:
    for family in comparison.families:
        facts = comparison.longest(family).facts
        if facts.get("pattern"):
            yield f"{family}: `{facts['pattern']}`"
        else:
            yield f"{family}: {NAMES_OF_OTHERS.get(facts['what'], 'an arch')}"


def cost_table(comparison: results.Comparison) -> Table:
    """Return the table of model sizes, training costs and final metrics."""
    measure = comparison.measure
    rows = []
    for model in comparison.models.values():
        facts = model.facts
        row = {
            "model": model.name,
            "parameters": f"{facts['parameters']:,}",
            "updates": f"{facts['updates']:,}",
            "ms": number(facts["milliseconds_per_update"]["median"]),
            "s": number(float(np.median(model.totals("seconds")))),
            "MiB": number(facts["peak_memory_bytes"] / results.MEBIBYTE),
            measure.label: with_range(model.finals(measure.name)),
        }
        of_test = model.finals(f"test_{measure.name}")
        if of_test:
            row["test"] = with_range(of_test).split()[0]
        if "latency_milliseconds" in facts:
            row["latency, ms"] = number(facts["latency_milliseconds"]["median"])
        rows.append(row)
    headers = list(dict.fromkeys(header for row in rows for header in row))
    complete_rows = [{header: row.get(header, NOTHING) for header in headers} for row in rows]
    return Table("Cost and quality", complete_rows)


def time_table(times: Sequence[results.TimeToTarget]) -> Table:
    """Return the table of each family's costs of reaching the target, and of their ratios to the baseline's costs."""
    rows = []
    for time in times:
        seconds = time.median("seconds")
        reached = sum(costs["seconds"] < results.NEVER for costs in time.times.values())
        ratio = time.ratios.get("seconds")
        row = {
            "model": time.model,
            "clock": time.clock,
            "seconds": NOT_REACHED,
            "ratio (range)": _ratio_with_range(ratio),
            "95% bounds": NOTHING,
            "updates": _ratio(time.ratios.get("updates")),
            "FLOPs": _ratio(time.ratios.get("flops")),
            "seeds": f"{reached} of {len(time.times)}",
        }
        if seconds < results.NEVER:
            row["seconds"] = number(seconds)
        if ratio and ratio.bounds:
            row["95% bounds"] = "{:.3f} to {:.3f}".format(*ratio.bounds)
        rows.append(row)
    return Table("Time to the target", rows, left=("clock",))


def _ratio(ratio: Optional[results.Ratio]) -> str:
    if ratio is None or ratio.median == results.NEVER:
        return NOTHING
    return f"{ratio.median:.3f}"


def _ratio_with_range(ratio: Optional[results.Ratio]) -> str:
    if ratio is None:
        return NOTHING
    if ratio.reached == 0:
        return NOT_REACHED
    values = (ratio.median, ratio.low, ratio.high)
    middle, low, high = (f"{value:.3f}".replace("inf", "never") for value in values)
    if len(ratio.by_seed) < 2:
        return middle
    return f"{middle} ({low} to {high})"


# --- Notes


def notes(comparison: results.Comparison) -> Iterator[str]:
    """Yield the notes that are needed to interpret the tables."""
    yield from _of_yardsticks(comparison)
    yield from _budget_notes(comparison)
    timings = {name: model.facts["milliseconds_per_update"] for name, model in comparison.models.items()}
    yield from noise_warning(timings)
    yield from _of_parameters(comparison)
    yield from _of_rates(comparison)
    facts = comparison.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    yield f"{facts['machine']['device']}; {versions}."
    if len(facts.get("machines", ())) > 1:
        yield (
            "Seconds measured on different machines cannot be compared. Each ratio is computed within one folder and "
            "therefore within one machine."
        )
    sums = ", ".join(f"{name} {sha256[:12]}" for name, sha256 in facts["data"]["checksums"].items())
    yield f"SHA-256 of the data: {sums}."


def _of_yardsticks(comparison: results.Comparison) -> Iterator[str]:
    measure = comparison.measure
    found = comparison.facts["data"].get("yardsticks")
    if found is None:
        return
    yardsticks = Yardsticks(**found)
    losses = {}
    for name, model in comparison.models.items():
        finals = model.finals(measure.name)
        losses[name] = float(np.median(finals))
    if measure.name == "perplexity":
        bits = {name: float(np.log2(loss)) for name, loss in losses.items()}
        yield from yardsticks.warn(bits)
        yield yardsticks.describe(measure.label, np.exp2)
    else:
        yield from yardsticks.warn(losses)
        yield yardsticks.describe(measure.label)


def _budget_notes(comparison: results.Comparison) -> Iterator[str]:
    """Yield a note that names the runs that clearly missed their time budget, if any did.

    A trial before training converts the budget to a number of updates, so a later change in the machine's load makes
    runs longer or shorter than the budget.
    """
    budget = comparison.facts["settings"].get("budget")
    if budget is None:
        return
    odd = []
    for name, model in comparison.models.items():
        wanted = model.share * budget
        took = float(np.median(model.totals("seconds")))
        if abs(took / wanted - 1) > AS_PLANNED:
            odd.append(f"{name} took {took:,.1f} s instead of {wanted:,.1f} s")
    if odd:
        yield (
            f"Some runs missed their share of the budget of {budget:,.1f} s: {'; '.join(odd)}. The update counts "
            "come from a trial before training, and the load on the machine has changed since then. To use the budget "
            "exactly, run the comparison again in a different folder with nothing else running on the machine."
        )


def _of_parameters(comparison: results.Comparison) -> Iterator[str]:
    for baseline in comparison.baselines:
        wanted = comparison.longest(baseline).facts["parameters_without_embeddings"]
        unequal = []
        for family in comparison.families:
            model = comparison.longest(family)
            surplus = model.facts["parameters_without_embeddings"] / wanted - 1
            if model.baseline == baseline and abs(surplus) > EQUAL:
                unequal.append(f"{family} {surplus:+.1%}")
        if unequal:
            yield f"Parameters without embeddings, relative to {baseline}: {', '.join(unequal)}."


def _of_rates(comparison: results.Comparison) -> Iterator[str]:
    """Describe the learning rate of each family's longest run, which the family's shorter runs use too."""
    described = []
    counts = []
    at_edge = []
    for family in comparison.families:
        facts = comparison.longest(family).facts
        tried = sorted({one["rate"] for one in facts["tries"]})
        counts.append(len(tried))
        described.append(f"{family} {facts['rate']:g}")
        if len(tried) > 1:
            described[-1] += f" (of {', '.join(f'{rate:g}' for rate in tried)})"
            if facts["rate"] in (tried[0], tried[-1]):
                at_edge.append(f"{family} {facts['rate']:g}")
    yield f"Learning rates: {'; '.join(described)}."
    if len(set(counts)) > 1:
        yield "Not all models tried the same number of learning rates, so the ratios are not strictly comparable."
    if at_edge:
        yield (
            "The best learning rate is at the edge of the grid, so a rate beyond it may be better: "
            f"{', '.join(at_edge)}."
        )


# --- The plot

BEGINNING = 0.2  # fraction of a run; higher losses before this point are cut off because they would flatten the rest
HOLLOW = {"markerfacecolor": "white"}  # marks a shorter run
DASHED = {"color": "0.3", "linestyle": "--", "linewidth": 0.9}


def draw_curves(
    comparison: results.Comparison,
    times: Sequence[results.TimeToTarget],
    path: Path,
    against: Sequence[str] = AXES,
) -> None:
    """Plot the metric against each cost in its own panel: lines show medians over seeds; bands show the full range.

    A dashed line shows the target; a hollow marker shows the end of a shorter run.

    Args:
        comparison: the comparison.
        times: the times to the target.
        path: the PNG file.
        against: the horizontal axes of the panels, from AXES.
    """
    style_of = styles(comparison.families)
    measure = comparison.measure
    targets = sorted({time.target for time in times})  # there can be several if folders were joined
    values = ", ".join(f"{target:.2f}" for target in targets)
    legend = [*handles(style_of), Line2D([], [], label=f"target: {values}", **DASHED)]
    if any(len(models) > 1 for models in comparison.families.values()):
        mark = {"marker": "o", "linestyle": "", "color": "0.4", "markersize": 6, **HOLLOW}
        legend.append(Line2D([], [], label="end of a shorter run", **mark))
    size = (4.1 + 2 / len(against), 4.2)
    title = describe(comparison)
    with picture(path, columns=len(against), panel=size, title=title, legend=legend, sharey=True) as (panels,):
        for cost, axis in zip(against, panels, strict=True):
            for family, models in comparison.families.items():
                spent, metric = median_curve(models[-1], cost, measure.name)
                draw_band(axis, spent, metric, style_of[family])
                for shorter in models[:-1]:
                    end = np.median(shorter.finals(measure.name))
                    where = np.median(shorter.totals(cost))
                    axis.plot(where, end, linestyle="", markersize=6, zorder=3, **style_of[family], **HOLLOW)
            for target in targets:
                axis.axhline(target, **DASHED)
            label_cost(axis, cost)
        panels[0].set_ylim(*_limits(comparison, targets))
        panels[0].set_ylabel(f"{measure.label}, held out")


def median_curve(model: results.Model, cost: str, measure: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the median cost over seeds, (E,), and each seed's metric, (seeds, E), at each point.

    The points are the updates at which any seed was evaluated, within the range covered by all seeds.
    """
    curves = [run.curve for run in model.runs.values()]
    first = max(curve["updates"][0] for curve in curves)
    last = min(curve["updates"][-1] for curve in curves)
    updates = np.unique(np.concatenate([curve["updates"] for curve in curves]))
    updates = updates[(updates >= first) & (updates <= last)]
    costs = [np.interp(updates, curve["updates"], curve[cost]) for curve in curves]
    metrics = [np.interp(updates, curve["updates"], curve[measure]) for curve in curves]
    return np.median(costs, axis=0), np.array(metrics)


def _limits(comparison: results.Comparison, targets: Sequence[float]) -> tuple[float, float]:
    """Return the limits of the metric's axis: the best value, and the worst one after the start of training."""
    seen = list(targets)
    for models in comparison.families.values():
        for model in models:
            seen += model.finals(comparison.measure.name)
        updates, values = median_curve(models[-1], "updates", comparison.measure.name)
        medians = np.median(values, axis=0)
        is_after_start = updates >= BEGINNING * updates[-1]
        seen += list(medians[is_after_start])
    finite = [value for value in seen if np.isfinite(value)]
    margin = 0.05 * (max(finite) - min(finite)) or 0.1
    return min(finite) - margin, max(finite) + margin
