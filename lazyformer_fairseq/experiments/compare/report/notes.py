"""What a reader must know beside the tables, as sentences: the target, the clocks, the terms, what is not equal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from lazyformer_fairseq.experiments.compare.report import BASELINE
from lazyformer_fairseq.experiments.compare.report.comparison import Comparison, Measure, Model
from lazyformer_fairseq.experiments.compare.report.times import (
    FEWEST_FOR_BOUNDS,
    Target,
    TimeToTarget,
    first_crossing,
    target_value,
)

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
    for baseline in comparison.baselines:
        own = _parameters(comparison.longest(baseline))
        others = {
            family: _parameters(models[-1]) / own - 1
            for family, models in comparison.families.items()
            if models[-1].baseline == baseline != family
        }
        unequal = {family: more for family, more in others.items() if abs(more) > EQUAL}
        if unequal:
            listed = ", ".join(f"{family} {more:+.1%}" for family, more in unequal.items())
            yield f"Parameters, without embeddings, that are not {baseline}'s: {listed}."
        elif others:
            yield f"Parameters, without embeddings: all within {EQUAL:.0%} of {baseline}'s."


def _parameters(model: Model) -> int:
    return model.facts.get("parameters_without_embeddings") or model.facts["parameters"]


def _of_rates(comparison: Comparison) -> Iterator[str]:
    """Of each family's longest training, whose rate the shorter ones share."""
    models = [models[-1] for models in comparison.families.values()]
    tried = {model.name: sorted({one["rate"] for one in model.facts.get("tries") or ()}) for model in models}
    described = (f"{model.name} {_rate(model)}{_out_of(tried[model.name])}" for model in models)
    yield f"Learning rates: {'; '.join(described)}."
    counts = {len(rates) for rates in tried.values()}
    if len(counts) > 1:
        counted = ", ".join(f"{name} {len(rates)}" for name, rates in tried.items())
        yield f"Not as many rates tried for each: {counted}. Ratios between those are not on equal terms."
    elif counts <= {0, 1}:
        yield "One learning rate alone was tried for each model; another one may suit some of them better."
    for edge, beyond in (("lowest", "lower"), ("highest", "higher")):
        if names := [model.name for model in models if _edge(model.facts, tried[model.name]) == edge]:
            yield f"The {edge} rate that was tried was the best, so a {beyond} one may be better: {', '.join(names)}."


def _edge(facts: Mapping[str, Any], tried: Sequence[float]) -> Optional[str]:
    if "rate_is_at_an_edge" in facts:
        return facts["rate_is_at_an_edge"]
    if len(tried) < 2 or facts.get("rate") not in (tried[0], tried[-1]):
        return None
    return "lowest" if facts["rate"] == tried[0] else "highest"


def _of_models_from_elsewhere(comparison: Comparison) -> Iterator[str]:
    by_what: dict[str, list[str]] = {}
    for family, models in comparison.families.items():
        by_what.setdefault(models[-1].facts.get("what", ""), []).append(family)
    foreign = [*by_what.get("fairseq", ()), *by_what.get("huggingface", ())]
    settings = comparison.facts["settings"]
    if foreign:
        buckets = (settings.get("sizes") or {}).get("relative_position_buckets")
        bias = f", and none of the relative positions ({buckets} buckets) that models of ours have" if buckets else ""
        yield f"Initialised by code of their own{bias}: {', '.join(foreign)}."
    if "huggingface" in by_what and settings.get("normalize_before"):
        yield f"LayerNorms behind sublayers, where others have them before: {', '.join(by_what['huggingface'])}."


def _of_machines(comparison: Comparison) -> Iterator[str]:
    facts = comparison.facts
    versions = ", ".join(f"{name} {version}" for name, version in (facts.get("versions") or {}).items())
    yield f"{(facts.get('machine') or {}).get('device', 'machine not known')}; {versions}."
    if len(facts.get("machines") or ()) > 1:
        yield "Seconds of different machines do not compare; ratios are within a folder, hence within a machine."
    if checksums := facts["data"].get("checksums"):
        yield "Data, by SHA-256: " + ", ".join(f"{name} {str(sum_)[:12]}" for name, sum_ in checksums.items()) + "."


def _rate(model: Model) -> str:
    rate = model.facts.get("rate")
    return "not known" if rate is None else f"{rate:g}"


def _out_of(rates: Sequence[float]) -> str:
    return f" (of {', '.join(f'{rate:g}' for rate in rates)})" if len(rates) > 1 else ""


def _seeds(model: Model) -> str:
    return f"{len(model.runs)} seed{'s' * (len(model.runs) > 1)}"
