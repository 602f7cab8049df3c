"""The table of benchmarks, and functions that find the benchmark of a task or a grid."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.data.labelled_files import TaskDescription
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.benchmark import Benchmark
from lazyformer_fairseq.finetuning.results import BEST, GRID_FILE, read_grid, read_results
from lazyformer_fairseq.finetuning.tasks import babylm, glue, squad
from lazyformer_fairseq.finetuning.tasks.custom import CustomTask
from lazyformer_fairseq.finetuning.tasks.tags import TaggedWords

# To add a benchmark, write a file in tasks/, and add a row here and a name to TASK_NAMES in settings.py.
BENCHMARKS: dict[str, Benchmark] = {each.key: each for each in (glue.BENCHMARK, babylm.BENCHMARK, squad.BENCHMARK)}


def custom_task(row: TaskDescription) -> CustomTask:
    """Create the benchmark for a custom task."""
    if row.tags_words:
        return TaggedWords(row)
    return CustomTask(row)


def benchmark_of_task(name: str, where: Path, description: Optional[dict[str, Any]] = None) -> Benchmark:
    """Return the benchmark that contains the named task.

    Args:
        name: the name of the task.
        where: the file in which the name was found, for messages.
        description: a custom task's description, as stored with a grid or result; None for other tasks.

    Raises:
        UserError: no benchmark has such a task, or the description is damaged.
    """
    if description is not None:
        return custom_task(TaskDescription.from_json(description, where))
    for benchmark in BENCHMARKS.values():
        if name in benchmark.tasks:
            return benchmark
    raise UserError(f"{where}: {name!r} is not a task in any benchmark ({', '.join(BENCHMARKS)})")


def benchmark_of_grid(folder: Path) -> Benchmark:
    """Return the benchmark that the grid in a folder belongs to.

    Raises:
        UserError: the folder contains no grid, or the grid's tasks are unknown.
    """
    path = folder / "runs" / GRID_FILE
    grid = read_grid(path)
    first_task = next(iter(grid.tasks), "")
    return benchmark_of_task(first_task, path, grid.description)


def best_run(folder: Path) -> Path:
    """Return the best run's folder in a grid with one model and one task; return `folder` if it is not a grid."""
    if not (folder / "runs").is_dir():
        return folder
    runs: list[Path] = []
    for _, runs_of_model in best_runs(folder):
        runs += runs_of_model.values()
    if len(runs) > 1:
        listed = "\n".join(map(str, runs))
        raise UserError(f"{folder} contains several models or tasks; pass the folder of one run instead:\n{listed}")
    return runs[0]


def best_runs(folder: Path) -> Iterator[tuple[str, dict[str, Path]]]:
    """Yield each model of a grid with the folder of its best run on each task, by development score.

    Among equally good runs, one whose checkpoint was kept is preferred.
    """
    results = read_results(folder, benchmark_of_grid(folder))
    if not results.runs:
        raise UserError(f"{folder / 'runs'}: no run has finished successfully")
    for model in results.grid.models:
        best_of_tasks = {}
        for task in results.grid.tasks:
            best = [run.folder for run in results.of(model, task).best]
            kept = [path for path in best if (path / BEST).is_file()]
            if best:
                best_of_tasks[task] = (kept or best)[0]
        yield model, best_of_tasks
