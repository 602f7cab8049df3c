"""What a front's patterns reach from scratch, beside their control's; losses from scratch beside inherited ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any, Optional

from matplotlib.figure import Figure

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.from_scratch import Recipe, mean_loss, train_from_scratch
from lazyformer_fairseq.experiments.search.front.latency_check import rank_correlations
from lazyformer_fairseq.experiments.search.front.settings import TrainSettings
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.patterns.grammar import expand
from lazyformer_fairseq.report.figures import COLOURS, write_picture
from lazyformer_fairseq.report.numbers import with_spread
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.storage.json_files import write_json

FOLDER = "from_scratch"


def train_front(settings: SearchSettings, train: TrainSettings, result: Mapping[str, Any], folder: File) -> str:
    """Trains, or resumes, writes trained.json, trained.md and inherited.png, and returns the tables.

    Raises:
        UserError: fewer patterns have an inherited loss than are to be trained.
    """
    spread = result["inherited"]
    if train.patterns > len(spread):
        raise UserError(
            f"--train-patterns {train.patterns}: this search judged {len(spread)} patterns spread over the space; give "
            "as many or fewer, or begin a search with more --check-patterns"
        )
    fronts = {name: result[name]["points"] for name in ("found", "control") if name in result}
    patterns = {expand(point["pattern"]): None for points in fronts.values() for point in points if point["pattern"]}
    baseline = expand(result["baseline"]["pattern"])
    runs = _train(settings, train, train.seeds, [baseline, *patterns], folder / FOLDER)
    some = _some(list(spread), train.patterns)
    scatter = _train(settings, train, train.seeds[:1], some, folder / f"{FOLDER}_spread") if some else {}
    inherited, true = [spread[each] for each in some], [mean_loss(scatter[each]) for each in some]
    correlation = rank_correlations(inherited, true)
    content = {
        "seeds": list(train.seeds),
        "losses": {pattern: {str(seed): run["loss"] for seed, run in of.items()} for pattern, of in runs.items()},
        "inherited_and_from_scratch": dict(zip(some, zip(inherited, true, strict=True), strict=True)),
        "correlation": correlation,
        "cpu_seconds": sum(run["cpu_seconds"] for of in (*runs.values(), *scatter.values()) for run in of.values()),
    }
    write_json(folder / "trained.json", content)
    text = _tables(result, fronts, baseline, runs, train, content)
    write_text(folder / "trained.md", text + "\n")
    if some:
        _draw(inherited, true, correlation, folder / "inherited.png")
    return text


def _train(
    settings: SearchSettings, train: TrainSettings, seeds: tuple[int, ...], patterns: Sequence[str], folder: File
) -> dict[str, dict[int, dict[str, Any]]]:
    recipe = Recipe(
        settings.data,
        settings.task,
        settings.arch,
        train.updates,
        train.rate,
        settings.batch_size,
        seeds,
        settings.device,
        tuple(settings.fairseq_options),
    )
    return train_from_scratch(recipe, patterns, folder)


def _some(patterns: Sequence[str], count: int) -> list[str]:
    """As many, spread evenly over all."""
    if count < 2:
        return []
    return [patterns[round(number * (len(patterns) - 1) / (count - 1))] for number in range(count)]


def _tables(
    result: Mapping[str, Any],
    fronts: Mapping[str, Sequence[Mapping[str, Any]]],
    baseline: str,
    runs: Mapping[str, Mapping[int, Mapping[str, Any]]],
    train: TrainSettings,
    content: Mapping[str, Any],
) -> str:
    rows = [{"budget": "baseline", "": "", "pattern": f"`{result['baseline']['pattern']}`", **_loss(runs[baseline])}]
    for number, point in enumerate(fronts["found"]):
        for name, points in fronts.items():
            pattern = points[number]["pattern"]
            row = {"budget": f"{point['budget']:.0%}", "": result[name]["method"], "pattern": "none found", "loss": ""}
            if pattern:
                row |= {"pattern": f"`{pattern}`", **_loss(runs[expand(pattern)])}
            rows.append(row)
    rows = [{header.replace("loss", LOSS): cell for header, cell in row.items()} for row in rows]
    seeds = f"{len(train.seeds)} seed{'s' * (len(train.seeds) > 1)}"
    parts = [f"From scratch, {train.updates:,} updates, {seeds}:", markdown_table(rows, left=("", "pattern"))]
    if found := content["correlation"]:
        parts.append(
            f"Inherited loss with loss from scratch, of {found['n']} patterns spread over the space: Spearman's rank "
            f"correlation {found['spearman']:.3f}, Kendall's tau {found['kendall']:.3f}."
        )
    parts.append(f"Training took {content['cpu_seconds']:,.0f} seconds of processor time.")
    return "\n\n".join(parts)


LOSS = "validation loss, bits: mean (range of the seeds)"


def _loss(runs: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    losses = [run["loss"] for run in runs.values()]
    spread: dict[str, float] = {"n": len(losses), "median": mean_loss(runs)}
    if len(losses) > 1:
        spread |= {"low": min(losses), "high": max(losses)}
    return {"loss": with_spread(spread, 3)}


def _draw(inherited: Sequence[float], true: Sequence[float], found: Optional[Mapping[str, float]], path: File) -> None:
    """Loss from scratch against inherited loss, a mark a pattern."""
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.plot(inherited, true, linestyle="", marker="o", color=COLOURS[0])
    axis.set(xlabel="loss with inherited weights, bits", ylabel="loss from scratch, bits")
    if found is not None:
        axis.set_title(f"Spearman {found['spearman']:.3f}, {found['n']} patterns")
    axis.grid(alpha=0.3)
    write_picture(figure, path)
