"""The report of a comparison, from its results.json alone: tables, what a reader must know beside them, pictures."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
from matplotlib.lines import Line2D

from lazyformer_fairseq.evaluation.costs.machine import trade_name
from lazyformer_fairseq.experiments.compare import results
from lazyformer_fairseq.experiments.compare.settings import AXES
from lazyformer_fairseq.report.figures import draw_band, draw_spread, handles, label_cost, picture, styles
from lazyformer_fairseq.report.numbers import NOTHING, number, with_range
from lazyformer_fairseq.report.page import Notes, write_page
from lazyformer_fairseq.report.tables import Table, write_csv

NOT_REACHED = "not reached"
SPREADS = ("milliseconds_per_update", "latency_milliseconds")
OF_OTHERS = {"fairseq": "fairseq's own model", "huggingface": "Hugging Face's own model"}
CLEARLY_BELOW = 0.1  # bits; less is within what the choice of validation text makes
AS_PLANNED = 0.2  # of the budget, by which trainings may miss it
EQUAL = 0.02  # parameters that differ by no more are equal: a width cannot be a fraction
CLOCKS = (
    "`curve`: when the validation of the longest training first was as good as the target, on a straight line between "
    "two evaluations. The learning rate is still high then, which hides what a model has learned.",
    "`whole`: the shortest training (NAME, NAME@0.7, ...) whose end was as good as the target, its schedule run out; "
    "as fine as the shares that were trained.",
)
COLUMNS = (
    "ms: of an update, median; s: of the whole training, without validation; MiB: peak memory of an update. A model is "
    "on the front of one of these where no other is as good in it and in quality, and better in one."
)
BOUNDS = (
    "A ratio is the median over pairs of equal seed, in brackets the lowest and the highest; 95% bounds are Student's, "
    f"of the geometric mean, where {results.FEWEST_FOR_BOUNDS} seeds or more all reached the target."
)


def write_report(content: Mapping[str, Any], folder: Path, target: results.Target = results.BASELINE) -> str:
    """The report of results.json's content; see :func:`write_files`."""
    return write_files(results.comparison_of(content), folder, target)


def write_files(
    comparison: results.Comparison,
    folder: Path,
    target: results.Target = results.BASELINE,
    against: Sequence[str] = AXES,
) -> str:
    """Writes tables and pictures, each whole; returns the tables for a reader, in Markdown.

    `table.md`, `table.tex` and `table.csv` have the models, the first two also the times to the target and what a
    reader must know; `curves.png`, `times.png` and `fronts.png` show them.

    Args:
        target: a value of the measure, or ``baseline`` for where the baseline ended.
        against: of AXES, panels of the curves.
    """
    times = results.times_to_target(comparison, target)
    found = results.fronts(comparison)
    title = "; ".join(describe(comparison))
    draw_curves(comparison, times, title, folder / "curves.png", against)
    draw_times(times, title, folder / "times.png")
    draw_fronts(comparison, found, title, folder / "fronts.png")
    write_csv(csv_models(comparison, found), folder / "table.csv")
    said = (Notes(notes(comparison, times, target)), "Patterns:", Notes(list(_patterns(comparison))))
    return write_page([cost_table(comparison, found), time_table(times), *said], folder, "table", with_latex=True)


def describe(comparison: results.Comparison) -> Iterator[str]:
    """What all models shared, for the title of a picture."""
    facts = comparison.facts
    seeds = {len(model.runs) for model in comparison.models.values()}
    sizes = facts["settings"].get("sizes", {})
    for name, label in (("embed_dim", "width"), ("tokens_per_sample", "n ="), ("tgt_len", "n =")):
        if name in sizes:
            yield f"{label} {sizes[name]:,}"
    yield f"{min(seeds)} seed{'s' * (min(seeds) > 1)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)} seeds"
    yield trade_name(facts["machine"]["device"])


