"""Predictions of fine-tuned models: of a grid's best runs, of given runs, or of a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.benchmark import Benchmark, Prediction, benchmark_of_grid, find_benchmark
from lazyformer_fairseq.finetuning.results import BEST, GRID_FILE, RESULT, Run, read_results, read_run
from lazyformer_fairseq.finetuning.settings import PredictSettings
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.json_files import read_json


def predict(
    sources: Sequence[Path], target: Path, wanted: PredictSettings, task: Optional[str] = None
) -> list[Prediction]:
    """Predicts into `target`, whole or not at all: of a grid's folder with each model's best runs into MODEL there.

    Args:
        sources: the folder of a grid; or those of runs, one a task; or a checkpoint.
        task: the benchmark's name on the command line; None for the one that the sources are of.

    Raises:
        UserError: no run has ended well; two runs of a task; or what the benchmark raises. Nothing is written then.
    """
    grid = len(sources) == 1 and not _is_run(sources[0])
    if grid and (task is None or (sources[0] / "runs" / GRID_FILE).is_file() or not _holds_checkpoint(sources[0])):
        benchmark = find_benchmark(task) if task else benchmark_of_grid(sources[0])
        return predict_best(benchmark, sources[0], target, wanted)
    of_task: dict[str, Path] = {}
    for source in sources:
        found = find_benchmark(task) if task else _benchmark_of_run(source)
        name = read_run(source / RESULT, found).key.task if _is_run(source) else next(iter(found.tasks))
        if name in of_task:
            raise UserError(f"{source} and {of_task[name]}: both are of {name}; give one run a task")
        of_task[name] = source if _is_run(source) else checkpoint_at(source)
    with atomic_folder(target) as unfinished:
        prediction = found.predict(of_task, unfinished, wanted)
    prediction.folder = target
    return [prediction]


def predict_best(benchmark: Benchmark, output: Path, target: Path, wanted: PredictSettings) -> list[Prediction]:
    """Predicts with each model's best run of each task, by the development score, into `target`/MODEL."""
    results = read_results(output, benchmark)
    if not results.runs:
        raise UserError(f"{output / 'runs'}: no run has ended well")
    predictions = []
    with atomic_folder(target) as unfinished:
        for model in results.grid.models:
            best = {task: results.of(model, task).best for task in results.grid.tasks}
            of_task = {task: _with_checkpoint(runs) for task, runs in best.items() if runs}
            (unfinished / model).mkdir(parents=True)
            predictions.append(benchmark.predict(of_task, unfinished / model, wanted))
            predictions[-1].folder = target / model
    return predictions


def _with_checkpoint(runs: Sequence[Run]) -> Path:
    """One of equally good runs whose checkpoint was kept, else the first."""
    return next((run.folder for run in runs if (run.folder / BEST).is_file()), runs[0].folder)


def _is_run(path: Path) -> bool:
    return (path / RESULT).is_file()


def _holds_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint or a folder of some; a file that is not there would be one."""
    return path.suffix == ".pt" or any(path.glob("*.pt"))


def _benchmark_of_run(source: Path) -> Benchmark:
    """Of a run's folder the one that it is of; a checkpoint can answer SQuAD alone."""
    if not _is_run(source):
        return find_benchmark("squad")
    task = str(read_json(source / RESULT).get("task"))
    return next((one for one in map(find_benchmark, ("glue", "squad")) if task in one.tasks), find_benchmark("glue"))
