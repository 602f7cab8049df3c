"""Checkpoints of fairseq's runs, in the format of ``storage/checkpoint_file.py``; the one that a run starts from.

fairseq would run code from somebody else's file, or follow names in it out of a folder. It starts from scratch where
``checkpoint_last.pt`` is missing, and stops where it is damaged. Here the newest intact one is taken then, the same on
all ranks; and what is removed is never the last intact one.
"""

import ast
import copy
import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, Union

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from omegaconf import OmegaConf
from torch.utils._pytree import tree_leaves

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.checkpoints import read_exported
from lazyformer_fairseq.fairseq_plugin.replacements import protect_loads
from lazyformer_fairseq.storage.atomic import atomic_file, remove_leftovers, unfinished_name
from lazyformer_fairseq.storage.checkpoint_file import (
    PIECE,
    SAFETENSORS,
    DamagedCheckpointError,
    check,
    first_line,
    forbid_unsafe_loads,
    look_into,
    named_errors,
    save,
    without_code,
)

logger = logging.getLogger(__name__)


class NotSavedError(UserError):
    """A checkpoint could not be written. What was there before is unchanged."""


def check_writable_folder(save_dir: str) -> None:
    """Make ``--save-dir`` and see that it can be written; fairseq would empty and remove a file ``dummy`` in it.

    Raises:
        UserError: it cannot be made or written.
    """
    try:
        os.makedirs(save_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=save_dir):
            pass
    except OSError as error:
        raise UserError(f"--save-dir {save_dir}: cannot be written ({error.strerror}); give another") from error


