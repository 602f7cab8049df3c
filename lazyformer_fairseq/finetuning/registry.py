"""The table of benchmarks, and look-up of the benchmark that belongs to a task or a grid."""

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

# A new benchmark is a file in tasks/, a row here and a name in TASK_NAMES of settings.py.
BENCHMARKS: dict[str, Benchmark] = {each.BENCHMARK.key: each.BENCHMARK for each in (glue, babylm, squad)}


def custom_task(row: TaskDescription) -> CustomTask:
    """Return the benchmark for the description of a custom task."""
    if row.tags_words:
        return TaggedWords(row)
    return CustomTask(row)


def benchmark_of_task(name: str, where: Path, description: Optional[dict[str, Any]] = None) -> Benchmark:
    """Return the benchmark that has a task of this name.

    Args:
        name: the name of the task.
        where: the file that names it, for messages.
        description: the description of a custom task in the grid or the result; None for other tasks.

    Raises:
        UserError: no benchmark has such a task, or the description is damaged.
    """
    if description is not None:
        return custom_task(TaskDescription.from_json(description, where))
    for benchmark in BENCHMARKS.values():
        if name in benchmark.tasks:
            return benchmark
    raise UserError(f"{where}: {name!r} is not a task of {', '.join(BENCHMARKS)}")


def benchmark_of_grid(folder: Path) -> Benchmark:
    """Return the benchmark of the grid in a folder.

    Raises:
        UserError: the folder contains no grid, or one with unknown tasks.
    """
    path = folder / "runs" / GRID_FILE
    grid = read_grid(path)
    first_task = next(iter(grid.tasks), "")
    return benchmark_of_task(first_task, path, grid.description)


def best_run(folder: Path) -> Path:
    """Return the folder of the best run in a grid of one model and task; `folder` itself if it is not a grid."""
    if not (folder / "runs").is_dir():
        return folder
    runs: list[Path] = []
    for _, runs_of_model in best_runs(folder):
        runs += runs_of_model.values()
    if len(runs) > 1:
        listed = "\n".join(map(str, runs))
        raise UserError(f"{folder} has several models or tasks; give the folder of one run instead:\n{listed}")
    return runs[0]


def best_runs(folder: Path) -> Iterator[tuple[str, dict[str, Path]]]:
    """Yield each model of a grid with the folders of its best runs by task, according to the development score.

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
