"""Predictions of fine-tuned models: of a grid's best runs, of given runs, or of a checkpoint."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.benchmark import benchmark_of_grid, benchmark_of_task, find_benchmark
from lazyformer_fairseq.finetuning.results import BEST, RESULT, read_results, read_run
from lazyformer_fairseq.finetuning.settings import PredictSettings
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.json_files import read_json


def predict(sources: Sequence[Path], target: Path, wanted: PredictSettings) -> list[str]:
    """Predicts into `target`, whole or not at all: of a grid's folder with each model's best runs into MODEL there.

    Args:
        sources: the folder of a grid; or those of runs, one a task; or a checkpoint, which can answer SQuAD alone.

    Returns:
        What the command prints, by line.

    Raises:
        UserError: no run has ended well; two runs of a task; or what the benchmark raises. Nothing is written then.
    """
    if len(sources) == 1 and (sources[0] / "runs").is_dir():
        benchmark, lines = benchmark_of_grid(sources[0]), []
        with atomic_folder(target) as unfinished:
            for model, runs in _best_runs(sources[0]):
                (unfinished / model).mkdir(parents=True)
                lines += [f"{target / model}: {line}" for line in benchmark.predict(runs, unfinished / model, wanted)]
        return lines
    of_task: dict[str, Path] = {}
    for source in sources:
        path, benchmark = source / RESULT, find_benchmark("squad")
        if path.is_file():
            benchmark = benchmark_of_task(read_json(path).get("task"), path)
        name = read_run(path, benchmark).task if path.is_file() else next(iter(benchmark.tasks))
        if name in of_task:
            raise UserError(f"{source} and {of_task[name]}: both are of {name}; give one run a task")
        of_task[name] = source if path.is_file() else checkpoint_at(source)
    with atomic_folder(target) as unfinished:
        return [f"{target}: {line}" for line in benchmark.predict(of_task, unfinished, wanted)]


def _best_runs(grid: Path) -> Iterator[tuple[str, dict[str, Path]]]:
    """Each model's best run of each task, by the development score; of equals one whose checkpoint was kept."""
    results = read_results(grid, benchmark_of_grid(grid))
    if not results.runs:
        raise UserError(f"{grid / 'runs'}: no run has ended well")
    for model in results.grid.models:
        best = {task: [run.folder for run in results.of(model, task).best] for task in results.grid.tasks}
        kept = {task: [folder for folder in found if (folder / BEST).is_file()] for task, found in best.items()}
        yield model, {task: (kept[task] or found)[0] for task, found in best.items() if found}