def _patterns(comparison: results.Comparison) -> Iterator[str]:
    for family, models in comparison.families.items():
        facts = models[-1].facts
        if facts.get("pattern"):
            pattern = f"`{facts['pattern']}`"
        else:
            pattern = OF_OTHERS.get(facts["what"], "an arch")
        yield f"{family}: {pattern}"


def cost_table(comparison: results.Comparison, fronts: Sequence[results.Front]) -> Table:
    """Every model: its size, what its training cost, how good it became, and the fronts that it is on."""
    measure = comparison.measure
    rows = []
    for model in comparison.models.values():
        facts = model.facts
        row = {
            "model": model.name,
            "parameters": f"{facts['parameters']:,}",
            "updates": f"{facts['updates']:,}",
            "ms": number(facts["milliseconds_per_update"]["median"]),
            "s": number(float(np.median(model.wholes("seconds")))),
            "MiB": number(facts["peak_memory_bytes"] / results.MEBIBYTE),
            measure.label: with_range(model.finals(measure.name)),
        }
        if of_test := model.finals(f"test_{measure.name}"):
            row["of test"] = with_range(of_test).split()[0]
        if "latency_milliseconds" in facts:
            row["latency, ms"] = number(facts["latency_milliseconds"]["median"])
        rows.append(row | {"on front of": ", ".join(front.unit for front in fronts if model.name in front.members)})
    headers = dict.fromkeys(header for row in rows for header in row)
    return Table("Cost and quality", [{header: row.get(header, NOTHING) for header in headers} for row in rows])


def time_table(times: Sequence[results.TimeToTarget]) -> Table:
    """What it took to reach the target, as a share of the baseline's own time."""
    rows = [
        {
            "model": time.model,
            "clock": time.clock,
            "seconds": number(middle) if (middle := time.median("seconds")) < results.NEVER else NOT_REACHED,
            "ratio (range)": _with_ends(time.ratios.get("seconds")),
            "95% bounds": _bounds(time.ratios.get("seconds")),
            "updates": _ratio(time.ratios.get("updates")),
            "FLOPs": _ratio(time.ratios.get("flops")),
            "seeds": f"{sum(costs['seconds'] < results.NEVER for costs in time.times.values())} of {len(time.times)}",
        }
        for time in times
    ]
    return Table("Time to the target", rows, left=("clock",))


def csv_models(comparison: results.Comparison, fronts: Sequence[results.Front]) -> list[dict[str, Any]]:
    """A row a model, in full precision."""
    measures = dict.fromkeys(
        name for model in comparison.models.values() for run in model.runs.values() for name in run.final
    )
    return [
        {
            **{"model": model.name, "of": model.family, "share": model.share, "baseline": model.baseline},
            **{"what": model.facts["what"], "pattern": model.facts["pattern"]},
            **model.facts["sublayers"],
            **{key: value for key, value in model.facts.items() if isinstance(value, (int, float)) and key != "share"},
            **{name: model.facts[name]["median"] for name in SPREADS if model.facts.get(name)},
            **{"tries": len(model.facts["tries"]), "seeds": len(model.runs)},
            **_with_columns("seconds", model.wholes("seconds")),
            **{column: value for name in measures for column, value in _with_columns(name, model.finals(name)).items()},
            **{f"on_front_of_{front.name}": int(model.name in front.members) for front in fronts},
        }
        for model in comparison.models.values()
    ]


