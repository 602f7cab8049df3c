"""One fine-tuning run in this process: epochs of training, each one's metrics, the best checkpoint, result.json."""

import logging
import math
import shutil
import time
from dataclasses import dataclass
from typing import Any, Optional

import torch

from lazyformer_fairseq.child_process import output_to
from lazyformer_fairseq.data.prepared_folder import MANIFEST
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import versions
from lazyformer_fairseq.finetuning.grid import Run
from lazyformer_fairseq.finetuning.results import (
    BEST,
    LAST,
    LOG,
    RESULT,
    development_splits,
    split_file,
)
from lazyformer_fairseq.storage import checkpoint_file
from lazyformer_fairseq.storage.json_files import write_json
from lazyformer_fairseq.storage.run_lock import file_lock
from lazyformer_fairseq.training.loop import TrainingLoop
from lazyformer_fairseq.training.optimization import OptimizationConfig
from lazyformer_fairseq.training.run_record import (
    METRICS,
    RUN,
    MetricsLine,
    MetricsLog,
    RunRecord,
    describe_here,
    finite_values,
    read_run,
    write_run,
)

logger = logging.getLogger(__name__)

LINE_EVERY = 100  # updates


@dataclass(frozen=True)
class Epoch:
    """What an epoch came to.

    Attributes:
        number: the epoch, from 1.
        tokens: tokens of all epochs up to this one.
        metrics: of each development file, by name.
    """

    number: int
    tokens: int
    metrics: dict[str, dict[str, float]]

    def score(self, metric: str) -> float:
        """Return a metric of the first development file."""
        return next(iter(self.metrics.values()))[metric]


def fine_tune(run: Run, threads: int = 1) -> None:
    """Fine-tune, and write the run's folder: train.log, metrics.jsonl, checkpoint_best.pt, result.json.

    A killed run resumes where its last epoch was saved; otherwise its files are removed. A second process in the
    folder waits until the first is gone, and does nothing if the run is finished by then.

    Args:
        run: the run.
        threads: of torch on a CPU; the last digits of a result depend on their number.

    Raises:
        UserError: the folder holds the result of a run of other settings, or what training raises.
    """
    torch.set_num_threads(threads)
    run.folder.mkdir(parents=True, exist_ok=True)
    with file_lock(run.folder / ".lock"), output_to(run.folder / LOG):
        if run.result() is not None:
            return
        _clear_unless_resumable(run)
        try:
            result = _train(run)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{run.name}: the GPU's memory is too small for batches of {run.grid.batch_size} rows of up to "
                f"{run.tokens_per_sample} tokens; give a smaller --max-length, --precision bf16, or fewer --workers "
                f"per GPU ({checkpoint_file.first_line(error)})"
            ) from error
        write_json(run.folder / RESULT, result)


def _clear_unless_resumable(run: Run) -> None:
    last = run.folder / LAST
    if run.is_worth_resuming and last.exists() and (run.folder / RUN).exists():
        try:
            checkpoint_file.load(last)
            if not run.differs_from(read_run(run.folder).trainer):
                return
        except UserError as error:
            logger.warning("starting anew: %s", error)
    for path in (*run.folder.glob("*.pt"), run.folder / RUN, run.folder / METRICS):
        path.unlink(missing_ok=True)
    shutil.rmtree(run.folder / "tokenizer", ignore_errors=True)


def _train(run: Run) -> dict[str, Any]:
    """Train, and return the content of result.json."""
    began = time.perf_counter()
    if torch.cuda.is_available():
        device = "cuda"
    else:
        device = "cpu"
    objective = run.grid.benchmark.objective(run.request)
    optimization = optimization_of(run, device)
    loop = TrainingLoop(objective, optimization, run.folder)
    write_run(run.folder, _record_of(run, loop))
    best = _train_epochs(run, loop)
    (run.folder / LAST).unlink(missing_ok=True)

    found = {"metrics": best.metrics, "baseline": {}, "baselines": {}}
    for split in development_splits(run.task):
        file = split_file(run.task, split)
        baselines = run.grid.benchmark.baselines(run.request, split)
        found["baseline"][file] = max(baselines.values(), key=lambda marks: marks[run.task.selecting_metric])
        for name, marks in baselines.items():
            found["baselines"].setdefault(name, {})[file] = marks

    in_file, _ = run.data.size_of("train")
    train_seconds = sum(loop.seconds)
    return {
        "format_version": 1,
        "model": run.model.name,
        "task": run.task.name,
        "lr": run.lr,
        "seed": run.seed,
        "epochs": run.epochs,
        "checkpoint": str(run.model.checkpoint),
        "updates": run.model.updates,
        "best_epoch": best.number,
        "selected_by": run.task.selecting_metric,
        "splits": [facts.as_json() for facts in run.facts],
        **found,
        "train_rows": run.train_rows,
        "rows_in_file": in_file,
        "max_train_rows": run.grid.max_train_rows,
        "seconds": time.perf_counter() - began,
        "train_seconds": train_seconds,
        "tokens_per_second": loop.history["tokens"] / max(train_seconds, 1e-9),
        "batch_size": run.grid.batch_size,
        "warmup_ratio": run.grid.warmup_ratio,
        **run.grid.extra,
        "parameters": run.model.parameters,
        "settings": run.settings,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": versions(("torch", "numpy", "scikit-learn", "scipy")),
    }


