"""Runs fairseq's trainer one update at a time, for measurements and for comparisons with the package's own loop."""

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
    """A run of fairseq-train that makes one update at a time, and resumes from the last checkpoint.

    The caller handles signals, because a run that saved and exited on SIGTERM would ignore other runs in the process.

    Args:
        command: fairseq-train's arguments, without the checkpoint folder.
        folder: the checkpoint folder; if it contains a run, that run resumes.

    Attributes:
        seconds: the time of each update since the start.
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
        """Train on one batch, and return its number of tokens."""
        batch = self._next_batch()
        wait_for(self.trainer.device)
        start = time.perf_counter()
        with _own_metrics():
            self.trainer.train_step(batch)
        wait_for(self.trainer.device)
        self.seconds.append(time.perf_counter() - start)
        return sum(sample["ntokens"] for sample in batch)

    def evaluate(self, split: str = "valid", tokens: Optional[int] = None) -> dict[str, float]:
        """Return the task's metrics on a split, under fairseq's names.

        Args:
            split: the name of the split.
            tokens: stop after the first batches with this many tokens in total; None for the whole split.
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
        """Save a checkpoint as fairseq-train does, with the task's state; resuming requires the optimizer."""
        self.cfg.checkpoint.no_save_optimizer_state = not with_optimizer
        checkpoint_utils.save_checkpoint(self.cfg.checkpoint, self.trainer, self.epochs, val_loss=None)


@contextmanager
def _own_metrics() -> Iterator[MetersDict]:
    """Collect the metrics logged within this context, separately from all others.

    fairseq's meters are global and identified by name. A metric that one task logs as a mean may be derived from other
    metrics in another task.
    """
    metrics.reset()
    with metrics.aggregate(new_root=True) as found:
        yield found
