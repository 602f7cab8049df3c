"""Tokens per second that the data loader delivers on its own, beside those that the model takes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from lazyformer_fairseq.fairseq_plugin.reliability.options import refuse_long_temporary_folder
from lazyformer_fairseq.measure.stepwise import StepwiseTraining

WARM_UP = 2  # untimed batches or updates: workers start, torch chooses kernels


def measure_speeds(command: list[str], workers: Sequence[int], seconds: float) -> dict[str, float]:
    """Tokens a second, without padding: of the model, then of the loader with each number of workers.

    The loader covers all that a run does before an update: reading, packing, masking, collating and, with workers,
    the transfer to the run's process. 0 workers means a thread of that process, which the model does not share here.

    Args:
        command: arguments of fairseq-train, including task, model and optimizer.
        seconds: for each measurement.

    Raises:
        UserError: as the task does; there is no place for the workers' sockets.
    """
    refuse_long_temporary_folder(max(workers))
    with TemporaryDirectory() as folder:
        training = StepwiseTraining([*command, "--no-save"], Path(folder))
        sources = {"model, an update": (training.update() for _ in iter(int, 1))}
        sources |= {f"loader, {number} workers": _loaded_tokens(training, number) for number in workers}
        return {
            name: _speed(counts, seconds) for name, counts in tqdm(sources.items(), desc="data loading", leave=False)
        }


def _loaded_tokens(training: StepwiseTraining, workers: int) -> Iterator[int]:
    """The tokens of each batch that a run with this many workers would get, epoch after epoch."""
    training.cfg.dataset.num_workers = workers
    epoch = training.trainer.get_train_iterator(1)
    while True:
        for batch in epoch.next_epoch_itr():
            yield batch["ntokens"]


def _speed(counts: Iterator[int], seconds: float) -> float:
    """Tokens a second over about `seconds`."""
    for _ in range(WARM_UP):
        next(counts)
    total, start = 0, time.perf_counter()
    while not total or time.perf_counter() - start < seconds:
        total += next(counts)
    return total / (time.perf_counter() - start)


def as_rows(speeds: Mapping[str, float]) -> list[dict[str, str]]:
    """For a table; `times the model` divides by the first one, the model."""
    model = next(iter(speeds.values()))
    return [
        {"": name, "tokens a second": f"{speed:,.0f}", "times the model": f"{speed / model:.1f}"}
        for name, speed in speeds.items()
    ]
