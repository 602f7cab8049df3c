"""Patterns side by side on a diagnostic: trained update by update in turn, from scratch and self-pretrained first."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from lazyformer_fairseq.data.prepared_folder import PreparedDiagnostic
from lazyformer_fairseq.experiments.diagnostics.settings import SCRATCH, SELF_PRETRAINED, TaskRunSettings
from lazyformer_fairseq.experiments.folder import RESULTS, experiment, record
from lazyformer_fairseq.experiments.trainings import CHECKPOINT, Job, Training, train
from lazyformer_fairseq.finetuning import fairseq_task
from lazyformer_fairseq.report.figures import picture
from lazyformer_fairseq.report.numbers import spread, with_spread
from lazyformer_fairseq.report.page import write_page
from lazyformer_fairseq.report.tables import Table, write_csv
from lazyformer_fairseq.storage.json_files import write_json

MASKS = "self-pretraining"  # folder of what precedes the second
NOTE = (
    "Accuracy is on the test split after the last update: the median over seeds, and the lowest and highest. The rules "
    "need no model. A diagnostic, not a leaderboard: it says whether a pattern learns this at these sizes at all."
)


class MaskFilling(Training):
    """Self-pretraining; `accuracy` is the per cent of masked symbols that it finds."""

    def measure(self) -> Mapping[str, float]:
        found = self.evaluate()
        return {"accuracy": float(found["accuracy"]), "loss": float(found["loss"])}


class Answering(MaskFilling):
    """Training on the task; `accuracy` is the share of right answers."""

    def result(self) -> dict[str, Any]:
        return super().result() | {"test_accuracy": float(self.evaluate("test")["accuracy"])}


def run(settings: TaskRunSettings, out: Path, command: Sequence[str]) -> str:
    """Runs the comparison in `out`, or resumes it; returns the table.

    Writes there `results.json`, `table.md`, `table.csv` and `learning.png`, and into `runs` the trained models.

    Args:
        command: as it was given, for the record.

    Raises:
        UserError: the folder holds a comparison of other settings, or a size does not fit.
    """
    with experiment(out, settings, "a comparison", f"runs/*/*/{CHECKPOINT}"), _random_starts_are_meant():
        jobs = jobs_of(settings, out)
        train(list(jobs.values()), lambda job: (MaskFilling if job.group[1] == MASKS else Answering)(job))
        manifest = PreparedDiagnostic.load(settings.data).manifest
        results = {
            **record(settings, command, settings.device),
            "data": {name: manifest[name] for name in ("task", "settings", "splits", "rules")},
            "entries": [_entry(settings, jobs, name, start) for name in settings.patterns for start in settings.starts],
        }
        write_json(out / RESULTS, results)
        return write_report(results, out)


def jobs_of(settings: TaskRunSettings, out: Path) -> dict[tuple[str, int, str], Job]:
    """By pattern, seed, and MASKS or a start. Within a seed all fill masks, in turn, before any learns the task."""
    jobs = {}
    for seed in settings.seeds:
        folders = {name: out / "runs" / f"{name}-seed{seed}" for name in settings.patterns}
        for name, folder in folders.items() if settings.self_pretrain else ():
            words = settings.self_pretraining_command(settings.patterns[name], seed)
            at = (folder / MASKS, settings.self_pretrain)
            jobs[name, seed, MASKS] = Job(f"{name} masks", tuple(words), *at, group=(seed, MASKS))
        for name, folder in folders.items():
            for start in settings.starts:
                before = None if start == SCRATCH else folder / MASKS / CHECKPOINT
                words = settings.fine_tuning_command(settings.patterns[name], seed, before)
                at = (folder / start.replace(" ", "-"), settings.updates)
                jobs[name, seed, start] = Job(f"{name} {start}", tuple(words), *at, group=(seed, "task"))
    return jobs


def _entry(settings: TaskRunSettings, jobs: Mapping[tuple, Job], name: str, start: str) -> dict[str, Any]:
    """Of results.json: a pattern and start, over all seeds."""
    runs = [jobs[name, seed, start].result() for seed in settings.seeds]
    before = [jobs[name, seed, MASKS].result() for seed in settings.seeds] if start == SELF_PRETRAINED else []
    return {
        "name": name,
        "pattern": settings.patterns[name],
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


@contextmanager
def _random_starts_are_meant() -> Iterator[None]:
    """Without the fine-tuning task's warning of them."""
    logger = logging.getLogger(fairseq_task.__name__)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def write_report(results: Mapping[str, Any], out: Path) -> str:
    """Writes table.md, table.csv and learning.png from results.json's content; returns the table."""
    write_csv(csv_rows(results), out / "table.csv")
    draw(results, out / "learning.png")
    return write_page([Table("", rows_of(results), left=("start",)), NOTE], out, "table").strip()


def rows_of(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row a pattern and start, then one a rule."""
    rows = [
        {
            "model": entry["name"],
            "start": entry["start"],
            "parameters": f"{entry['parameters']:,}",
            "masked symbols found": over_seeds(entry["masked_accuracy"]),
            "accuracy": over_seeds(entry["test_accuracy"]),
            "ms an update (quartiles)": with_spread(entry["milliseconds"]),
            "seconds in all": f"{median(seconds_in_all(entry)):,.0f}",
        }
        for entry in results["entries"]
    ]
    nothing = dict.fromkeys(rows[0], "")
    rules = results["data"]["rules"].items()
    return rows + [nothing | {"model": f"rule: {name}", "accuracy": f"{value:.1%}"} for name, value in rules]


def csv_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a pattern, start and seed, then one a rule."""
    rows = [
        {
            "model": entry["name"],
            "pattern": entry["pattern"],
            "start": entry["start"],
            "seed": seed,
            "parameters": entry["parameters"],
            "test_accuracy": entry["test_accuracy"][number],
            "valid_accuracy": entry["valid_accuracy"][number],
            "ms_per_update": entry["milliseconds"]["median"],
            "seconds_in_all": seconds_in_all(entry)[number],
        }
        for entry in results["entries"]
        for number, seed in enumerate(results["settings"]["seeds"])
    ]
    rules = results["data"]["rules"].items()
    return rows + [{"model": f"rule: {name}", "test_accuracy": value} for name, value in rules]


def over_seeds(shares: Sequence[float]) -> str:
    """The median and, of several, the lowest and highest; empty for none."""
    if len(shares) < 2:
        return "".join(f"{share:.1%}" for share in shares)
    return f"{median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"


def seconds_in_all(entry: Mapping[str, Any]) -> list[float]:
    """Of training, self-pretraining included, by seed."""
    before = entry["self_pretraining_seconds"] or [0.0] * len(entry["seconds"])
    return [one + other for one, other in zip(entry["seconds"], before, strict=True)]


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Validation accuracy against updates, the median over seeds, with the best rule and the constant answer."""
    rules = list(results["data"]["rules"].values())
    with picture(path, panel=(7, 4)) as ((axis,),):
        for entry in results["entries"]:
            curves = entry["curves"]
            accuracies = [median(values) for values in zip(*(curve["accuracy"] for curve in curves), strict=True)]
            style = "o-" if entry["start"] == SCRATCH else "s--"
            axis.plot(curves[0]["updates"], accuracies, style, markersize=4, label=f"{entry['name']}, {entry['start']}")
        axis.axhline(max(rules), color="grey", linestyle=":", label="best simple rule")
        axis.axhline(rules[0], color="grey", linestyle="-.", label="constant answer")
        axis.set(xlabel="updates on the task", ylabel=f"validation accuracy, {results['data']['task']}")
        axis.legend()
