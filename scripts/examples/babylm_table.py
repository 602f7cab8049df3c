"""Write the table of scripts/examples/babylm.sh: the cost, loss, minimal-pair and fine-tuning scores of each model.

With ``--trained`` before the folder, print the trained models instead.
"""

import sys
from pathlib import Path

from lazyformer_fairseq.experiments.compare.results import Model, read_folders
from lazyformer_fairseq.finetuning.registry import benchmark_of_grid
from lazyformer_fairseq.finetuning.report import average_of, model_row
from lazyformer_fairseq.finetuning.results import read_results
from lazyformer_fairseq.report.page import Notes, write_page
from lazyformer_fairseq.report.tables import Table
from lazyformer_fairseq.storage.json_files import read_checked_as
from lazyformer_fairseq.training.loop import CHECKPOINT
from lazyformer_fairseq.zero_shot.results import NORMAL_95, Answers


def main(folder: Path) -> None:
    """Write ``table.md`` to the script's output folder, and print it."""
    comparison = read_folders([folder / "models"])
    rows = []
    accuracies = {}
    for model in comparison.models.values():
        for seed in model.runs:
            name = name_of(model, seed)
            answers = read_checked_as(Answers, folder / "blimp" / f"{name}.json")
            accuracies[name] = answers.mean_accuracy(list(answers.margins))
            rows.append({**costs_of(model, seed), "BLiMP": with_interval(answers), "GLUE": fine_tuned(folder, name)})
    counts = read_checked_as(Answers, folder / "blimp" / "5-gram.json")
    by_counting = counts.mean_accuracy(list(counts.margins))
    best = max(accuracies, key=accuracies.__getitem__)
    verdict = (
        f"{best} has the highest accuracy on BLiMP, {100 * accuracies[best]:.1f}%. A 5-gram model of the same text "
        f"reaches {100 * by_counting:.1f}%."
    )
    device = comparison.facts["machine"]["device"]
    notes = Notes(
        [
            f"Hours: training time on one thread of {device}. Loss: bits per masked token.",
            f"BLiMP: mean accuracy over paradigms in percent, ± its 95% interval; 5-gram: {with_interval(counts)}.",
            "GLUE: mean score over BabyLM's tasks that have a training file, in percent.",
        ]
    )
    print(write_page([verdict, Table("Models under BabyLM's rules", rows), notes], folder, "table"))


def name_of(model: Model, seed: int) -> str:
    """Return the name of a model's run, which all tables use."""
    return f"{model.name}-seed{seed}"


def print_trained(folder: Path) -> None:
    """Print ``NAME=CHECKPOINT`` for every run, except the runs that tried another learning rate."""
    for model in read_folders([folder / "models"]).models.values():
        for seed in model.runs:
            name = name_of(model, seed)
            run = folder / "models" / "runs" / f"{name}-rate{model.facts['rate']:g}"
            print(f"{name}={run / CHECKPOINT}")


def costs_of(model: Model, seed: int) -> dict[str, str]:
    """Return the cells of a row that describe a run: its model, parameters, updates, hours and loss."""
    run = model.runs[seed]
    return {
        "model": model.name,
        "pattern": str(model.facts["pattern"]),
        "seed": str(seed),
        "parameters": f"{model.facts['parameters']:,}",
        "updates": f"{model.facts['updates']:,}",
        "hours": f"{run.total_costs()['seconds'] / 3600:.1f}",
        "loss": f"{run.final['loss']:.2f}",
    }


def with_interval(answers: Answers) -> str:
    """Return the mean accuracy over paradigms in percent, with its 95% interval."""
    names = list(answers.margins)
    half = NORMAL_95 * answers.standard_error(names)
    return f"{100 * answers.mean_accuracy(names):.1f} ±{100 * half:.1f}"


def fine_tuned(folder: Path, name: str) -> str:
    """Return the mean score over the fine-tuning tasks."""
    benchmark = benchmark_of_grid(folder / "glue")
    results = read_results(folder / "glue", benchmark)
    mean = average_of(model_row(results, benchmark, name), benchmark, set(results.grid.tasks))
    if mean is None:
        return "incomplete"
    return f"{mean:.1f}"


if __name__ == "__main__":
    if sys.argv[1] == "--trained":
        print_trained(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
