"""Names of a run's checkpoints, the one that it starts from, same on all ranks, and those that stay.

fairseq starts from scratch where ``checkpoint_last.pt`` is missing, and stops where it is damaged. Here the newest
intact one is taken then; and what is removed is never the last intact one.
"""

import copy
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, Union

from fairseq.distributed import utils as distributed_utils

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_files import DamagedCheckpointError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_loading import look_into
from lazyformer_fairseq.storage.atomic import remove_leftovers

logger = logging.getLogger(__name__)

LAST = "checkpoint_last.pt"  # fairseq's default of --restore-file, relative to --save-dir
# Of an epoch, an update (of --save-interval-updates, and of --keep-updates-list), the best, the best ones, the last.
_NAME = re.compile(
    r"checkpoint(\d+|_\d+_\d+|_update_\d+|_best|\.best_\S+?_(-?\d+\.\d+|nan\d|-?inf\d)|_last)"
    r"(?P<suffix>\S*)\.pt"
)
AT_EVERY_START = (
    "taken at every start, after a kill too; to start from it once, give --continue-once and a new --save-dir"
)


def listed_name(updates: int, suffix: str) -> str:
    """The name of what ``--keep-updates-list`` keeps. fairseq's removal of old checkpoints does not match it."""
    return f"checkpoint_update_{updates}{suffix}.pt"


def suffix_of(path: Path) -> Optional[str]:
    """fairseq's --checkpoint-suffix in a checkpoint's name; None where the name is no checkpoint's."""
    name = _NAME.fullmatch(path.name)
    return name and name["suffix"]


def checkpoints_in(folder: Union[str, Path], suffix: str) -> list[Path]:
    """All checkpoints in a folder from the run with this suffix, newest file first."""
    ages = {}
    for path in Path(folder).glob("checkpoint*.pt"):
        with suppress(FileNotFoundError):  # a link to nowhere, or just removed
            if suffix_of(path) == suffix and path.is_file():
                ages[path] = path.stat().st_mtime_ns
    return sorted(ages, key=ages.get, reverse=True)


def choose_for_all(cfg: Any, trainer) -> Any:
    """fairseq's checkpoint options, changed so that it starts from the file that :func:`choose` finds."""
    if trainer.is_fsdp or getattr(trainer.cfg.model, "base_layers", 0) > 0:  # fairseq splits the model over processes
        return cfg
    chosen = _same_on_all_ranks(trainer, lambda: choose(cfg))
    last, start = _names_of(cfg)
    if cfg.restore_file != LAST or chosen in (None, last) or _is_same(chosen, start):
        return cfg  # fairseq takes the same
    cfg = copy.deepcopy(cfg)
    cfg.restore_file = str(chosen).removesuffix(f"{cfg.checkpoint_suffix}.pt") + ".pt"  # fairseq adds the suffix
    cfg.finetune_from_model = None
    return cfg


def choose(cfg: Any) -> Optional[Path]:
    """The checkpoint that a run with fairseq's checkpoint options starts from; None: from scratch.

    Removes what killed processes left unfinished.

    Raises:
        UserError: a file that the user named is missing or damaged, or all in the save folder are.
    """
    remove_leftovers(cfg.save_dir)
    last, start = _names_of(cfg)
    if cfg.restore_file != LAST:
        path = Path(cfg.restore_file.replace(".pt", f"{cfg.checkpoint_suffix}.pt"))  # as fairseq does
        look_into(path)
        if last.is_file() and not _is_same(last, str(path)):
            logger.warning("%s: passed over for --restore-file %s, %s", last, path, AT_EVERY_START)
        return path
    there = checkpoints_in(cfg.save_dir, cfg.checkpoint_suffix)
    others = [path for path in there if path == last or not _is_same(path, start)]
    if not others:
        if start is not None:
            look_into(start)
        return start and Path(start)
    damaged = [f"{last}: is missing"]
    if last in others:
        try:
            look_into(last)
            return last
        except DamagedCheckpointError as error:
            damaged = [str(error)]
            others.remove(last)
    path, updates = newest_intact(others, damaged, without_optimizer=cfg.no_save_optimizer_state)
    if path is None:
        listed = "\n  ".join(damaged)
        raise UserError(f"{cfg.save_dir}: holds no intact checkpoint; move these away to start anew\n  {listed}")
    logger.warning(
        "%s\nThe run resumes from the newest intact checkpoint: %s, update %d", "\n".join(damaged), path, updates
    )
    return path


def newest_intact(paths: list[Path], damaged: list[str], without_optimizer: bool = False) -> tuple[Optional[Path], int]:
    """The file with the most updates of those that a run can resume from (None: there is none), and its updates.

    Args:
        damaged: receives what is wrong with the others.
        without_optimizer: the run does not save the optimizer's state, so a file may lack it.
    """
    newest, most = None, -1
    for path in paths:
        try:
            contents = look_into(path)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            continue
        if not (contents.has_optimizer or without_optimizer):
            damaged.append(f"{path}: holds no state of the optimizer, so no run can resume from it")
        elif contents.updates > most:
            newest, most = path, contents.updates
    return newest, most


def _names_of(cfg: Any) -> tuple[Path, Optional[str]]:
    """The last checkpoint, and the file that fairseq takes where there is none yet."""
    last = Path(cfg.save_dir) / LAST.replace(".pt", f"{cfg.checkpoint_suffix}.pt")
    return last, cfg.continue_once or cfg.finetune_from_model


def _is_same(path: Path, other: Optional[str]) -> bool:
    return other is not None and os.path.exists(other) and os.path.samefile(path, other)


def _same_on_all_ranks(trainer, choose: Callable[[], Optional[Path]]) -> Optional[Path]:
    """Chooses on rank 0 and sends the choice, or the error, to the others, which would otherwise wait forever.

    Raises:
        UserError: what `choose` raises, or a process that does not see the file.
    """
    chosen, problem = None, None
    if trainer.data_parallel_rank == 0:
        try:
            chosen = choose()
        except UserError as error:
            problem = str(error)
    if trainer.data_parallel_world_size > 1:
        group = trainer.data_parallel_process_group
        chosen, problem = distributed_utils.broadcast_object((chosen, problem), 0, group, trainer.device)
        sees = chosen is None or chosen.is_file()
        blind = [rank for rank, can in enumerate(distributed_utils.all_gather_list(sees, group)) if not can]
        if blind:
            problem = f"{chosen}: processes {blind} cannot read it; all nodes need the same --save-dir"
    if problem is not None:
        raise UserError(problem)
    return chosen


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
