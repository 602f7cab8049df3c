"""The report of a comparison, from its results.json alone: tables, what a reader must know beside them, pictures."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.experiments.compare import pictures
from lazyformer_fairseq.experiments.compare.results import BASELINE, Comparison, Measure, Model, comparison_of
from lazyformer_fairseq.experiments.compare.times import (
    FEWEST_FOR_BOUNDS,
    MEBIBYTE,
    NEVER,
    Front,
    Ratio,
    Target,
    TimeToTarget,
    first_crossing,
    fronts,
    target_value,
    times_to_target,
)
from lazyformer_fairseq.report.numbers import NOTHING, number, with_range
from lazyformer_fairseq.report.page import Notes, write_page
from lazyformer_fairseq.report.tables import Table, write_csv

NOT_REACHED = "not reached"
SPREADS = ("milliseconds_per_update", "latency_milliseconds")
OF_OTHERS = {"fairseq": "fairseq's own model", "huggingface": "Hugging Face's own model"}
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
    f"of the geometric mean, where {FEWEST_FOR_BOUNDS} seeds or more all reached the target."
)


def write_report(results: Mapping[str, Any], folder: Path, target: Target = BASELINE) -> str:
    """The report of results.json's content; see :func:`write_files`."""
    return write_files(comparison_of(results), folder, target)


def write_files(comparison: Comparison, folder: Path, target: Target = BASELINE) -> str:
    """Writes tables and pictures, each whole; returns the tables for a reader, in Markdown.

    `table.md`, `table.tex` and `table.csv` have the models, the first two also the times to the target and what a
    reader must know; `curves.png`, `times.png` and `fronts.png` show them.

    Args:
        target: a value of the measure, or ``baseline`` for where the baseline ended.
    """
    times, found = times_to_target(comparison, target), fronts(comparison)
    title = "; ".join(describe(comparison))
    pictures.draw_curves(comparison, times, title, folder / "curves.png")
    pictures.draw_times(times, title, folder / "times.png")
    pictures.draw_fronts(comparison, found, title, folder / "fronts.png")
    write_csv(csv_models(comparison, found), folder / "table.csv")
    said = (Notes(notes(comparison, times, target)), "Patterns:", Notes(list(_patterns(comparison))))
    return write_page([cost_table(comparison, found), time_table(times), *said], folder, "table", with_latex=True)


def describe(comparison: Comparison) -> Iterator[str]:
    """What all models shared, for the title of a picture."""
    facts, seeds = comparison.facts, {len(model.runs) for model in comparison.models.values()}
    sizes = facts["settings"].get("sizes", {})
    for name, label in (("embed_dim", "width"), ("tokens_per_sample", "n ="), ("tgt_len", "n =")):
        if name in sizes:
            yield f"{label} {sizes[name]:,}"
    yield f"{min(seeds)} seed{'s' * (min(seeds) > 1)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)} seeds"
    yield facts["machine"]["device"]


def _patterns(comparison: Comparison) -> Iterator[str]:
    for family, models in comparison.families.items():
        facts = models[-1].facts
        pattern = f"`{facts['pattern']}`" if facts.get("pattern") else OF_OTHERS.get(facts["what"], "an arch")
        yield f"{family}: {pattern}"


def cost_table(comparison: Comparison, fronts: Sequence[Front]) -> Table:
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
            "MiB": number(facts["peak_memory_bytes"] / MEBIBYTE),
            measure.label: with_range(model.finals(measure.name)),
        }
        if of_test := model.finals(f"test_{measure.name}"):
            row["of test"] = with_range(of_test).split()[0]
        if "latency_milliseconds" in facts:
            row["latency, ms"] = number(facts["latency_milliseconds"]["median"])
        rows.append(row | {"on front of": ", ".join(front.unit for front in fronts if model.name in front.members)})
    headers = dict.fromkeys(header for row in rows for header in row)
    return Table("Cost and quality", [{header: row.get(header, NOTHING) for header in headers} for row in rows])


