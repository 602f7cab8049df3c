"""A single fine-tuning run, which evaluates each epoch, keeps the best checkpoint and writes result.json."""

import logging
import math
import shutil
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch

from lazyformer_fairseq.child_process import output_to
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.grid import Run
from lazyformer_fairseq.finetuning.results import (
    BEST,
    FORMAT_VERSION,
    LAST,
    LOG,
    RESULT,
    development_splits,
    split_file,
)
from lazyformer_fairseq.storage import checkpoint_file
from lazyformer_fairseq.storage.atomic import OUT_OF_SPACE
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import file_lock
from lazyformer_fairseq.training.loop import TrainingLoop
from lazyformer_fairseq.training.optimization import OptimizationConfig
from lazyformer_fairseq.training.run_record import (
    METRICS,
    RUN,
    MetricsLine,
    MetricsLog,
    finite_values,
    read_run,
    write_run,
)

logger = logging.getLogger(__name__)

LINE_EVERY = 100  # updates


@dataclass(frozen=True)
class Epoch:
    """The result of a finished epoch.

    Attributes:
        number: the epoch's number, starting at 1.
        metrics: metric values by development file and metric name.
    """

    number: int
    metrics: dict[str, dict[str, float]]

    def score(self, metric: str) -> float:
        """Return a metric's value on the first development file."""
        return next(iter(self.metrics.values()))[metric]


def fine_tune(run: Run, threads: int = 1) -> None:
    """Execute a fine-tuning run; write train.log, metrics.jsonl, checkpoint_best.pt and result.json to its folder.

    A killed run resumes after its last saved epoch; if none was saved, its files are removed and it starts over. A
    second process in the same folder waits for the first, and returns if the first has finished the run.

    Args:
        run: the run.
        threads: number of torch threads on a CPU, which affects the last digits of the result.

    Raises:
        UserError: the folder contains a result with different settings, or training fails.
    """
    torch.set_num_threads(threads)
    run.folder.mkdir(parents=True, exist_ok=True)
    with file_lock(run.folder / ".lock"), output_to(run.folder / LOG):
        if run.result() is not None:
            return
        _clear_unless_resumable(run)
        try:
            write_json(run.folder / RESULT, _train(run))
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{run.name}: the GPU has too little memory for batches of {run.grid.batch_size} rows of up to "
                f"{run.tokens_per_sample} tokens; use a smaller --max-length, --precision bf16, or fewer --workers "
                f"per GPU ({checkpoint_file.first_line(error)})"
            ) from error
        except OSError as error:
            if error.errno not in OUT_OF_SPACE:
                raise
            raise UserError(
                f"{error.filename}: cannot be written ({error.strerror}); free up disk space and run the same command "
                "again"
            ) from error


def _clear_unless_resumable(run: Run) -> None:
    last = run.folder / LAST
    if run.is_worth_resuming and last.exists() and (run.folder / RUN).exists():
        try:
            checkpoint_file.load(last)
            if not run.describe_differences(read_run(run.folder).trainer):
                return
        except UserError as error:
            logger.warning("starting over: %s", error)
    for path in (*run.folder.glob("*.pt"), run.folder / RUN, run.folder / METRICS):
        path.unlink(missing_ok=True)
    shutil.rmtree(run.folder / "tokenizer", ignore_errors=True)


def _train(run: Run) -> dict[str, Any]:
    """Train, and return the contents of result.json."""
    began = time.perf_counter()
    if torch.cuda.is_available():
        device = "cuda"
    else:
        device = "cpu"
    objective = run.grid.benchmark.objective(run)
    optimization = optimization_of(run, device)
    loop = TrainingLoop(objective, optimization, run.folder)
    write_run(run.folder, replace(loop.describe(), trainer=run.settings))
    with closing(MetricsLog(run.folder, loop.updates, run.grid.report_to)) as log:
        best = _train_epochs(run, loop, log)
    (run.folder / LAST).unlink(missing_ok=True)

    baseline = {}
    for split in development_splits(run.task):
        baseline[split_file(run.task, split)] = run.grid.benchmark.baseline(run, split)
    return {
        "format_version": FORMAT_VERSION,
        "model": run.model.name,
        "task": run.task.name,
        "lr": run.lr,
        "seed": run.seed,
        "epochs": run.epochs,
        "checkpoint": str(run.model.checkpoint),
        "updates": run.model.updates,
        "best_epoch": best.number,
        "splits": [facts.as_json() for facts in run.facts],
        "metrics": best.metrics,
        "baseline": baseline,
        "train_rows": run.train_rows,
        "seconds": time.perf_counter() - began,
        "settings": run.settings,
    }


def optimization_of(run: Run, device: str) -> OptimizationConfig:
    """Return the optimization settings of the LazyFormer paper (Table 5), with the run's learning rate and seed.

    `device` is ``cpu`` or ``cuda``.
    """
    return OptimizationConfig(
        updates=run.updates,
        rate=run.lr,
        seed=run.seed,
        optimizer="fused_adam",
        optimizer_options={"adam_betas": "(0.9, 0.999)", "adam_eps": 1e-6, "weight_decay": 0.01},
        schedule="linear_warmup",
        schedule_options={"warmup_ratio": run.grid.warmup_ratio},
        clip_norm=1.0,
        precision=run.grid.precision,
        device=device,
    )


def _train_epochs(run: Run, loop: TrainingLoop, log: MetricsLog) -> Epoch:
    """Train the remaining epochs, keep the checkpoint of the best epoch, and return that epoch.

    The best epoch has the highest selecting metric on the first development file; among ties the last epoch wins.
    """

    def write_line(split: str, values: dict[str, float]) -> None:
        line = MetricsLine(
            updates=loop.updates,
            split=split,
            seconds=sum(loop.seconds),
            values=finite_values(values),
            epoch=number,
        )
        log.append(line)

    def write_training_line() -> None:
        scalars = loop.objective.scalars([loop.log])
        values = {name: scalar.value for name, scalar in scalars.items()}
        write_line("train", {"lr": loop.optimizer.get_lr(), **values})

    epochs = loop.from_history("epochs", list[Epoch], [])
    metric = run.task.selecting_metric
    best = None
    for epoch in epochs:
        best = _better(best, epoch, metric)
    for number in range(len(epochs) + 1, run.epochs + 1):
        for _ in loop.rest_of_epoch():
            if loop.updates % LINE_EVERY == 0:
                write_training_line()
        write_training_line()

        metrics = {}
        for split in development_splits(run.task):
            found = loop.evaluate(split)
            metrics[split_file(run.task, split)] = {name: found[name] for name in run.task.metrics}
            write_line(split, found)
        epoch = Epoch(number, metrics)
        logger.info("epoch %d of %d: %s", number, run.epochs, metrics)

        epochs.append(epoch)
        loop.history["epochs"] = [vars(each) for each in epochs]
        best = _better(best, epoch, metric)
        if best is epoch:
            loop.save(with_optimizer=False, name=BEST)
        if run.is_worth_resuming:
            loop.save()
    return best


def _better(best: Optional[Epoch], epoch: Epoch, metric: str) -> Epoch:
    """Return the epoch with the higher score; among ties the later one wins."""
    if best is None or math.isnan(best.score(metric)):
        return epoch
    if epoch.score(metric) >= best.score(metric):
        return epoch
    return best
