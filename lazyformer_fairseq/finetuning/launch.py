"""Implements ``lazyformer finetune``, which checks and runs a grid, and ``lazyformer predict``.

Predictions are made with the best runs of a grid, with individual runs, or with a checkpoint.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Optional

import click

from lazyformer_fairseq.arguments import checkpoint_at
from lazyformer_fairseq.child_process import STOPPED
from lazyformer_fairseq.data.prepared_folder import PreparedFolder
from lazyformer_fairseq.data.text.tokenizer import find_tokenizer_folder
from lazyformer_fairseq.errors import UserError, nearest, whole_number
from lazyformer_fairseq.executors.interface import Executor
from lazyformer_fairseq.executors.nvidia_smi import precision_here
from lazyformer_fairseq.executors.options import choose_executor, choose_gpus
from lazyformer_fairseq.finetuning.benchmark import Benchmark
from lazyformer_fairseq.finetuning.grid import Grid, StartModel, load_start_models, name_checkpoints
from lazyformer_fairseq.finetuning.queue import RunQueue
from lazyformer_fairseq.finetuning.registry import (
    BENCHMARKS,
    benchmark_of_grid,
    benchmark_of_task,
    best_runs,
    custom_task,
)
from lazyformer_fairseq.finetuning.results import RESULT, read_run
from lazyformer_fairseq.finetuning.settings import CUSTOM_OPTIONS, SPECIAL_OPTIONS, GridSettings, PredictSettings
from lazyformer_fairseq.finetuning.tasks.custom import ENDINGS, CustomTask, find_custom_task
from lazyformer_fairseq.finetuning.training import fine_tune
from lazyformer_fairseq.options import reject_non_defaults
from lazyformer_fairseq.storage.atomic import atomic_folder

PRELOAD = (fine_tune.__module__, "torch._dynamo")  # optimizers import the latter
PREPARING = ("max_length", "skip_mistakes", *CUSTOM_OPTIONS)  # options that apply only while data is prepared


def choose_benchmark(task: Optional[str], given: GridSettings) -> Benchmark:
    """Return the benchmark named by --task or, if it is not set, the custom task in --data, if any, else GLUE.

    Raises:
        UserError: there is no such benchmark, or the files of the custom task are invalid.
    """
    if task is None:
        row = find_custom_task(given)
        if row is not None:
            return custom_task(row)
        glue = BENCHMARKS["glue"]
        folders = set()
        for glue_task in glue.tasks.values():
            folders |= {glue_task.name, glue_task.folder}
        if given.data and not any((given.data / name).is_dir() for name in folders):
            raise UserError(
                f"{given.data} contains neither a custom task's train file ({', '.join(ENDINGS)}) nor a GLUE folder "
                "such as CoLA; for other data, set --task"
            )
        return glue
    if task not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        raise UserError(
            f"--task {task}: must be one of {known}; for a custom task, set only --data{nearest(task, BENCHMARKS)}"
        )
    return BENCHMARKS[task]


def grid_and_executor(benchmark: Benchmark, given: GridSettings) -> tuple[Grid, Executor]:
    """Prepare missing data, and return the requested grid and the executor for its runs.

    Raises:
        UserError: a task's data is missing or incomplete, a checkpoint cannot be loaded or does not match the data, or
            options conflict.
    """
    is_official = given.data is not None
    if is_official:
        folders = [given.data, *(given.data / name for name in benchmark.tasks)]
        is_official = not any(map(PreparedFolder.is_at, folders))
    others = [name for name in SPECIAL_OPTIONS if name not in benchmark.options]
    reject_non_defaults(given, others, f"does not apply to {benchmark.name}")
    if not is_official:
        reject_non_defaults(given, PREPARING, "applies only if --data contains official files")

    protocol = benchmark.default_protocol
    if given.protocol:
        if given.protocol not in benchmark.protocols:
            raise UserError(
                f"--protocol {given.protocol}: for {benchmark.name} it must be one of {', '.join(benchmark.protocols)}"
            )
        protocol = benchmark.protocols[given.protocol]
    names = benchmark.choose_tasks(given.tasks or protocol.tasks)
    left_out = benchmark.untrainable_tasks(names, given.data or given.output / benchmark.prepared_subfolder)
    for reason in left_out.values():
        click.echo(f"note: {reason}")
    names = [name for name in names if name not in left_out]
    epochs = choose_epochs(benchmark, names, protocol.epochs, given.epochs)
    checkpoints = name_checkpoints(given.checkpoints)
    executor = choose_executor(
        given,
        given.output / "runs" / "jobs",
        f"lazyformer-{benchmark.key}",
        given.threads,
        choose_gpus(given.gpus),
        preload=PRELOAD,
    )

    if is_official:  # load the models before preparing data, so that errors surface sooner
        tokenizer = find_tokenizer_folder(given.tokenizer or next(iter(checkpoints.values())).parent)
        models = load_start_models(checkpoints, tokenizer)
        wanted = replace(given, tokenizer=tokenizer, tasks=tuple(names))
        refuse_short_models(models, benchmark.longest_input(wanted))
        click.echo(benchmark.prepare(wanted, [model.options.max_positions for model in models]))
        prepared = benchmark.load(given.output / benchmark.prepared_subfolder, names)
    else:
        prepared = benchmark.load(given.data or given.output / benchmark.prepared_subfolder, names)
        first = next(iter(prepared.values()))
        models = load_start_models(checkpoints, first.tokenizer_folder)
        refuse_short_models(models, benchmark.longest_input(given, first))

    precision = given.precision or precision_here()
    if given.gpus == "none" and not given.precision:
        precision = "fp32"
    warmup_ratio = protocol.warmup_ratio
    if given.warmup_ratio is not None:
        warmup_ratio = given.warmup_ratio
    grid = Grid(
        benchmark=benchmark,
        output=given.output,
        models=models,
        tasks=prepared,
        lrs=given.lrs or protocol.lrs,
        seeds=given.seeds or protocol.seeds,
        epochs=epochs,
        batch_size=given.batch_size or protocol.batch_size,
        warmup_ratio=warmup_ratio,
        precision=precision,
        max_train_rows=given.max_train_rows,
        no_padding=given.no_padding,
        report_to=given.report_to,
        extra=benchmark.extra_settings(given, prepared),
    )
    for run in grid.runs:
        run.result()  # raises an error if there is a result with different settings
    for run in grid.one_run_per_model_and_task:
        run.refuse_other_settings()
    for warning in grid.warnings():
        click.echo(f"note: {warning}")
    return grid, executor


def choose_epochs(benchmark: Benchmark, names: Sequence[str], usual: int, given: Sequence[str]) -> dict[str, int]:
    """Parse --epochs (``N`` for all tasks, ``TASK=N`` for one task), and return the number of epochs by task."""
    epochs = dict.fromkeys(names, usual)
    for text in sorted(given, key=lambda text: "=" in text):
        name, found, number = text.rpartition("=")
        if not whole_number(number):
            raise UserError(f"--epochs {text}: must be N or TASK=N, as in {names[0]}=3")
        if found:
            chosen = benchmark.choose_tasks([name])
        else:
            chosen = names
        if not epochs.keys() >= set(chosen):
            raise UserError(f"--epochs {text}: this task is not among --tasks")
        epochs |= dict.fromkeys(chosen, int(number))
    return epochs


def refuse_short_models(models: Sequence[StartModel], longest: Optional[int]) -> None:
    """Raise a UserError if the longest input exceeds a model's maximum number of positions."""
    for model in models:
        positions = model.options.max_positions
        if longest is not None and positions < longest:
            raise UserError(
                f"{model.checkpoint} has {positions} positions, but inputs have up to {longest} tokens; "
                f"prepare the data with --max-length {positions}, in a separate folder"
            )


