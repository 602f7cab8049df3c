"""Tokens per second that the data loader delivers on its own, beside those that the model takes."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from lazyformer_fairseq.training.stepwise import StepwiseTraining

WARM_UP = 2  # untimed batches or updates: workers start, torch chooses kernels


@dataclass(frozen=True)
class Speed:
    """The speed of one thing.

    Attributes:
        name: the model, or the loader with its number of workers.
        tokens: how many, without padding.
        seconds: how long they took.
    """

    name: str
    tokens: int
    seconds: float

    @property
    def tokens_a_second(self) -> float:
        return self.tokens / self.seconds


def measure_speeds(command: list[str], workers: list[int], seconds: float) -> list[Speed]:
    """The model's speed, then the loader's with each number of workers, each measured for about `seconds`.

    The loader covers all that a run does before an update: reading, packing, masking, collating and, with workers,
    the transfer to the run's process. 0 workers means a thread of that process, which the model does not share here.

    Args:
        command: arguments of fairseq-train, including task, model and optimizer.

    Raises:
        UserError: as the task does.
    """
    with TemporaryDirectory() as folder, tqdm(total=1 + len(workers), desc="data loading", leave=False) as bar:
        training = StepwiseTraining([*command, "--no-save"], Path(folder))
        tokens = (training.update() for _ in iter(int, 1))
        speeds = []
        for name, counts in [
            ("model, an update", tokens),
            *((f"loader, {number} workers", _loaded_tokens(training, number)) for number in workers),
        ]:
            speeds.append(Speed(name, *_count(counts, seconds)))
            bar.update()
        return speeds


def _loaded_tokens(training: StepwiseTraining, workers: int) -> Iterator[int]:
    """The tokens of each batch that a run with this many workers would get, epoch after epoch."""
    training.cfg.dataset.num_workers = workers
    epoch = training.trainer.get_train_iterator(1)
    while True:
        for batch in epoch.next_epoch_itr():
            yield batch["ntokens"]


def _count(counts: Iterator[int], seconds: float) -> tuple[int, float]:
    """How many tokens came in about `seconds`, and the exact time."""
    for _ in range(WARM_UP):
        next(counts)
    total, start = 0, time.perf_counter()
    while not total or time.perf_counter() - start < seconds:
        total += next(counts)
    return total, time.perf_counter() - start


def as_rows(speeds: list[Speed]) -> list[dict[str, Any]]:
    """For a table; `times the model` divides by the first one, the model."""
    return [
        {
            "": speed.name,
            "tokens a second": round(speed.tokens_a_second),
            "times the model": f"{speed.tokens_a_second / speeds[0].tokens_a_second:.1f}",
        }
        for speed in speeds
    ]
