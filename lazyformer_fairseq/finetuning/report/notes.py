"""What a reader of every report needs to know."""

from lazyformer_fairseq.finetuning.report.results import Results
from lazyformer_fairseq.finetuning.report.tables import INCOMPLETE


def notes_on_runs(results: Results) -> list[str]:
    """On bounds, hours and gaps, a sentence or two each."""
    grid = results.grid
    hours = sum(run.seconds for run in results.runs.values()) / 3600
    said = [
        "95% bounds: Student's t, two-sided, of the mean over the seeds of the chosen rate; above baseline: the lower "
        "bound is. They tell the chance of the seed from learning. That epoch and rate were chosen on the same "
        "development set is not in them.",
        f"Hours of all runs ({len(results.runs)}) together: {hours:.2f}.",
    ]
    if any(not results.of(model, task).is_complete for model in grid.models for task in grid.tasks):
        said.append(f"{INCOMPLETE} The grid of this task is incomplete: the number may change when it is whole.")
    return said


def notes_on_failures(results: Results) -> list[str]:
    """On runs that are of another grid, or failed."""
    others = f"Runs in the folder that are not of this grid, and left out: {results.outside_grid}."
    failed = [f"Failed: {failure.folder}: {failure.message}" for failure in results.failures.values()]
    return [*([others] if results.outside_grid else []), *failed]
