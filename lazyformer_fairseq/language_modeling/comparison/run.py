"""`lazyformer lm compare`: trains models that differ in their pattern alone, evaluates and times them, reports."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq.costs.latency import spread
from lazyformer_fairseq.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.data.datasets.token_streams import open_tokens
from lazyformer_fairseq.files.claims import claimed, keep_settings
from lazyformer_fairseq.files.json_files import read_json, write_json
from lazyformer_fairseq.files.tables import write_csv
from lazyformer_fairseq.files.whole import write_text
from lazyformer_fairseq.language_modeling.comparison.costs import measure_costs, run_folder
from lazyformer_fairseq.language_modeling.comparison.report import csv_rows, draw, table_of
from lazyformer_fairseq.language_modeling.comparison.settings import ComparisonSettings
from lazyformer_fairseq.language_modeling.evaluate import evaluate
from lazyformer_fairseq.language_modeling.text.prepare import read_manifest
from lazyformer_fairseq.patterns.grammar import count_kinds
from lazyformer_fairseq.training.stepwise import StepwiseTraining

SPLITS = ("valid", "test")
SAVES = 10  # of a training
TRIAL_WARM_UP, TRIAL_UPDATES = 5, 20


def compare(settings: ComparisonSettings, folder: Path, command: Sequence[str]) -> str:
    """Runs the comparison in `folder`, or resumes it; returns the table.

    Writes there `results.json`, `table.md`, `table.csv` and `comparison.png`, and into `runs` the trained models.

    Args:
        command: as it was given, for the record.

    Raises:
        UserError: the folder holds a comparison of other settings, or the data or a size does not fit.
    """
    with claimed(folder):
        plan, begun = folder / "updates.json", any(folder.glob("runs/*/checkpoint_last.pt"))
        keep_settings(folder / "settings.json", settings.as_kept(), "a comparison", begun, made_by_them=[plan])
        updates = planned_updates(settings, plan)
        _train_all(settings, updates, folder / "runs")
        if not (folder / "costs.json").exists():
            write_json(folder / "costs.json", measure_costs(settings, folder / "runs"))
        results = {
            "command": " ".join(command),
            "machine": describe_machine(settings.device),
            "versions": describe_versions(),
            "settings": asdict(settings),
            "data": _describe_data(settings),
            "models": _collect(settings, updates, folder),
        }
        write_json(folder / "results.json", results)
        return write_report(results, folder)


def write_report(results: Mapping[str, Any], folder: Path) -> str:
    """Writes table and picture from results.json's content; returns the table."""
    models, settings = results["models"], results["settings"]
    trained = f"{settings['minutes']:g} minutes" if settings["minutes"] else f"{settings['updates']:,} updates"
    table = table_of(models)
    write_text(folder / "table.md", table + "\n")
    write_csv(csv_rows(models), folder / "table.csv")
    title = f"width {settings['embed_dim']}, {trained}, {len(settings['seeds'])} seeds; {results['machine']['device']}"
    draw(models, title, folder / "comparison.png")
    return table


class ModelTraining(StepwiseTraining):
    """The training of the pattern `name` with one seed for `total` updates, in a folder of its own."""

    def __init__(self, settings: ComparisonSettings, name: str, seed: int, total: int, folder: Path):
        super().__init__(settings.training_command(name, seed, total), folder)
        self.name = name
        self.total = total

    @property
    def share_done(self) -> float:
        return self.updates / self.total


