"""Checkpoints of fairseq runs: saving, safe loading, and the choice of the checkpoint that a run starts from.

``storage/checkpoint_file.py`` defines the file format. Stock fairseq runs code in untrusted files and follows paths in
them that lead out of their folder. It also starts from scratch if ``checkpoint_last.pt`` is missing, and stops if the
file is damaged. Here, all ranks load the newest intact checkpoint in both cases, and the last intact one is never
removed.
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
    """An error about a checkpoint that could not be saved; existing files are unchanged."""


def check_writable_folder(save_dir: str) -> None:
    """Create ``--save-dir`` and check that files can be written there.

    fairseq's own check would overwrite and remove a user's file named ``dummy`` in the folder.

    Raises:
        UserError: the folder cannot be created, or no file can be written there.
    """
    try:
        os.makedirs(save_dir, exist_ok=True)
        with tempfile.TemporaryFile(dir=save_dir):
            pass
    except OSError as error:
        raise UserError(f"--save-dir {save_dir}: cannot be written ({error.strerror}); use another folder") from error


def save_whole(state: dict[str, Any], path: str) -> None:
    """Write a checkpoint atomically.

    Raises:
        NotSavedError: the disk is full, or the file cannot be written.
    """
    try:
        save(state, path)
    except OSError as error:
        storages = [leaf.untyped_storage() for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        raise NotSavedError(_describe_failure(path, sum(sizes.values()), error)) from error


def copy_atomically(_, src_path: str, dst_path: str, overwrite: bool = False):
    """Replace ``PathManager.copy``, which fairseq uses to save a checkpoint under additional names.

    If the disk has no space for a copy, this creates a hard link instead.

    Raises:
        NotSavedError: neither a copy nor a link can be created.
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
        logger.warning("%s: no space for a copy (%s), so it is a hard link to %s", dst_path, error.strerror, src_path)
    return True


def _describe_failure(path: str, needed: int, error: OSError) -> str:
    """Return the error message for a file that could not be saved.

    Args:
        path: the path of the file.
        needed: the approximate file size in bytes.
        error: the error raised by writing it.
    """
    folder = Path(path).absolute().parent
    try:
        room = f"{shutil.disk_usage(folder).free:,} bytes are free"
    except OSError as problem:
        room = f"the free space of {folder} is unknown ({problem.strerror})"
    return (
        f"{path} was not saved ({error.strerror or error}): it needs about {needed:,} bytes, and {room}. Free up "
        "space; earlier checkpoints are unchanged"
    )


# Reading files from untrusted sources.


MOST_LAYERS = 10_000  # maximum number of values in a repeated list in a setting, such as [(512, 3)] * 4