def save_whole(state: dict[str, Any], path: str) -> None:
    """Write a checkpoint, whole or not at all.

    Raises:
        NotSavedError: there is no room for it, or the file cannot be written.
    """
    try:
        save(state, path)
    except OSError as error:
        storages = [leaf.untyped_storage() for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
        size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        raise NotSavedError(_describe_failure(path, size, error)) from error


def copying_atomically(_, src_path: str, dst_path: str, overwrite: bool = False):
    """Stand in for ``PathManager.copy``, by which fairseq gives a checkpoint further names.

    Makes a hard link where the disk has no room for a copy.
    """
    try:
        with open(src_path, "rb") as original, atomic_file(dst_path) as file:
            shutil.copyfileobj(original, file, PIECE)
    except OSError as error:
        unfinished = unfinished_name(Path(dst_path).absolute())
        try:
            os.link(src_path, unfinished)
            os.replace(unfinished, dst_path)
        except OSError:
            raise NotSavedError(_describe_failure(dst_path, os.path.getsize(src_path), error)) from error
        finally:
            unfinished.unlink(missing_ok=True)
        logger.warning("%s: no room for a copy (%s); it is %s by another name", dst_path, error.strerror, src_path)
    return True


def _describe_failure(path: str, needed: int, error: OSError) -> str:
    """Return why a file was not saved, in words and bytes."""
    folder = Path(path).absolute().parent
    try:
        room = f"{shutil.disk_usage(folder).free:,} bytes are free"
    except OSError as problem:
        room = f"{folder}: {problem.strerror}"
    return (
        f"{path}: not saved: {error.strerror or error}; it needs about {needed:,} bytes, {room}: make room. "
        "What was saved before is as it was"
    )


# Reading files that somebody else wrote.


MOST_LAYERS = 10_000  # that a setting lists by a product


def load_safely(path: Union[str, Path], overrides: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    """Load a checkpoint as fairseq does, whole and checked, without running what it holds; works outside a run too.

    Args:
        path: path of the file.
        overrides: options in place of the checkpoint's.

    Raises:
        UserError: it is missing, damaged, or refused for what it holds.
    """
    protect_loads()
    return checkpoint_utils.load_checkpoint_to_cpu(str(path), overrides)


def loading_checked(load_checkpoint_to_cpu, path, *args, **kwargs):
    """Stand in for fairseq's loader: run no code of the file, whatever the environment says, and verify it before.

    Errors name the file and what to do. Safetensors may take the place of a checkpoint.
    """
    if str(path).endswith(SAFETENSORS):
        state = read_exported(Path(path))
        return {**state, "cfg": OmegaConf.create(state["cfg"])}
    forbid_unsafe_loads(os.environ)
    with without_code(), named_errors(path):
        if not PathManager.path_requires_pathmanager(str(path)):
            check(path)
        return load_checkpoint_to_cpu(path, *args, **kwargs)


def read_setting(text: str) -> Any:
    """Return the value of a setting such as ``(0.9, 0.999)`` or ``[(512, 3)] * 4 + [(1024, 1)]``.

    Values are numbers, strings and containers of these, their sums, and products with numbers, as fairseq's own are.

    Raises:
        UserError: it is anything else; none of it was run.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of its spelling, which is somebody else's
            return _value_of(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise UserError(
            f"setting {text[:200]!r}: refused, nothing of it was run: only numbers, strings and lists are values "
            f"({first_line(error)})"
        ) from None


def _value_of(node: ast.expr) -> Any:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult))):
        return ast.literal_eval(node)
    left = _value_of(node.left)
    right = _value_of(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    sizes = [len(value) if isinstance(value, (list, tuple)) else abs(value) for value in (left, right)]
    if sizes[0] * sizes[1] > MOST_LAYERS and (isinstance(left, (list, tuple)) or isinstance(right, (list, tuple))):
        raise ValueError(f"more than {MOST_LAYERS:,} values")
    return left * right


def refusing_archives(load_archive_file, archive_file):
    """Stand in for ``load_archive_file``, which unpacks links and absolute names, and moves what they name.

    Raises:
        UserError: the file is an archive.
    """
    if os.path.isfile(archive_file) or "://" in str(archive_file):
        raise UserError(f"{archive_file}: refused, nothing of it was unpacked; unpack it, and give the folder")
    return load_archive_file(archive_file)


LAST = "checkpoint_last.pt"  # fairseq's default of --restore-file, relative to --save-dir
# Of an epoch, an update (of --save-interval-updates, and of --keep-updates-list), the best, the best ones, the last.
_NAME = re.compile(
    r"checkpoint(\d+|_\d+_\d+|_update_\d+|_best|\.best_\S+?_(-?\d+\.\d+|nan\d|-?inf\d)|_last)"
    r"(?P<suffix>\S*)\.pt"
)
AT_EVERY_START = "taken at every start, after a kill too; to start so once, give --continue-once and a new --save-dir"


def listed_name(updates: int, suffix: str) -> str:
    """Return the name of what ``--keep-updates-list`` keeps; fairseq's removal of old checkpoints does not match it."""
    return f"checkpoint_update_{updates}{suffix}.pt"


def suffix_of(path: Path) -> Optional[str]:
    """Return fairseq's --checkpoint-suffix in a checkpoint's name; None where the name is no checkpoint's."""
    name = _NAME.fullmatch(path.name)
    return name and name["suffix"]


def checkpoints_in(folder: Union[str, Path], suffix: str) -> list[Path]:
    """Return all checkpoints in a folder from the run with this suffix, newest file first."""
    ages = {}
    for path in Path(folder).glob("checkpoint*.pt"):
        with suppress(FileNotFoundError):  # a link to nowhere, or just removed
            if suffix_of(path) == suffix and path.is_file():
                ages[path] = path.stat().st_mtime_ns
    return sorted(ages, key=ages.get, reverse=True)


def choose_for_all(cfg: Any, trainer) -> tuple[Any, Optional[Path]]:
    """Return fairseq's checkpoint options, changed so that it starts from the file of :func:`choose`, and that file.

    The file is None where there is none, or where each process loads its own part of the model.
    """
    if trainer.is_fsdp or getattr(trainer.cfg.model, "base_layers", 0) > 0:  # fairseq splits the model over processes
        return cfg, None
    chosen = _same_on_all_ranks(trainer, lambda: choose(cfg))
    last, start = _names_of(cfg)
    if cfg.restore_file != LAST or chosen in (None, last) or _is_same(chosen, start):
        return cfg, chosen  # fairseq takes the same
    cfg = copy.deepcopy(cfg)
    cfg.restore_file = str(chosen).removesuffix(f"{cfg.checkpoint_suffix}.pt") + ".pt"  # fairseq adds the suffix
    cfg.finetune_from_model = None
    return cfg, chosen


def choose(cfg: Any) -> Optional[Path]:
    """Choose the checkpoint that a run with fairseq's checkpoint options starts from; None: from scratch.

    What killed processes left unfinished is removed.

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
    updates: dict[Path, int] = {}  # of those that the run can resume from
    for path in others:
        try:
            updates[path], has_optimizer = look_into(path)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            continue
        if not (has_optimizer or cfg.no_save_optimizer_state):
            del updates[path]
            damaged.append(f"{path}: holds no state of the optimizer, so no run can resume from it")
    if not updates:
        listed = "\n  ".join(damaged)
        raise UserError(f"{cfg.save_dir}: holds no intact checkpoint; move these away to start anew\n  {listed}")
    path = max(updates, key=updates.get)
    said = "\n".join(damaged)
    logger.warning("%s\nThe run resumes from the newest intact checkpoint: %s, update %d", said, path, updates[path])
    return path


def _names_of(cfg: Any) -> tuple[Path, Optional[str]]:
    """Return the last checkpoint, and the file that fairseq takes where there is none yet."""
    last = Path(cfg.save_dir) / LAST.replace(".pt", f"{cfg.checkpoint_suffix}.pt")
    return last, cfg.continue_once or cfg.finetune_from_model


def _is_same(path: Path, other: Optional[str]) -> bool:
    return other is not None and os.path.exists(other) and os.path.samefile(path, other)


def _same_on_all_ranks(trainer, choose: Callable[[], Optional[Path]]) -> Optional[Path]:
    """Choose on rank 0 and send the choice, or the error, to the others, which would otherwise wait forever.

    Raises:
        UserError: what `choose` raises, or a process that does not see the file.
    """
    chosen = None
    problem = None
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
    """``os`` as fairseq's ``checkpoint_utils`` sees it: its ``remove`` spares the last intact checkpoint."""

    def __init__(self, module: ModuleType):
        self._os = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._os, name)

    @staticmethod
    def remove(path) -> None:
        """Remove an old checkpoint, unless no other one is as good."""
        path = Path(path)
        suffix = suffix_of(path)
        worth = 0 if suffix is None else _worth(path)
        if worth == 0 or any(_worth(other) >= worth for other in checkpoints_in(path.parent, suffix) if other != path):
            os.remove(path)
        else:
            logger.warning("%s: kept beyond its time, no other checkpoint beside it is intact", path)


def _worth(path: Path) -> int:
    """Return 2 where a run can resume from a file, 1 for weights alone (--no-save-optimizer-state), 0 for damage."""
    try:
        return 1 + look_into(path).has_optimizer
    except UserError:
        return 0