def _with_columns(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest; no column where there are no values."""
    if not values:
        return {}
    return {name: float(np.median(values)), f"{name}_lowest": min(values), f"{name}_highest": max(values)}


def _ratio(ratio: Optional[results.Ratio]) -> str:
    if ratio is None or ratio.median == results.NEVER:
        return NOTHING
    return f"{ratio.median:.3f}"


def _with_ends(ratio: Optional[results.Ratio]) -> str:
    if ratio is None:
        return NOTHING
    middle, low, high = (
        f"{end:.3f}" if end < results.NEVER else "never" for end in (ratio.median, ratio.low, ratio.high)
    )
    if ratio.reached == 0:
        return NOT_REACHED
    if len(ratio.by_seed) < 2:
        return middle
    return f"{middle} ({low} to {high})"


def _bounds(ratio: Optional[results.Ratio]) -> str:
    if ratio is None:
        bounds = None
    else:
        bounds = ratio.bounds
    if bounds is None:
        return NOTHING
    return f"{bounds[0]:.3f} to {bounds[1]:.3f}"


def notes(comparison: results.Comparison, times: Sequence[results.TimeToTarget], target: results.Target) -> list[str]:
    """Sentences, in the order of a reader's questions."""
    clocks = {time.clock for time in times}
    return [
        *_of_unigram(comparison),
        *_of_budget(comparison),
        COLUMNS,
        *(_of_target(comparison, baseline, target) for baseline in comparison.baselines),
        *(sentence for sentence in CLOCKS if sentence.split("`")[1] in clocks),
        BOUNDS,
        *_of_data(comparison),
        *_of_shortest(comparison, times),
        *_of_seeds(comparison),
        *_of_parameters(comparison),
        *_of_rates(comparison),
        *_of_models_from_elsewhere(comparison),
        *_of_machines(comparison),
    ]


def _of_target(comparison: results.Comparison, baseline: str, target: results.Target) -> str:
    measure = comparison.measure
    model = comparison.longest(baseline)
    value = results.target_value(comparison, baseline, target)
    if target != results.BASELINE:
        return f"Target: {value:g} ({measure.label}). Ratios are to the time that {baseline} took to reach it."
    seconds = float(np.median(model.wholes("seconds")))
    seeds = f"{len(model.runs)} seed{'s' * (len(model.runs) > 1)}"
    said = (
        f"Target: {value:.4f} ({measure.label}), the median over {seeds} of {baseline}'s end. {baseline}'s own "
        f"time is its whole training, {seconds:,.1f} seconds: it reaches its end there by definition"
    )
    touched = [
        results.first_crossing(run.curve["updates"], run.curve[measure.name], value, measure) / run.whole("updates")
        for run in model.runs.values()
    ]
    before = float(np.median(np.minimum(touched, 1)))  # of its training, median over seeds
    if before == 1:
        return f"{said}."
    return f"{said}, though its curve first touches the target at {before:.3f} of it."


def of_frequencies(loss: float, unit: str) -> str:
    """What a loss is to be seen beside."""
    return (
        f"Unigram loss: {loss:.2f} ({unit}), that of how often each occurs in the training text, and of nothing else."
    )


def has_shown_nothing(losses: Mapping[str, float], unigram: float) -> str:
    """Return a sentence that names the models whose loss is not clearly below the unigram loss; "" if there are none.

    Args:
        losses: the loss of each model, in bits.
        unigram: the unigram loss, in bits.
    """
    names = [name for name, loss in losses.items() if not loss < unigram - CLEARLY_BELOW]  # NaN is not below either
    if not names:
        return ""
    return (
        f"Not below the unigram loss by {CLEARLY_BELOW:g} bits: {', '.join(names)}. They have learned no more than how "
        "often each piece occurs, so differences between them say nothing about the patterns: train longer."
    )


def _of_unigram(comparison: results.Comparison) -> Iterator[str]:
    measure = comparison.measure
    data = comparison.facts["data"]
    if found := data.get("frequencies_bits"):
        losses = {name: float(np.median(model.finals(measure.name))) for name, model in comparison.models.items()}
        if "frequencies_perplexity" in data:
            losses = {name: float(np.log2(loss)) for name, loss in losses.items()}
        if sentence := has_shown_nothing(losses, found["valid"]):
            yield sentence


def _of_budget(comparison: results.Comparison) -> Iterator[str]:
    """Whether trainings took the time that they were to take by the trial, of the budget or of a share of it."""
    budget = comparison.facts["settings"].get("budget")
    if budget is None:
        return
    wanted = {name: model.share * budget for name, model in comparison.models.items()}
    took = {name: float(np.median(model.wholes("seconds"))) for name, model in comparison.models.items()}
    odd = [name for name, seconds in took.items() if abs(seconds / wanted[name] - 1) > AS_PLANNED]
    if odd:
        listed = "; ".join(f"{name} took {took[name]:,.1f} s of {wanted[name]:,.1f} s" for name in odd)
        yield (
            f"The trainings did not take the budget of {budget:,.1f} s: {listed}. The numbers of updates come from a "
            "trial before the training, when the machine was more or less busy than in the training. For trainings "
            "that take the budget, compare again in another folder with nothing else running."
        )


def _of_data(comparison: results.Comparison) -> Iterator[str]:
    data = comparison.facts["data"]
    if found := data.get("frequencies_perplexity", data.get("frequencies_bits")):
        yield of_frequencies(found["valid"], comparison.measure.label)


def _of_shortest(comparison: results.Comparison, times: Sequence[results.TimeToTarget]) -> Iterator[str]:
    names = [
        time.model
        for time in times
        if time.clock == "whole" and max(time.shares.values()) == comparison.families[time.model][0].share
    ]
    if names:
        yield f"No shorter training of {', '.join(names)} was tried than reached the target: it may take less."


def _of_seeds(comparison: results.Comparison) -> Iterator[str]:
    few = [model.name for model in comparison.models.values() if len(model.runs) < results.FEWEST_FOR_BOUNDS]
    if few:
        yield f"Fewer than {results.FEWEST_FOR_BOUNDS} seeds, so the spread is not known: {', '.join(few)}."


def _of_parameters(comparison: results.Comparison) -> Iterator[str]:
    counts = {name: each[-1].facts["parameters_without_embeddings"] for name, each in comparison.families.items()}
    for baseline in comparison.baselines:
        compared = [family for family, models in comparison.families.items() if models[-1].baseline == baseline]
        others = {family: counts[family] / counts[baseline] - 1 for family in compared}
        unequal = {family: more for family, more in others.items() if abs(more) > EQUAL}
        if unequal:
            listed = ", ".join(f"{family} {more:+.1%}" for family, more in unequal.items())
            yield f"Parameters, without embeddings, that are not {baseline}'s: {listed}."
        elif len(others) > 1:
            yield f"Parameters, without embeddings: all within {EQUAL:.0%} of {baseline}'s."


def _of_rates(comparison: results.Comparison) -> Iterator[str]:
    """Of each family's longest training, whose rate the shorter ones share."""
    models = [models[-1] for models in comparison.families.values()]
    tried = {model.name: sorted({one["rate"] for one in model.facts["tries"]}) for model in models}
    listed = {name: ", ".join(f"{rate:g}" for rate in rates) for name, rates in tried.items()}
    out_of = {name: f" (of {listed[name]})" if len(rates) > 1 else "" for name, rates in tried.items()}
    described = (f"{model.name} {model.facts['rate']:g}{out_of[model.name]}" for model in models)
    yield f"Learning rates: {'; '.join(described)}."
    counts = {len(rates) for rates in tried.values()}
    if len(counts) > 1:
        counted = ", ".join(f"{name} {len(rates)}" for name, rates in tried.items())
        yield f"Not as many rates tried for each: {counted}. Ratios between those are not on equal terms."
    elif counts <= {0, 1}:
        yield "One learning rate alone was tried for each model; another one may suit some of them better."
    for edge, beyond, end in (("lowest", "lower", 0), ("highest", "higher", -1)):
        several = [model for model in models if len(tried[model.name]) > 1]
        if names := [model.name for model in several if model.facts["rate"] == tried[model.name][end]]:
            yield f"The {edge} rate that was tried was the best, so a {beyond} one may be better: {', '.join(names)}."


def _of_models_from_elsewhere(comparison: results.Comparison) -> Iterator[str]:
    foreign = [name for name, models in comparison.families.items() if models[-1].facts["what"] in OF_OTHERS]
    post_norm = [name for name in foreign if comparison.families[name][-1].facts.get("arch", "bert") == "bert"]
    settings = comparison.facts["settings"]
    if foreign:
        buckets = settings.get("sizes", {}).get("relative_position_buckets")
        if buckets:
            bias = f", and none of the relative positions ({buckets} buckets) that models of ours have"
        else:
            bias = ""
        yield f"Initialised by code of their own{bias}: {', '.join(foreign)}."
    if post_norm and settings.get("normalize_before"):
        yield f"LayerNorms behind sublayers, where others have them before: {', '.join(post_norm)}."


def _of_machines(comparison: results.Comparison) -> Iterator[str]:
    facts = comparison.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    yield f"{facts['machine']['device']}; {versions}."
    if len(facts.get("machines", ())) > 1:
        yield "Seconds of different machines do not compare; ratios are within a folder, hence within a machine."
    sums = ", ".join(f"{name} {sha256[:12]}" for name, sha256 in facts["data"]["checksums"].items())
    yield f"Data, by SHA-256: {sums}."


BEGINNING = 0.2  # of a training: what is worse than the curves were then is left out, or it would flatten the rest
HOLLOW = {"markerfacecolor": "white"}  # a shorter training


def draw_curves(
    comparison: results.Comparison,
    times: Sequence[results.TimeToTarget],
    title: str,
    path: Path,
    against: Sequence[str] = AXES,
) -> None:
    """The measure against costs, a panel each: medians, bands from lowest to highest over seeds.

    A dashed line is the target, a large mark where a median run first meets it, a hollow one the end of a shorter
    training of the same model.
    """
    style_of = styles(comparison.families)
    measure = comparison.measure
    targets = {time.target for time in times}
    dashed = {"color": "0.3", "linestyle": "--", "linewidth": 0.9}
    if targets:
        of_target = [Line2D([], [], label="target", **dashed), _mark("first meets it", 9)]
    else:
        of_target = []
    legend = [*handles(style_of), *of_target, *_of_shorter(comparison)]
    with picture(path, 1, len(against), (4.1 + 2 / len(against), 4.2), title, legend, sharey=True) as (panels,):
        for cost, axis in zip(against, panels, strict=True):
            for family, models in comparison.families.items():
                draw_band(axis, *typical(models[-1], cost, measure.name), style_of[family])
                for shorter in models[:-1]:
                    end = np.median(shorter.finals(measure.name))
                    where = np.median(shorter.wholes(cost))
                    axis.plot(where, end, linestyle="", markersize=6, zorder=3, **style_of[family], **HOLLOW)
            for time in (time for time in times if time.clock == "curve" and time.median(cost) < results.NEVER):
                style = style_of[time.model]
                axis.plot(time.median(cost), time.target, linestyle="", markersize=9, zorder=4, **style)
            for target in targets:
                axis.axhline(target, **dashed)
            label_cost(axis, cost)
        panels[0].set_ylim(*_limits(comparison, list(targets)))
        panels[0].set_ylabel(f"{measure.label}, held out")


def typical(model: results.Model, cost: str, measure: str) -> tuple[np.ndarray, np.ndarray]:
    """What a run of median speed had spent, (E,), and the measure of each seed then, (seeds, E).

    The points are those at which any seed was evaluated, as far as all seeds came.
    """
    curves = [run.curve for run in model.runs.values()]
    first, last = (pick(curve["updates"][end] for curve in curves) for pick, end in ((max, 0), (min, -1)))
    updates = np.unique(np.concatenate([curve["updates"] for curve in curves]))
    updates = updates[(updates >= first) & (updates <= last)]
    spent = np.median([np.interp(updates, curve["updates"], curve[cost]) for curve in curves], axis=0)
    return spent, np.array([np.interp(updates, curve["updates"], curve[measure]) for curve in curves])


def draw_times(times: Sequence[results.TimeToTarget], title: str, path: Path) -> None:
    """The share of the baseline's own seconds that each model needed: medians, bars from lowest to highest seed."""
    shown = [(time, time.ratios["seconds"]) for time in times if "seconds" in time.ratios]
    shown.sort(key=lambda pair: -pair[1].median)
    style_of = styles(dict.fromkeys(time.model for time in times))
    widest = 1.12 * max([1.0, *(end for _, ratio in shown for end in ratio.by_seed.values() if end < results.NEVER)])
    several = len({time.clock for time, _ in shown}) > 1
    with picture(path, panel=(8, 1.4 + 0.42 * max(len(shown), 1)), title=title) as ((axis,),):
        for place, (time, ratio) in enumerate(shown):
            colour = style_of[time.model]["color"]
            is_reached = ratio.median < results.NEVER
            if is_reached:
                bar = {"color": colour}
            else:
                bar = {"color": "none", "hatch": "//"}
            alpha = 0.75 if time.clock == "curve" else 0.4
            length = ratio.median if is_reached else widest
            axis.barh(place, length, height=0.62, alpha=alpha, edgecolor=colour, linewidth=0.8, **bar)
            if is_reached:
                axis.hlines(place, ratio.low, min(ratio.high, widest), color="0.15", linewidth=1.6)
                axis.plot([ratio.median], [place], marker="|", markersize=12, color="0.15")
            seeds = len(ratio.by_seed)
            if 0 < ratio.reached < seeds:
                by_some = f"by {ratio.reached} of {seeds} seeds"
            else:
                by_some = ""
            if is_reached:
                said = f"{ratio.median:.2f} {by_some}"
            elif by_some:
                said = f"reached {by_some}"
            else:
                said = "not reached"
            axis.text(0.01 * widest, place, said.strip(), va="center", fontsize=9,
                      bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1})  # fmt: skip
        axis.axvline(1, color="0.3", linestyle="--", linewidth=0.9)
        labels = [f"{time.model} ({time.clock})" if several else time.model for time, _ in shown]
        axis.set_yticks(range(len(shown)), labels)
        axis.set_xlim(0, widest)
        axis.set_xlabel("seconds to the target, in units of the baseline's own (bars: lowest to highest seed)")