def load_safely(path: Union[str, Path], overrides: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    """Load a checkpoint with fairseq after checking it, without running code that it contains; also works outside runs.

    Args:
        path: the path of the file.
        overrides: options that override the checkpoint's.

    Raises:
        UserError: the file is missing, damaged, or rejected because of its contents.
    """
    protect_loads()
    return checkpoint_utils.load_checkpoint_to_cpu(str(path), overrides)


def loading_checked(load_checkpoint_to_cpu, path, *args, **kwargs):
    """Replace fairseq's loader: check the file first, and run no code in it, whatever environment variables are set.

    The file may also be an export in safetensors format.

    Raises:
        UserError: the file is missing, damaged or rejected; the message names the file and a remedy.
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
    """Parse a setting such as ``(0.9, 0.999)`` or ``[(512, 3)] * 4 + [(1024, 1)]``, which fairseq passes to ``eval``.

    A value may be a number, a string, a container of values, a sum of values, or a value times a number. fairseq's own
    settings use no other forms.

    Raises:
        UserError: the text is anything else; none of it is executed.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # SyntaxWarnings about text that the user did not write
            return _value_of(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise UserError(
            f"the setting {text[:200]!r} was refused without running it: a value may contain only numbers, strings and "
            f"lists ({first_line(error)})"
        ) from None


def _value_of(node: ast.expr) -> Any:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult))):
        return ast.literal_eval(node)
    left = _value_of(node.left)
    right = _value_of(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    sizes = [len(value) if isinstance(value, (list, tuple)) else abs(value) for value in (left, right)]
    num_values = sizes[0] * sizes[1]
    repeats_list = isinstance(left, (list, tuple)) or isinstance(right, (list, tuple))
    if num_values > MOST_LAYERS and repeats_list:
        raise ValueError(f"more than {MOST_LAYERS:,} values")
    return left * right


def refusing_archives(load_archive_file, archive_file):
    """Replace ``load_archive_file``, which unpacks links and absolute paths and moves the files they point to.

    Raises:
        UserError: the path is an archive or a URL instead of a folder.
    """
    if os.path.isfile(archive_file) or "://" in str(archive_file):
        raise UserError(f"{archive_file} was refused without being unpacked; unpack it yourself, and pass the folder")
    return load_archive_file(archive_file)


LAST = "checkpoint_last.pt"  # fairseq's default for --restore-file, relative to --save-dir
# Checkpoint names, in the order of the alternatives: after an epoch, after an update (--save-interval-updates), after
# an update of --keep-updates-list, the best, one of the best (--keep-best-checkpoints), and the last.
_NAME = re.compile(
    r"checkpoint(\d+|_\d+_\d+|_update_\d+|_best|\.best_\S+?_(-?\d+\.\d+|nan\d|-?inf\d)|_last)"
    r"(?P<suffix>\S*)\.pt"
)
AT_EVERY_START = (
    "which is loaded at every start, even after a kill; to load it only once, use --continue-once and a new --save-dir"
)


def listed_name(updates: int, suffix: str) -> str:
    """Return the file name of a ``--keep-updates-list`` checkpoint, which fairseq does not remove."""
    return f"checkpoint_update_{updates}{suffix}.pt"


def suffix_of(path: Path) -> Optional[str]:
    """Return the ``--checkpoint-suffix`` in a checkpoint's file name; None for other files."""
    name = _NAME.fullmatch(path.name)
    return name and name["suffix"]


def checkpoints_in(folder: Union[str, Path], suffix: str) -> list[Path]:
    """Return a folder's checkpoints with this suffix, most recently written first."""
    ages = {}
    for path in Path(folder).glob("checkpoint*.pt"):
        with suppress(FileNotFoundError):  # a broken symbolic link, or a file that was just removed
            if suffix_of(path) == suffix and path.is_file():
                ages[path] = path.stat().st_mtime_ns
    return sorted(ages, key=ages.get, reverse=True)


def choose_for_all(cfg: Any, trainer) -> tuple[Any, Optional[Path]]:
    """Choose the checkpoint to start from, the same one in all processes; see :func:`choose`.

    Args:
        cfg: fairseq's checkpoint options.
        trainer: the run's trainer.

    Returns:
        The checkpoint options that make fairseq start from the chosen file, and the file's path. The path is None if
        there is no checkpoint, or if each process loads its own part of the model.
    """
    if trainer.is_fsdp or getattr(trainer.cfg.model, "base_layers", 0) > 0:  # fairseq splits the model over processes
        return cfg, None
    chosen = _same_on_all_ranks(trainer, lambda: choose(cfg))
    last, start = _names_of(cfg)
    if cfg.restore_file != LAST or chosen in (None, last) or _is_same(chosen, start):
        return cfg, chosen  # fairseq chooses the same file
    cfg = copy.deepcopy(cfg)
    cfg.restore_file = str(chosen).removesuffix(f"{cfg.checkpoint_suffix}.pt") + ".pt"  # fairseq adds the suffix
    cfg.finetune_from_model = None
    return cfg, chosen


def choose(cfg: Any) -> Optional[Path]:
    """Choose the checkpoint that a run starts from, and remove unfinished files left by killed processes.

    Args:
        cfg: fairseq's checkpoint options.

    Returns:
        The path of the checkpoint; None if the run starts from scratch.

    Raises:
        UserError: a file named by the user is missing or damaged, or ``--save-dir`` has only damaged checkpoints.
    """
    remove_leftovers(cfg.save_dir)
    last, start = _names_of(cfg)
    if cfg.restore_file != LAST:
        path = Path(cfg.restore_file.replace(".pt", f"{cfg.checkpoint_suffix}.pt"))  # as fairseq does
        look_into(path)
        if last.is_file() and not _is_same(last, str(path)):
            logger.warning("%s: ignored in favor of --restore-file %s, %s", last, path, AT_EVERY_START)
        return path
    there = checkpoints_in(cfg.save_dir, cfg.checkpoint_suffix)
    others = [path for path in there if path == last or not _is_same(path, start)]
    if not others:
        if start is not None:
            look_into(start)
        return start and Path(start)
    damaged = [f"{last} is missing"]
    if last in others:
        try:
            look_into(last)
            return last
        except DamagedCheckpointError as error:
            damaged = [str(error)]
            others.remove(last)
    updates: dict[Path, int] = {}  # the number of updates of each resumable checkpoint
    for path in others:
        try:
            updates[path], has_optimizer = look_into(path)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            continue
        if not (has_optimizer or cfg.no_save_optimizer_state):
            del updates[path]
            damaged.append(f"{path} contains no optimizer state, so runs cannot resume from it")
    if not updates:
        listed = "\n  ".join(damaged)
        raise UserError(
            f"{cfg.save_dir} contains no intact checkpoint; move these files away to start from scratch\n  {listed}"
        )
    path = max(updates, key=updates.get)
    said = "\n".join(damaged)
    logger.warning("%s\nThe run resumes from the newest intact checkpoint: %s, update %d", said, path, updates[path])
    return path


def _names_of(cfg: Any) -> tuple[Path, Optional[str]]:
    """Return the path of ``checkpoint_last.pt``, and the path of the file that fairseq loads in its absence."""
    last = Path(cfg.save_dir) / LAST.replace(".pt", f"{cfg.checkpoint_suffix}.pt")
    return last, cfg.continue_once or cfg.finetune_from_model


def _is_same(path: Path, other: Optional[str]) -> bool:
    return other is not None and os.path.exists(other) and os.path.samefile(path, other)


def _same_on_all_ranks(trainer, choose: Callable[[], Optional[Path]]) -> Optional[Path]:
    """Choose on rank 0 and broadcast the choice, or the error, because the other ranks would otherwise wait forever.

    Raises:
        UserError: `choose` raised it on rank 0, or some ranks cannot read the file.
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
            problem = f"{chosen}: processes {blind} cannot read it; all nodes must share --save-dir"
    if problem is not None:
        raise UserError(problem)
    return chosen


class CarefulOs:
    """A wrapper around ``os`` for fairseq's ``checkpoint_utils`` that never removes the last intact checkpoint."""

    def __init__(self, module: ModuleType):
        self._os = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._os, name)

    @staticmethod
    def remove(path) -> None:
        """Remove an old checkpoint, unless no other checkpoint in its folder is as complete."""
        path = Path(path)
        if _is_dispensable(path):
            os.remove(path)
        else:
            logger.warning("%s: kept despite its age, because no other checkpoint in its folder is intact", path)


def _is_dispensable(path: Path) -> bool:
    """Return True if a file is not an intact checkpoint, or if its folder has another one that is as complete."""
    suffix = suffix_of(path)
    if suffix is None:
        return True
    worth = _worth(path)
    if worth == 0:
        return True
    others = (other for other in checkpoints_in(path.parent, suffix) if other != path)
    return any(_worth(other) >= worth for other in others)


def _worth(path: Path) -> int:
    """Return 2 for a checkpoint that a run can resume from, 1 for one without optimizer state, 0 for a damaged one."""
    try:
        return 1 + look_into(path).has_optimizer
    except UserError:
        return 0
