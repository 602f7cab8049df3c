"""Patterns trained from scratch, in turn on the same batches, from the same seed: a front's beside its control's."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lazyformer_fairseq import USER_DIR
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.folder import experiment
from lazyformer_fairseq.experiments.search.front import evenly
from lazyformer_fairseq.experiments.search.latency import rank_correlations
from lazyformer_fairseq.experiments.search.report import draw_scatter
from lazyformer_fairseq.experiments.search.settings import TASKS, Recipe, SearchSettings, TrainSettings
from lazyformer_fairseq.experiments.trainings import Job, Training, train
from lazyformer_fairseq.patterns.grammar import expand
from lazyformer_fairseq.report.figures import picture
from lazyformer_fairseq.report.numbers import with_spread
from lazyformer_fairseq.report.page import Block, write_page
from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import run_lock

FOLDER = "from_scratch"
LONGEST_NAME = 100  # file systems end at 255 bytes, and temporary files add to a name
LOSS = "validation loss, bits: mean (range of the seeds)"

Runs = Mapping[int, Mapping[str, Any]]  # by seed


def command_of(recipe: Recipe, pattern: str, seed: int) -> tuple[str, ...]:
    """Arguments of the fairseq-train that trains one pattern."""
    task, criterion, _ = TASKS[recipe.task]
    batches = ("--batch-size", str(recipe.batch_size), "--max-update", str(recipe.updates), "--seed", str(seed))
    return (
        *(recipe.data, "--user-dir", str(USER_DIR), "--task", task, "--criterion", criterion, "--arch", recipe.arch),
        *recipe.fairseq_options,
        *("--sublayer-pattern", pattern, "--optimizer", "fused_adam", "--adam-betas", "(0.9,0.98)"),
        *("--clip-norm", "1.0", "--lr-scheduler", "linear_warmup", "--warmup-ratio", "0.1", "--lr", str(recipe.rate)),
        *(*batches, "--num-workers", "0", "--no-epoch-checkpoints", *(["--cpu"] if recipe.device == "cpu" else [])),
    )


class ScratchTraining(Training):
    """The training of a pattern from one seed; its loss is in bits a prediction, on the validation split."""

    validations = 4

    def __init__(self, job: Job, valid_tokens: int):
        super().__init__(job)
        self.valid_tokens = valid_tokens

    def measure(self) -> Mapping[str, float]:
        return {"loss": float(self.evaluate(tokens=self.valid_tokens)["loss"])}

    def result(self) -> dict[str, Any]:
        return {
            "loss": self.curve["loss"][-1],
            "curve": self.curve,
            "parameters": self.parameters,
            "cpu_seconds": sum(self.cpu_seconds),
            "cpu_ms_per_update": 1000 * float(np.median(self.cpu_seconds)),
        }


def train_from_scratch(recipe: Recipe, patterns: Sequence[str], folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Trains all patterns that have no result in `folder` yet, those of a seed together.

    Args:
        patterns: written out, each once.

    Returns:
        By pattern and seed what its result.json holds: `loss` in bits, `curve`, `parameters`, processor time.

    Raises:
        UserError: the folder holds trainings of another recipe.
    """
    with experiment(folder, recipe, "trainings", "*/*"):
        jobs = {
            (pattern, seed): Job(
                pattern, command_of(recipe, pattern, seed), _folder(folder, pattern, seed), recipe.updates, seed
            )
            for seed in recipe.seeds
            for pattern in patterns
        }
        train(list(jobs.values()), lambda job: ScratchTraining(job, recipe.valid_tokens), "from scratch")
        return {pattern: {seed: jobs[pattern, seed].result() for seed in recipe.seeds} for pattern in patterns}


def _folder(folder: Path, pattern: str, seed: int) -> Path:
    """Its name is the pattern, or the beginning of one that is too long for a name, and what tells it from others."""
    if len(pattern) > LONGEST_NAME:
        pattern = f"{pattern[:LONGEST_NAME]}-{hashlib.sha256(pattern.encode()).hexdigest()[:8]}"
    return folder / f"{pattern}-seed{seed}"


def mean_loss(runs: Runs) -> float:
    """Over seeds."""
    return float(np.mean([run["loss"] for run in runs.values()]))


