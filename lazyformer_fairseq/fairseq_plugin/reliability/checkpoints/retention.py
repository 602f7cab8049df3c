"""Decides which checkpoints stay: those of ``--keep-updates-list`` forever, and always the last intact one."""

import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from fairseq import checkpoint_utils

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints.loading import look_into
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints.names import checkpoints_in, listed_name, suffix_of
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints.saving import NotSavedError
from lazyformer_fairseq.fairseq_plugin.reliability.options import listed_updates

logger = logging.getLogger(__name__)


def keeping_listed_updates(train_step, self, *args, **kwargs):
    """``Trainer.train_step``, which after an update of ``--keep-updates-list`` saves ``checkpoint_update_N.pt``."""
    before = self.get_num_updates()
    output = train_step(self, *args, **kwargs)
    updates = self.get_num_updates()
    if updates == before + 1 and updates in listed_updates(getattr(self.task.cfg, "keep_updates_list", None)):
        _save_listed(self, updates)
    return output


def _save_listed(trainer, updates: int) -> None:
    """Saves what fairseq's ``save_checkpoint`` saves, under a name of its own."""
    cfg, task = trainer.cfg.checkpoint, trainer.task
    if cfg.no_save:
        return
    if hasattr(task, "gather_memory"):
        task.gather_memory()
    trainer.consolidate_optimizer()
    extra_state = {"train_iterator": trainer.epoch_iterator.state_dict(), "val_loss": None}
    if hasattr(task, "get_checkpoint_dict"):
        extra_state |= task.get_checkpoint_dict()
    if hasattr(checkpoint_utils.save_checkpoint, "best"):
        extra_state["best"] = checkpoint_utils.save_checkpoint.best
    path = Path(cfg.save_dir) / listed_name(updates, trainer.checkpoint_suffix)
    try:
        trainer.save_checkpoint(str(path), extra_state)
    except NotSavedError as error:
        logger.warning("%s\nThe run trains on; --keep-updates-list has lost update %d", error, updates)


def remembering_iterator(get_train_iterator, self, *args, **kwargs):
    """``Trainer.get_train_iterator``; keeps the one in use as ``trainer.epoch_iterator``, for saving."""
    self.epoch_iterator = get_train_iterator(self, *args, **kwargs)
    return self.epoch_iterator


class CarefulOs:
    """The ``os`` that fairseq's ``checkpoint_utils`` sees: its ``remove`` spares the last intact checkpoint."""

    def __init__(self, module: ModuleType):
        self._os = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._os, name)

    @staticmethod
    def remove(path) -> None:
        path = Path(path)
        suffix = suffix_of(path)
        worth = _worth(path) if suffix is not None else 0
        if worth == 0 or any(_worth(other) >= worth for other in checkpoints_in(path.parent, suffix) if other != path):
            os.remove(path)
        else:
            logger.warning("%s: kept beyond its time, no other checkpoint beside it is intact", path)


def _worth(path: Path) -> int:
    """0: damaged; 1: weights alone, as with --no-save-optimizer-state; 2: a run resumes from it as if never stopped."""
    try:
        return 1 + look_into(path).has_optimizer
    except UserError:
        return 0
