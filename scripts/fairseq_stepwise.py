"""fairseq's trainer one update at a time, to measure it, and to compare the package's own loop with it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

import numpy as np
from fairseq import checkpoint_utils, options, utils
from fairseq.data import iterators
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.logging.meters import MetersDict
from fairseq.tasks import setup_task
from fairseq.trainer import Trainer

from lazyformer_fairseq.evaluation.costs.latency import wait_for


class FairseqTraining:
    """Does what fairseq-train does with the same arguments, one update at a time; resumes from the last checkpoint.

    The driver of the trainings handles signals: a training that saved and exited on SIGTERM would ignore the others.

    Args:
        command: arguments of fairseq-train, its checkpoints' folder excepted.
        folder: for checkpoints; a training found there resumes.

    Attributes:
        seconds: per update since the start.
    """

    def __init__(self, command: list[str], folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        command = [*command, "--save-dir", str(folder)]
        self.folder = folder
        self.cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command))
        np.random.seed(self.cfg.common.seed)
        utils.set_torch_seed(self.cfg.common.seed)
        self.task = setup_task(self.cfg.task)
        model, criterion = self.task.build_model(self.cfg.model), self.task.build_criterion(self.cfg.criterion)
        self.trainer = Trainer(self.cfg, self.task, model, criterion)
        self.trainer.takes_signals = False
        _, self.epochs = checkpoint_utils.load_checkpoint(self.cfg.checkpoint, self.trainer)
        self.seconds: list[float] = []
        self.batches = self._batches_of_this_epoch()

    @property
    def updates(self) -> int:
        return self.trainer.get_num_updates()

    def _batches_of_this_epoch(self) -> iterators.GroupedIterator:
        return iterators.GroupedIterator(self.epochs.next_epoch_itr(), 1)

    def _next_batch(self) -> list[dict]:
        if not self.batches.has_next():
            self.epochs = self.trainer.get_train_iterator(self.epochs.next_epoch_idx)
            self.batches = self._batches_of_this_epoch()
        return next(self.batches)

    def update(self) -> int:
        """Trains on one batch; returns its number of tokens."""
        batch = self._next_batch()
        wait_for(self.trainer.device)
        start = time.perf_counter()
        with _own_metrics():
            self.trainer.train_step(batch)
        wait_for(self.trainer.device)
        self.seconds.append(time.perf_counter() - start)
        return sum(sample["ntokens"] for sample in batch)

    def evaluate(self, split: str = "valid", tokens: Optional[int] = None) -> dict[str, float]:
        """What the task measures on a split, by fairseq's names.

        Args:
            tokens: of the split, its first batches that have so many together; None for all.
        """
        seen = 0
        if split not in self.task.datasets:
            self.task.load_dataset(split)
        with _own_metrics() as found:
            for batch in self.trainer.get_valid_iterator(split).next_epoch_itr(shuffle=False):
                self.trainer.valid_step(batch)
                seen += batch["ntokens"]
                if tokens is not None and seen >= tokens:
                    break
        return found.get_smoothed_values()

    def save(self, with_optimizer: bool = True) -> None:
        """Saves as fairseq-train does, including the task's state. Without the optimizer a model cannot resume."""
        self.cfg.checkpoint.no_save_optimizer_state = not with_optimizer
        checkpoint_utils.save_checkpoint(self.cfg.checkpoint, self.trainer, self.epochs, val_loss=None)


@contextmanager
def _own_metrics() -> Iterator[MetersDict]:
    """What is logged meanwhile, apart from all else.

    fairseq keeps meters by name for the whole process: what one task logs as a mean, another may derive from others.
    """
    metrics.reset()
    with metrics.aggregate(new_root=True) as found:
        yield found
