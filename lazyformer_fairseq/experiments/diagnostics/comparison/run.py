"""Trains patterns on a diagnostic, update by update in turn: from scratch, and self-pretrained first; resumable."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lazyformer_fairseq.data.glue.prepared_data import PreparedDiagnostic
from lazyformer_fairseq.experiments.curve_training import CurveTraining, train_in_turn
from lazyformer_fairseq.experiments.diagnostics.comparison.report import write_report
from lazyformer_fairseq.experiments.diagnostics.comparison.settings import SCRATCH, SELF_PRETRAINED, TaskRunSettings
from lazyformer_fairseq.measure.costs.machine import describe_machine, describe_versions
from lazyformer_fairseq.report.numbers import spread
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import keep_settings, run_lock

VALIDATIONS = 5  # points of a curve beside the first; it is also saved there
RESULT = "result.json"


@dataclass(frozen=True)
class Entry:
    """One training of the comparison: a pattern with a seed, and how it starts."""

    name: str
    seed: int
    start: str

    def folder(self, out: Path) -> Path:
        return out / "runs" / f"{self.name}-seed{self.seed}" / self.start.replace(" ", "-")

    def self_pretraining(self, out: Path) -> Path:
        """The folder of what precedes it."""
        return self.folder(out).with_name("self-pretraining")


class DiagnosticTraining(CurveTraining):
    """A training whose curve has `accuracy`: of masked symbols in per cent, or of answers as a share."""

    def measure(self) -> Mapping[str, float]:
        found = self.evaluate()
        return {"accuracy": float(found["accuracy"]), "loss": float(found["loss"])}

    def is_due(self) -> bool:
        return self.updates % max(1, self.total // VALIDATIONS) == 0 or self.updates == self.total


def run(settings: TaskRunSettings, out: Path, command: Sequence[str]) -> str:
    """Runs the comparison in `out`, or resumes it; returns the table.

    Writes there `results.json`, `table.md`, `table.csv` and `learning.png`, and into `runs` the trained models.

    Args:
        command: as it was given, for the record.

    Raises:
        UserError: the folder holds a comparison of other settings, or a size does not fit.
    """
    with run_lock(out), _random_starts_are_meant():
        begun = any(out.glob("runs/*/*/checkpoint_last.pt"))
        keep_settings(out / "settings.json", asdict(settings), "a comparison", begun)
        _train_all(settings, out)
        manifest = PreparedDiagnostic.load(settings.data).manifest
        results = {
            "command": " ".join(command),
            "machine": describe_machine(settings.device),
            "versions": describe_versions(),
            "settings": asdict(settings),
            "data": {name: manifest[name] for name in ("task", "settings", "splits", "rules")},
            "entries": _collect(settings, out),
        }
        write_json(out / "results.json", results)
        return write_report(results, out)


def _entries(settings: TaskRunSettings, seed: int) -> list[Entry]:
    return [Entry(name, seed, start) for name in settings.patterns for start in settings.starts]


def _train_all(settings: TaskRunSettings, out: Path) -> None:
    """Seed after seed; within a seed first all self-pretrainings, then all on the task, in turn."""
    each = len(settings.patterns) * (len(settings.starts) * settings.updates + settings.self_pretrain)
    with tqdm(total=len(settings.seeds) * each, desc="training", unit=" updates") as progress:
        for seed in settings.seeds:
            entries = [entry for entry in _entries(settings, seed) if not (entry.folder(out) / RESULT).exists()]
            progress.update(settings.updates * (len(_entries(settings, seed)) - len(entries)))
            _self_pretrain(settings, out, seed, entries, progress)
            _fine_tune(settings, out, entries, progress)


def _self_pretrain(settings: TaskRunSettings, out: Path, seed: int, entries: list[Entry], progress: tqdm) -> None:
    """Trains what the entries begin with, unless it is there."""
    wanted = [entry for entry in entries if entry.start == SELF_PRETRAINED]
    waiting = [entry for entry in wanted if not (entry.self_pretraining(out) / RESULT).exists()]
    if settings.self_pretrain:
        progress.update(settings.self_pretrain * (len(settings.patterns) - len(waiting)))
    trainings = [
        DiagnosticTraining(
            f"{entry.name} masks",
            settings.self_pretraining_command(settings.patterns[entry.name], seed),
            entry.self_pretraining(out),
            settings.self_pretrain,
        )
        for entry in waiting
    ]
    _train(trainings, progress)
    for training in trainings:
        _finish(training, {})


def _fine_tune(settings: TaskRunSettings, out: Path, entries: list[Entry], progress: tqdm) -> None:
    trainings = []
    for entry in entries:
        before = None if entry.start == SCRATCH else entry.self_pretraining(out) / "checkpoint_last.pt"
        words = settings.fine_tuning_command(settings.patterns[entry.name], entry.seed, before)
        trainings.append(DiagnosticTraining(f"{entry.name} {entry.start}", words, entry.folder(out), settings.updates))
    _train(trainings, progress)
    for training in trainings:
        _finish(training, {"test_accuracy": float(training.evaluate("test")["accuracy"])})


def _train(trainings: list[DiagnosticTraining], progress: tqdm) -> None:
    if trainings:
        progress.update(sum(training.updates for training in trainings))
        train_in_turn(trainings, progress)


def _finish(training: DiagnosticTraining, found: Mapping[str, float]) -> None:
    """Writes the result, and removes the optimizer's part of the checkpoint from the disk."""
    training.save(with_optimizer=False)
    whole = {"parameters": training.parameters, "curve": training.curve, "seconds": training.seconds, **found}
    write_json(training.folder / RESULT, whole)


def _collect(settings: TaskRunSettings, out: Path) -> list[dict[str, Any]]:
    """The entries of results.json, one a pattern and start, over all seeds."""
    found = []
    for name, pattern in settings.patterns.items():
        for start in settings.starts:
            entries = [Entry(name, seed, start) for seed in settings.seeds]
            runs = [read_json(entry.folder(out) / RESULT) for entry in entries]
            before = []
            if start == SELF_PRETRAINED:
                before = [read_json(entry.self_pretraining(out) / RESULT) for entry in entries]
            found.append(
                {
                    "name": name,
                    "pattern": pattern,
                    "start": start,
                    "parameters": runs[0]["parameters"],
                    "test_accuracy": [run["test_accuracy"] for run in runs],
                    "valid_accuracy": [run["curve"]["accuracy"][-1] for run in runs],
                    "masked_accuracy": [run["curve"]["accuracy"][-1] / 100 for run in before],
                    "milliseconds": spread([1000 * second for run in runs for second in run["seconds"]]),
                    "seconds": [sum(run["seconds"]) for run in runs],
                    "self_pretraining_seconds": [sum(run["seconds"]) for run in before],
                    "curves": [run["curve"] for run in runs],
                }
            )
    return found


@contextmanager
def _random_starts_are_meant() -> Iterator[None]:
    """Without the fine-tuning task's warning of them."""
    logger = logging.getLogger("lazyformer_fairseq.fairseq_plugin.tasks.fine_tuning")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
