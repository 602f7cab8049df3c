"""Saves every file whole; a run that cannot save (disk full) warns and trains on, unless it is at its end."""

import errno
import logging
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from torch.utils._pytree import tree_leaves

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints import files as checkpoint_files

logger = logging.getLogger(__name__)


class NotSavedError(UserError):
    """A checkpoint could not be written. What was there before is unchanged."""


def naming_the_folder(verify_checkpoint_directory, save_dir):
    """fairseq's check that it may write to ``--save-dir``. Raises a UserError where it may not."""
    try:
        verify_checkpoint_directory(save_dir)
    except OSError as error:
        raise UserError(f"--save-dir {save_dir}: cannot be written ({error.strerror}); give another") from error


def whole(torch_persistent_save, obj, filename, async_write: bool = False):
    """fairseq's ``torch_persistent_save(state, filename)``; its three tries on one file handle wrote broken files."""
    if not PathManager.supports_rename(filename):
        return torch_persistent_save(obj, filename, async_write)
    try:
        checkpoint_files.save(obj, filename)
    except OSError as error:
        raise NotSavedError(_why(filename, _size_of(obj), error)) from error


def whole_copy(copy, src_path: str, dst_path: str, overwrite: bool = False):
    """``PathManager.copy``, by which fairseq gives a checkpoint further names; makes a hard link on a full disk."""
    if not (PathManager.supports_rename(src_path) and PathManager.supports_rename(dst_path)):
        return copy(src_path, dst_path, overwrite)
    try:
        checkpoint_files.copy(src_path, dst_path)
    except OSError as error:
        try:
            checkpoint_files.link(src_path, dst_path)
        except OSError:
            raise NotSavedError(_why(dst_path, os.path.getsize(src_path), error)) from error
        logger.warning("%s: no room for a copy (%s); it is %s by another name", dst_path, error.strerror, src_path)
    return True


def training_on(save_checkpoint, cfg, trainer, epoch_itr, val_loss):
    """fairseq's ``save_checkpoint``: where a file cannot be written it warns and returns None, and the next save tries
    again. At the end of the run, when there is no next one, it raises a UserError.

    ``trainer.not_saved`` is why the last save failed, or None.
    """
    trainer.not_saved = None
    try:
        return save_checkpoint(cfg, trainer, epoch_itr, val_loss)
    except NotSavedError as error:
        trainer.not_saved = str(error)
        if _is_at_its_end(trainer, epoch_itr):
            raise UserError(f"{error}\nThe run is at its end; make room and run it again") from error
        logger.warning("%s\nThe run trains on; the next save tries again", error)
        return None


def save_or_raise(cfg: Any, trainer, epoch_itr, val_loss: Optional[float]) -> Optional[str]:
    """fairseq's ``save_checkpoint``, for callers that must know: raises a UserError where it could not save."""
    path = checkpoint_utils.save_checkpoint(cfg, trainer, epoch_itr, val_loss)
    if trainer.not_saved:
        raise UserError(trainer.not_saved)
    return path


def _is_at_its_end(trainer, epoch_itr) -> bool:
    limits = trainer.cfg.optimization
    return (
        0 < (limits.max_update or 0) <= trainer.get_num_updates()
        or 0 < (limits.max_epoch or 0) < epoch_itr.next_epoch_idx
        or 0 < limits.stop_time_hours < trainer.cumulative_training_time() / 3600
        or 0 < trainer.cfg.checkpoint.patience <= _validations_without_progress()
    )


def _validations_without_progress() -> int:
    """As fairseq has just counted them, for ``--patience``; started by ``python -m`` its training is ``__main__``."""
    trainings = (sys.modules.get(name) for name in ("fairseq_cli.train", "__main__"))
    return max(getattr(getattr(training, "should_stop_early", None), "num_runs", 0) for training in trainings)


def _why(path: str, needed: int, error: OSError) -> str:
    """What happened, in words and bytes."""
    folder = Path(path).absolute().parent
    try:
        room = f"{shutil.disk_usage(folder).free:,} bytes are free"
    except OSError as problem:
        room = f"{folder}: {problem.strerror}"
    if error.errno == errno.EFBIG:
        room = f"a file may have {resource.getrlimit(resource.RLIMIT_FSIZE)[0]:,} bytes (ulimit -f)"
    said = error.strerror or str(error)
    return f"{path}: not saved: {said}; it needs about {needed:,} bytes, {room}. What was saved before is as it was"


def _size_of(state: Any) -> int:
    """Bytes of all tensors in nested containers; those that share memory count once."""
    storages = [part.untyped_storage() for part in tree_leaves(state) if isinstance(part, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