def draw_fronts(comparison: results.Comparison, fronts: Sequence[results.Front], title: str, path: Path) -> None:
    """The final measure against each cost, a panel each; a line joins the models that no other beats in both."""
    style_of = styles(comparison.families)
    measure = comparison.measure
    legend = [*handles(style_of), *_of_shorter(comparison)]
    with picture(path, 1, len(fronts), (4.7, 4.4), title, legend, sharey=True) as (panels,):
        for front, axis in zip(fronts, panels, strict=True):
            for name, (cost, _) in front.points.items():
                model = comparison.models[name]
                if model is comparison.longest(model.family):
                    filled = {}
                else:
                    filled = HOLLOW
                draw_spread(axis, cost, model.finals(measure.name), {**style_of[model.family], **filled})
            line = [front.points[name] for name in front.members]
            axis.plot(*zip(*line, strict=True), color="0.5", linewidth=1, zorder=1, drawstyle="steps-post")
            axis.set_xlabel(front.label)
        panels[0].set_ylabel(f"{measure.label}, held out (range of the seeds)")


def _limits(comparison: results.Comparison, targets: Sequence[float]) -> tuple[float, float]:
    """Of the measure's axis: from the best to what the worst model had after its beginning, the targets between."""
    seen = list(targets)
    for models in comparison.families.values():
        seen += [value for model in models for value in model.finals(comparison.measure.name)]
        updates, values = typical(models[-1], "updates", comparison.measure.name)
        seen += list(np.median(values, axis=0)[updates >= BEGINNING * updates[-1]])
    finite = [value for value in seen if np.isfinite(value)]
    low = min(finite)
    high = max(finite)
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


def _of_shorter(comparison: results.Comparison) -> list[Line2D]:
    """What the legend says of hollow marks, where there are any."""
    has_some = any(len(models) > 1 for models in comparison.families.values())
    if has_some:
        return [_mark("end of a shorter training", 6, **HOLLOW)]
    return []


def _mark(label: str, size: float, **style: str) -> Line2D:
    return Line2D([], [], label=label, marker="o", linestyle="", color="0.4", markersize=size, **style)