def time_table(times: Sequence[TimeToTarget]) -> Table:
    """What it took to reach the target, as a share of the baseline's own time."""
    rows = [
        {
            "model": time.model,
            "clock": time.clock,
            "seconds": number(middle) if (middle := time.median("seconds")) < NEVER else NOT_REACHED,
            "ratio (range)": _with_ends(time.ratios.get("seconds")),
            "95% bounds": _bounds(time.ratios.get("seconds")),
            "updates": _ratio(time.ratios.get("updates")),
            "FLOPs": _ratio(time.ratios.get("flops")),
            "seeds": f"{sum(costs['seconds'] < NEVER for costs in time.times.values())} of {len(time.times)}",
        }
        for time in times
    ]
    return Table("Time to the target", rows, left=("clock",))


def csv_models(comparison: Comparison, fronts: Sequence[Front]) -> list[dict[str, Any]]:
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
            **{column: value for name in measures for column, value in _of_measure(model, name).items()},
            **{f"on_front_of_{front.name}": int(model.name in front.members) for front in fronts},
        }
        for model in comparison.models.values()
    ]


def _of_measure(model: Model, name: str) -> dict[str, float]:
    values = model.finals(name)
    return _with_columns(name, values) if values else {}


def _with_columns(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: float(np.median(values)), f"{name}_lowest": min(values), f"{name}_highest": max(values)}


def _ratio(ratio: Optional[Ratio]) -> str:
    return NOTHING if ratio is None or ratio.median == NEVER else f"{ratio.median:.3f}"


def _with_ends(ratio: Optional[Ratio]) -> str:
    if ratio is None:
        return NOTHING
    middle, low, high = (f"{end:.3f}" if end < NEVER else "never" for end in (ratio.median, ratio.low, ratio.high))
    if ratio.reached == 0:
        return NOT_REACHED
    return middle if len(ratio.by_seed) < 2 else f"{middle} ({low} to {high})"


def _bounds(ratio: Optional[Ratio]) -> str:
    bounds = None if ratio is None else ratio.bounds
    return NOTHING if bounds is None else f"{bounds[0]:.3f} to {bounds[1]:.3f}"


def notes(comparison: Comparison, times: Sequence[TimeToTarget], target: Target) -> list[str]:
    """Sentences, in the order of a reader's questions."""
    clocks = {time.clock for time in times}
    return [
        COLUMNS,
        *(_of_target(comparison, baseline, target) for baseline in comparison.baselines),
        *(sentence for sentence in CLOCKS if sentence.split("`")[1] in clocks),
        BOUNDS,
        *_of_shortest(comparison, times),
        *_of_seeds(comparison),
        *_of_parameters(comparison),
        *_of_rates(comparison),
        *_of_pretraining(comparison),
        *_of_models_from_elsewhere(comparison),
        *_of_machines(comparison),
    ]


def _of_target(comparison: Comparison, baseline: str, target: Target) -> str:
    measure, model = comparison.measure, comparison.longest(baseline)
    value = target_value(comparison, baseline, target)
    if target != BASELINE:
        return f"Target: {value:g} ({measure.label}). Ratios are to the time that {baseline} took to reach it."
    seconds = float(np.median(model.wholes("seconds")))
    said = (
        f"Target: {value:.4f} ({measure.label}), the median over {_seeds(model)} of {baseline}'s end. {baseline}'s own "
        f"time is its whole training, {seconds:,.1f} seconds: it reaches its end there by definition"
    )
    before = _touched_before(model, value, measure)
    return f"{said}." if before is None else f"{said}, though its curve first touches the target at {before:.3f} of it."


def _touched_before(model: Model, target: float, measure: Measure) -> Optional[float]:
    """The median share of its training at which the baseline's own curve meets the target; None for its end."""
    shares = [
        min(first_crossing(run.curve["updates"], run.curve[measure.name], target, measure) / run.whole("updates"), 1.0)
        for run in model.runs.values()
    ]
    middle = float(np.median(shares))
    return middle if middle < 1 else None