def train_front(settings: SearchSettings, train: TrainSettings, result: Mapping[str, Any], folder: Path) -> str:
    """Trains a front's patterns, or resumes, writes trained.json, trained.md and inherited.png; returns the tables.

    Raises:
        UserError: fewer patterns have an inherited loss than are to be trained.
    """
    spread = result["inherited"]
    if train.patterns > len(spread):
        raise UserError(
            f"--train-patterns {train.patterns}: this search judged {len(spread)} patterns spread over the space; give "
            "as many or fewer, or begin a search with more --check-patterns"
        )

    def trained(patterns: Sequence[str], seeds: tuple[int, ...], name: str) -> dict[str, dict[int, dict[str, Any]]]:
        data = (settings.data, settings.task, settings.arch)
        how = (train.updates, train.rate, settings.batch_size, seeds, settings.device, tuple(settings.fairseq_options))
        return train_from_scratch(Recipe(*data, *how), patterns, folder / name)

    fronts = {name: result[name]["points"] for name in ("found", "control") if name in result}
    found = {expand(point["pattern"]): None for points in fronts.values() for point in points if point["pattern"]}
    baseline = expand(result["baseline"]["pattern"])
    some = evenly(list(spread), train.patterns)
    with run_lock(folder):
        runs = trained([baseline, *(each for each in found if each != baseline)], train.seeds, FOLDER)
        scatter = trained(some, train.seeds[:1], f"{FOLDER}_spread") if some else {}
        pairs = {each: (spread[each], mean_loss(scatter[each])) for each in some}
        inherited, true = ([pair[side] for pair in pairs.values()] for side in (0, 1))
        content = {
            "seeds": list(train.seeds),
            "losses": {pattern: {str(seed): run["loss"] for seed, run in of.items()} for pattern, of in runs.items()},
            "inherited_and_from_scratch": pairs,
            "correlation": rank_correlations(inherited, true),
            "cpu_seconds": sum(run["cpu_seconds"] for of in (*runs.values(), *scatter.values()) for run in of.values()),
        }
        write_json(folder / "trained.json", content)
        if some:
            labels = ("loss with inherited weights, bits", "loss from scratch, bits")
            with picture(folder / "inherited.png", panel=(5, 4.5)) as ((axis,),):
                draw_scatter(axis, inherited, true, content["correlation"], labels)
        return write_page(_page(result, fronts, baseline, runs, train, content), folder, "trained").strip()


def _page(
    result: Mapping[str, Any],
    fronts: Mapping[str, Sequence[Mapping[str, Any]]],
    baseline: str,
    runs: Mapping[str, Runs],
    train: TrainSettings,
    content: Mapping[str, Any],
) -> list[Block]:
    def row(budget: str, method: str, pattern: str) -> dict[str, str]:
        shown, loss = (f"`{pattern}`", _loss(runs[expand(pattern)])) if pattern else ("none found", "")
        return {"budget": budget, "": method, "pattern": shown, LOSS: loss}

    rows = [row("baseline", "", result["baseline"]["pattern"])]
    for number, point in enumerate(fronts["found"]):
        for name, points in fronts.items():
            rows.append(row(f"{point['budget']:.0%}", result[name]["method"], points[number]["pattern"]))
    seeds = f"{len(train.seeds)} seed{'s' * (len(train.seeds) > 1)}"
    page: list[Block] = [f"From scratch, {train.updates:,} updates, {seeds}:", Table("", rows, left=("", "pattern"))]
    if found := content["correlation"]:
        page.append(
            f"Inherited loss with loss from scratch, of {found['n']} patterns spread over the space: Spearman's rank "
            f"correlation {found['spearman']:.3f}, Kendall's tau {found['kendall']:.3f}."
        )
    return [*page, f"Training took {content['cpu_seconds']:,.0f} seconds of processor time."]


def _loss(runs: Runs) -> str:
    losses = [run["loss"] for run in runs.values()]
    found: dict[str, float] = {"n": len(losses), "median": mean_loss(runs)}
    if len(losses) > 1:
        found |= {"low": min(losses), "high": max(losses)}
    return with_spread(found, 3)
