"""Lets a task keep in checkpoints what it carries from batch to batch (see tasks/stream_language_modeling.py)."""

import functools
from collections.abc import Callable


def gather_before_saving(save_checkpoint: Callable) -> Callable:
    """For ``checkpoint_utils.save_checkpoint``, which all workers call, though only the first one writes.

    fairseq gets what to write from the first one's task (``get_checkpoint_dict``), when the others have moved on.
    """

    @functools.wraps(save_checkpoint)
    def wrapper(cfg, trainer, epoch_itr, val_loss):
        if hasattr(trainer.task, "gather_memory") and not cfg.no_save:
            trainer.task.gather_memory()
        return save_checkpoint(cfg, trainer, epoch_itr, val_loss)

    return wrapper


def give_back_after_loading(load_checkpoint: Callable) -> Callable:
    """For ``Trainer.load_checkpoint``, which sends the extra state to all workers, but not to the task."""

    @functools.wraps(load_checkpoint)
    def wrapper(self, filename, *args, **kwargs):
        extra_state = load_checkpoint(self, filename, *args, **kwargs)
        if extra_state is not None and hasattr(self.task, "take_from_checkpoint"):
            self.task.take_from_checkpoint(extra_state)
        return extra_state

    return wrapper