def optimization_of(run: Run, device: str) -> OptimizationConfig:
    """Return LazyFormer's settings (Table 5), with the run's rate, seed and length, on ``cpu`` or ``cuda``."""
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


def _record_of(run: Run, loop: TrainingLoop) -> RunRecord:
    settings = loop.objective.settings()
    optimization = loop.optimization
    return RunRecord(
        command=(),
        model=settings["model"],
        parameters=loop.parameters,
        task=settings["task"],
        criterion=settings["criterion"],
        data={
            str(run.data.folder / MANIFEST): run.data.sha256,
            str(run.model.checkpoint): run.model.sha256,
        },
        optimizer={"name": optimization.optimizer, **optimization.optimizer_options},
        schedule={
            "name": optimization.schedule,
            "lr": optimization.rate,
            "max_update": optimization.updates,
            **optimization.schedule_options,
        },
        batch={"batch_size": run.grid.batch_size, "update_freq": 1, "clip_norm": optimization.clip_norm},
        precision=optimization.precision,
        seed=optimization.seed,
        processes=1,
        trainer=run.settings,
        **describe_here(loop.device),
    )


def _train_epochs(run: Run, loop: TrainingLoop) -> Epoch:
    """Train what is left of the epochs, and return the best one, whose checkpoint is kept.

    The best epoch has the highest selecting metric on the first development file; of equal ones it is the last.
    """
    log = MetricsLog(run.folder, loop.updates)
    epochs = loop.from_history("epochs", list[Epoch], [])
    metric = run.task.selecting_metric
    best = None
    for epoch in epochs:
        best = _better(best, epoch, metric)
    if epochs:
        tokens = epochs[-1].tokens
    else:
        tokens = 0
    loop.history["tokens"] = tokens
    for number in range(len(epochs) + 1, run.epochs + 1):
        for count in loop.rest_of_epoch():
            tokens += count
            if loop.updates % LINE_EVERY == 0:
                _write_line(log, loop, number, "train", {"lr": loop.optimizer.get_lr(), **_training_values(loop)})
        _write_line(log, loop, number, "train", {"lr": loop.optimizer.get_lr(), **_training_values(loop)})

        metrics = {}
        for split in development_splits(run.task):
            found = loop.evaluate(split)
            metrics[split_file(run.task, split)] = {name: found[name] for name in run.task.metrics}
            _write_line(log, loop, number, split, found)
        epoch = Epoch(number, tokens, metrics)
        logger.info("epoch %d of %d: %s", number, run.epochs, metrics)

        epochs.append(epoch)
        loop.history["tokens"] = tokens
        loop.history["epochs"] = [vars(each) for each in epochs]
        best = _better(best, epoch, metric)
        if best is epoch:
            loop.save(with_optimizer=False, name=BEST)
        if run.is_worth_resuming:
            loop.save()
    return best


def _better(best: Optional[Epoch], epoch: Epoch, metric: str) -> Epoch:
    """Return the epoch with the higher score; of equal ones the later."""
    if best is None or math.isnan(best.score(metric)) or epoch.score(metric) >= best.score(metric):
        return epoch
    return best


def _training_values(loop: TrainingLoop) -> dict[str, float]:
    """Return what was logged of the last update."""
    return {name: scalar.value for name, scalar in loop.objective.scalars([loop.log]).items()}


def _write_line(log: MetricsLog, loop: TrainingLoop, epoch: int, split: str, values: dict[str, float]) -> None:
    log.append(
        MetricsLine(
            updates=loop.updates,
            split=split,
            seconds=sum(loop.seconds),
            values=finite_values(values),
            epoch=epoch,
        )
    )