def run_to_the_end(benchmark: Benchmark, given: GridSettings) -> NoReturn:
    """Run a grid, print its report, and exit with status 0 (1 if runs failed, 130 if the command was stopped).

    Raises:
        UserError: :func:`grid_and_executor` failed, or another queue is running in the folder.
    """
    grid, executor = grid_and_executor(benchmark, given)
    queue = RunQueue(grid, executor, given.keep_checkpoints, given.threads)
    try:
        queue.run()
    except KeyboardInterrupt:
        done = f"{len(queue.results)} of {len(grid.runs)} runs are finished"
        click.echo(f"stopped: {done}; rerun to resume", err=True)
        sys.exit(STOPPED)
    click.echo(f"{grid.output / 'runs'}: {len(queue.results)} of {len(grid.runs)} runs are finished")
    for failed, message in queue.failed.items():
        click.echo(f"failed: {failed.name}: {message}", err=True)
    if queue.failed:
        click.echo("run the same command again to retry the failed runs", err=True)
    if queue.results:
        from lazyformer_fairseq.finetuning.report import write_report  # loads matplotlib

        output = grid.output / "report"
        click.echo(f"\n{write_report(grid.output, output)}\nwritten to {output}")
        if isinstance(benchmark, CustomTask) and given.keep_checkpoints != "none":
            click.echo(f"to use the model: lazyformer predict {grid.output} {benchmark.EXAMPLE_FILE}")
    sys.exit(1 if queue.failed else 0)


def predict(sources: Sequence[Path], target: Path, wanted: PredictSettings) -> list[str]:
    """Write predictions to the folder `target` atomically.

    Args:
        sources: the folder of a grid, the folders of individual runs (one per task), or a checkpoint fine-tuned on
            SQuAD. For a grid, the predictions of each model's best runs are written to `target`/MODEL.
        target: the folder to write.
        wanted: the command's options.

    Returns:
        The lines that the command prints.

    Raises:
        UserError: no run has succeeded, two runs have the same task, or the benchmark cannot predict. In each of these
            cases, nothing is written.
    """
    if len(sources) == 1 and (sources[0] / "runs").is_dir():
        benchmark = benchmark_of_grid(sources[0])
        lines = []
        with atomic_folder(target) as unfinished:
            for model, runs in best_runs(sources[0]):
                (unfinished / model).mkdir(parents=True)
                lines += [f"{target / model}: {line}" for line in benchmark.predict(runs, unfinished / model, wanted)]
        return lines

    found: dict[str, Path] = {}
    for source in sources:
        path = source / RESULT
        if path.is_file():
            result = read_run(path)
            name = result.task
            benchmark = benchmark_of_task(name, path, result.settings.get("description"))
            read_run(path, benchmark)  # again, to check its metrics too
            run = source
        else:
            benchmark = BENCHMARKS["squad"]
            name = next(iter(benchmark.tasks))
            run = checkpoint_at(source)
        if name in found:
            raise UserError(f"{source} and {found[name]} are both runs on {name}; pass one run per task")
        found[name] = run
    with atomic_folder(target) as unfinished:
        return [f"{target}: {line}" for line in benchmark.predict(found, unfinished, wanted)]