def _of_shortest(comparison: Comparison, times: Sequence[TimeToTarget]) -> Iterator[str]:
    names = [
        time.model
        for time in times
        if time.clock == "whole" and max(time.shares.values()) == comparison.families[time.model][0].share
    ]
    if names:
        yield f"No shorter training of {', '.join(names)} was tried than reached the target: it may take less."


def _of_seeds(comparison: Comparison) -> Iterator[str]:
    few = [model.name for model in comparison.models.values() if len(model.runs) < FEWEST_FOR_BOUNDS]
    if few:
        yield f"Fewer than {FEWEST_FOR_BOUNDS} seeds, so the spread is not known: {', '.join(few)}."


def _of_parameters(comparison: Comparison) -> Iterator[str]:
    counts = {name: of[-1].facts["parameters_without_embeddings"] for name, of in comparison.families.items()}
    for baseline in comparison.baselines:
        compared = [family for family, models in comparison.families.items() if models[-1].baseline == baseline]
        others = {family: counts[family] / counts[baseline] - 1 for family in compared}
        unequal = {family: more for family, more in others.items() if abs(more) > EQUAL}
        if unequal:
            listed = ", ".join(f"{family} {more:+.1%}" for family, more in unequal.items())
            yield f"Parameters, without embeddings, that are not {baseline}'s: {listed}."
        elif len(others) > 1:
            yield f"Parameters, without embeddings: all within {EQUAL:.0%} of {baseline}'s."


def _of_rates(comparison: Comparison) -> Iterator[str]:
    """Of each family's longest training, whose rate the shorter ones share."""
    models = [models[-1] for models in comparison.families.values()]
    tried = {model.name: sorted({one["rate"] for one in model.facts["tries"]}) for model in models}
    described = (f"{model.name} {model.facts['rate']:g}{_out_of(tried[model.name])}" for model in models)
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


def _of_pretraining(comparison: Comparison) -> Iterator[str]:
    """What was learnt before, and on diagnostics what needs no model."""
    for family, models in comparison.families.items():
        if found := models[-1].facts.get("pretraining"):
            yield (
                f"{family} first filled masks in the task's own inputs: {found['updates']:,} updates, "
                f"{found['seconds']:,.1f} seconds, which no table counts; it found {found['accuracy']:.1f}% of them."
            )
    if rules := comparison.facts["data"].get("rules"):
        yield "Accuracy without a model: " + "; ".join(f"{name} {share:.1%}" for name, share in rules.items()) + "."


def _of_models_from_elsewhere(comparison: Comparison) -> Iterator[str]:
    by_what: dict[str, list[str]] = {}
    for family, models in comparison.families.items():
        by_what.setdefault(models[-1].facts["what"], []).append(family)
    foreign = [*by_what.get("fairseq", ()), *by_what.get("huggingface", ())]
    settings = comparison.facts["settings"]
    if foreign:
        buckets = settings.get("sizes", {}).get("relative_position_buckets")
        bias = f", and none of the relative positions ({buckets} buckets) that models of ours have" if buckets else ""
        yield f"Initialised by code of their own{bias}: {', '.join(foreign)}."
    if "huggingface" in by_what and settings.get("normalize_before"):
        yield f"LayerNorms behind sublayers, where others have them before: {', '.join(by_what['huggingface'])}."


def _of_machines(comparison: Comparison) -> Iterator[str]:
    facts = comparison.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    yield f"{facts['machine']['device']}; {versions}."
    if len(facts.get("machines", ())) > 1:
        yield "Seconds of different machines do not compare; ratios are within a folder, hence within a machine."
    sums = ", ".join(f"{name} {sha256[:12]}" for name, sha256 in facts["data"]["checksums"].items())
    yield f"Data, by SHA-256: {sums}."


def _out_of(rates: Sequence[float]) -> str:
    return f" (of {', '.join(f'{rate:g}' for rate in rates)})" if len(rates) > 1 else ""


def _seeds(model: Model) -> str:
    return f"{len(model.runs)} seed{'s' * (len(model.runs) > 1)}"