def train_in_turn(trainings: list[ModelTraining], progress: tqdm) -> None:
    """Trains all to their ends; the one farthest behind is next, so that equal totals mean strict turns.

    All save at the same share of their updates, so that they also resume together.
    """
    while (behind := min(trainings, key=lambda training: training.share_done)).updates < behind.total:
        behind.update()
        progress.update()
        if behind.updates % max(1, behind.total // SAVES) == 0 or behind.updates == behind.total:
            behind.save()


def updates_that_fit(settings: ComparisonSettings) -> dict[str, int]:
    """By model: the updates that fit in `settings.minutes`, by the median of a trial in which all models take turns."""
    trial = TRIAL_WARM_UP + TRIAL_UPDATES
    with TemporaryDirectory() as folder:
        trainings = [
            ModelTraining(settings, name, settings.seeds[0], trial, Path(folder) / name) for name in settings.patterns
        ]
        for _ in tqdm(range(trial), desc="trial", unit=" updates", leave=False):
            for training in trainings:
                training.update()
    medians = {training.name: np.median(training.seconds[TRIAL_WARM_UP:]) for training in trainings}
    return {name: max(1, int(60 * settings.minutes / seconds)) for name, seconds in medians.items()}


def planned_updates(settings: ComparisonSettings, path: Path) -> Mapping[str, int]:
    """Updates by model, kept in `path`: a second trial would give another answer."""
    if not path.exists():
        same = dict.fromkeys(settings.patterns, settings.updates)
        write_json(path, updates_that_fit(settings) if settings.minutes is not None else same)
    return read_json(path)


def _train_all(settings: ComparisonSettings, updates: Mapping[str, int], runs: Path) -> None:
    """Trains and evaluates every model without a result.json, seed after seed."""
    unfinished = {
        seed: [name for name in settings.patterns if not (run_folder(runs, name, seed) / "result.json").exists()]
        for seed in settings.seeds
    }
    total = len(settings.seeds) * sum(updates.values())
    left = sum(updates[name] for names in unfinished.values() for name in names)
    with tqdm(total=total, initial=total - left, desc="training", unit=" updates") as progress:
        for seed, names in ((seed, names) for seed, names in unfinished.items() if names):
            progress.set_postfix_str(f"seed {seed}")
            trainings = [
                ModelTraining(settings, name, seed, updates[name], run_folder(runs, name, seed)) for name in names
            ]
            progress.update(sum(training.updates for training in trainings))
            train_in_turn(trainings, progress)
            for training in trainings:
                _finish(settings, training)


def _finish(settings: ComparisonSettings, training: ModelTraining) -> None:
    """Evaluates, writes the result, and removes the optimizer's part of the checkpoint from the disk."""
    result: dict[str, Any] = {"seconds": training.seconds}
    for split in SPLITS:
        found = evaluate(
            training.trainer.model,
            open_tokens(Path(settings.data) / split),
            training.task.source_dictionary.eos(),
            tgt_len=settings.evaluation_tgt_len,
            mem_len=settings.evaluation_mem_len,
            clamp_len=settings.clamp_len,
            same_length=settings.same_length,
            batch_size=settings.evaluation_streams,
        )
        result |= {f"{split}_perplexity": found.perplexity, f"{split}_tokens": found.tokens}
    write_json(training.folder / "result.json", result)
    training.save(with_optimizer=False)


def _collect(settings: ComparisonSettings, updates: Mapping[str, int], folder: Path) -> dict[str, dict[str, Any]]:
    """The models of results.json."""
    costs, models = read_json(folder / "costs.json"), {}
    for name, pattern in settings.patterns.items():
        runs = {seed: read_json(run_folder(folder / "runs", name, seed) / "result.json") for seed in settings.seeds}
        seconds = np.concatenate([run.pop("seconds") for run in runs.values()])
        latencies = np.array(costs[name].pop("latency_seconds"))
        models[name] = {
            "pattern": pattern,
            "sublayers": count_kinds(pattern),
            **costs[name],
            "updates": updates[name],
            "milliseconds_per_update": spread(1000 * seconds),
            "latency_milliseconds": spread(1000 * latencies),
            **{
                f"{split}_perplexity": _range([run[f"{split}_perplexity"] for run in runs.values()]) for split in SPLITS
            },
            "runs": {str(seed): run for seed, run in runs.items()},
        }
    return models


def _describe_data(settings: ComparisonSettings) -> dict[str, Any]:
    """The data's manifest, and the perplexity of a model that has only a split's own word frequencies."""
    manifest = read_manifest(Path(settings.data))
    unigram = {split: _unigram_perplexity(open_tokens(Path(settings.data) / split)) for split in SPLITS}
    return {"manifest": manifest, "unigram_perplexity": unigram}


def _unigram_perplexity(tokens: np.ndarray) -> float:
    shares = np.bincount(tokens) / len(tokens)
    shares = shares[shares > 0]
    return float(np.exp(-(shares * np.log(shares)).sum()))


def _range(values: list[float]) -> dict[str, float]:
    found = {"n": len(values), "median": float(np.median(values))}
    return found | {"low": min(values), "high": max(values)} if len(values) > 1 else found
