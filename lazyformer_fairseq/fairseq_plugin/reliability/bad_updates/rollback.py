"""Rolls a running process back to the last good checkpoint; training continues on other data."""

import logging
from pathlib import Path
from typing import Optional

from fairseq.distributed import utils as distributed_utils

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints.loading import look_into
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints.names import checkpoints_in

logger = logging.getLogger(__name__)


class GoodCheckpoints:
    """Which of a folder's checkpoints a run can go back to.

    Args:
        folder: where the run saves, ``--save-dir``.
        suffix: ``--checkpoint-suffix``, which tells runs in one folder apart.
    """

    def __init__(self, folder: str, suffix: str = ""):
        self.folder, self.suffix = folder, suffix
        self.left_behind: dict[tuple[Path, int], int] = {}

    def leave_behind(self, updates: int) -> None:
        """Ignores checkpoints of more than `updates`, which the run has abandoned; one saved again counts again."""
        for path in checkpoints_in(self.folder, self.suffix):
            version = _version(path)
            self.left_behind[version] = min(updates, self.left_behind.get(version, updates))

    def choose(self, first_bad: int) -> Optional[Path]:
        """The newest whole checkpoint whose weights then made a good update; failing that, the newest whole one.

        Reads all files to see that they are whole.

        Args:
            first_bad: updates made before the first bad one. A checkpoint saved there or later holds the weights that
                gave the bad numbers.
        """
        found = {}
        for path in checkpoints_in(self.folder, self.suffix):
            try:
                updates, has_optimizer = look_into(path)
            except UserError as error:
                logger.warning("not gone back to: %s", error)
                continue
            if has_optimizer and updates <= self.left_behind.get(_version(path), updates):
                found[path] = updates
        return max(found, key=lambda path: (found[path] < first_bad, found[path]), default=None)


def _version(path: Path) -> tuple[Path, int]:
    return path, path.stat().st_mtime_ns


def roll_back(trainer, checkpoints: GoodCheckpoints, first_bad: int) -> Optional[Path]:
    """Loads weights, optimizer, schedule and the number of updates; the data continues from where it is, as in PaLM.

    Chowdhery et al., 2022 (arXiv 2204.02311), section 5.1: the same weights on other batches do not spike again. Every
    process takes the file that the first one chooses. Meters and the time spent stay.

    Returns:
        The checkpoint's path; None where there is none.
    """
    path = checkpoints.choose(first_bad) if trainer.is_data_parallel_master else None
    if trainer.data_parallel_world_size > 1:
        path = distributed_utils.broadcast_object(path, 0, trainer.data_parallel_process_group, trainer.device)
    if path is not None:
        time_spent = trainer._local_cumulative_training_time()
        trainer.load_checkpoint(str(path), reset_meters=True)
        trainer._previous_training_time = time_spent
    return path
