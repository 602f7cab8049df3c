"""Checkpoints: whole or not there at all, checked, read without running what they hold; the one that a run starts from.

torch.save writes a zip archive. A zip archive may end in a comment, which torch does not read; ours is a
SHA-256 of all that torch.save wrote. One rename gives file and checksum their name, so no kill can part them. Files
without a checksum still load: stock fairseq's are zip archives too, where every record has a CRC-32; files from before
torch 1.6 have nothing to check.

fairseq would run code from somebody else's file, or follow names in it out of a folder. It starts from scratch where
``checkpoint_last.pt`` is missing, and stops where it is damaged. Here the newest intact one is taken then, the same on
all ranks; and what is removed is never the last intact one.
"""

import argparse
import ast
import copy
import hashlib
import logging
import os
import pickle
import re
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple, Optional, Union

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from torch.utils._pytree import tree_leaves

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.replacements import protect_loads
from lazyformer_fairseq.storage.atomic import atomic_file, remove_leftovers, unfinished_name

logger = logging.getLogger(__name__)


PIECE = 2**22  # bytes read at a time

_LABEL = b"lazyformer_fairseq sha256 "
_NO_COMMENT = struct.pack("<H", 0)  # the end of an archive: the length of its comment
_COMMENT_FOLLOWS = struct.pack("<H", len(_LABEL) + 64)
_ENDING = re.compile(re.escape(_COMMENT_FOLLOWS + _LABEL) + rb"([0-9a-f]{64})")
_ENDING_SIZE = len(_COMMENT_FOLLOWS + _LABEL) + 64
_ARCHIVE, _ARCHIVE_END = b"PK", b"PK\x05\x06"
_PICKLE = b"\x80"  # how files from before torch 1.6 begin


class DamagedCheckpointError(UserError):
    """A file that is not, or no longer, what was once saved; another one may do."""


class NotSavedError(UserError):
    """A checkpoint could not be written. What was there before is unchanged."""


def save(state: Any, path: Union[str, Path]) -> None:
    """``torch.save``, whole or not at all, with a checksum.

    Raises:
        OSError: the file could not be written; one that was there before is as it was.
    """
    with atomic_file(path) as file:
        hashed = _HashedFile(file)
        try:
            torch.save(state, hashed)
        except RuntimeError:  # torch's, when it cannot continue after a failed write
            if hashed.error is not None:
                raise hashed.error from None
            raise
        file.seek(-len(_NO_COMMENT), os.SEEK_END)
        file.write(_COMMENT_FOLLOWS + _LABEL + hashed.sha256.hexdigest().encode())


class _HashedFile:
    """The file interface that torch.save needs; hashes what it writes and remembers why a write failed."""

    error = None

    def __init__(self, file: BinaryIO):
        self.file, self.sha256, self.flush = file, hashlib.sha256(), file.flush

    def write(self, data) -> int:
        self.sha256.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise


def check(path: Union[str, Path]) -> None:
    """Reads the whole file to see whether it is as it was written.

    Raises:
        DamagedCheckpointError: it is not, or it would take more memory than its size says.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(_ARCHIVE))
        file.seek(max(0, size - _ENDING_SIZE))
        ending = file.read()
        if checksum := _ENDING.fullmatch(ending):
            intact = _sha256(file, size - _ENDING_SIZE) == checksum[1].decode()
            damage = "its checksum does not fit its content"
        elif ending[-22:-18] == _ARCHIVE_END and ending.endswith(_NO_COMMENT):
            _refuse_unpacking(path, file, size)
            intact, damage = _records_are_intact(file), "a record's CRC-32 does not fit its content"
        else:
            intact = start.startswith(_PICKLE)
            damage = "its end is missing" if start == _ARCHIVE else "torch.save wrote no such file" if size else "empty"
        if not intact:
            raise DamagedCheckpointError(f"{path}: truncated, damaged or no checkpoint ({damage})")
        if checksum:
            _refuse_unpacking(path, file, size)


def _refuse_unpacking(path: Union[str, Path], file: BinaryIO, size: int) -> None:
    """As torch, and the check of records, would unpack them: even from a few zeros or from one place again and again.

    Nothing is unpacked for this; where the archive's list is damaged, the check of records says so.
    """
    try:
        unpacked = sum(record.file_size for record in zipfile.ZipFile(file).infolist())
    except Exception as error:  # zipfile may raise anything for a damaged list
        if isinstance(error, OSError):
            raise
        return
    if unpacked > size:
        why = "its records are packed and larger than the file; torch.save packs none"
        raise DamagedCheckpointError(f"{path}: refused, {why}")


def _sha256(file: BinaryIO, size: int) -> str:
    """The hash of the file as torch.save wrote it: its first `size` bytes, without the comment."""
    file.seek(0)
    digest = hashlib.sha256()
    while size and (piece := file.read(min(size, PIECE))):
        digest.update(piece)
        size -= len(piece)
    digest.update(_NO_COMMENT)
    return digest.hexdigest()


def _records_are_intact(file: BinaryIO) -> bool:
    try:
        return zipfile.ZipFile(file).testzip() is None
    except Exception as error:  # as above
        if isinstance(error, OSError):
            raise
        return False


# What follows stands in for functions of fairseq's; replacements.py says which, and why.


def naming_the_folder(verify_checkpoint_directory, save_dir):
    """fairseq's check that it may write to ``--save-dir``. Raises a UserError where it may not."""
    try:
        verify_checkpoint_directory(save_dir)
    except OSError as error:
        raise UserError(f"--save-dir {save_dir}: cannot be written ({error.strerror}); give another") from error


def saving_atomically(torch_persistent_save, obj, filename, async_write: bool = False):
    """fairseq's ``torch_persistent_save(state, filename)``; its three tries on one file handle wrote broken files."""
    if not PathManager.supports_rename(filename):
        return torch_persistent_save(obj, filename, async_write)
    try:
        save(obj, filename)
    except OSError as error:
        storages = [part.untyped_storage() for part in tree_leaves(obj) if isinstance(part, torch.Tensor)]
        size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        raise NotSavedError(_why(filename, size, error)) from error


def copying_atomically(fairseqs_copy, src_path: str, dst_path: str, overwrite: bool = False):
    """``PathManager.copy``, by which fairseq gives a checkpoint further names; makes a hard link on a full disk."""
    if not (PathManager.supports_rename(src_path) and PathManager.supports_rename(dst_path)):
        return fairseqs_copy(src_path, dst_path, overwrite)
    try:
        with open(src_path, "rb") as original, atomic_file(dst_path) as file:
            shutil.copyfileobj(original, file, PIECE)
    except OSError as error:
        unfinished = unfinished_name(Path(dst_path).absolute())
        try:
            os.link(src_path, unfinished)
            os.replace(unfinished, dst_path)
        except OSError:
            raise NotSavedError(_why(dst_path, os.path.getsize(src_path), error)) from error
        finally:
            unfinished.unlink(missing_ok=True)
        logger.warning("%s: no room for a copy (%s); it is %s by another name", dst_path, error.strerror, src_path)
    return True


def _why(path: str, needed: int, error: OSError) -> str:
    """What happened, in words and bytes."""
    folder = Path(path).absolute().parent
    try:
        room = f"{shutil.disk_usage(folder).free:,} bytes are free"
    except OSError as problem:
        room = f"{folder}: {problem.strerror}"
    said = error.strerror or error
    return f"{path}: not saved: {said}; it needs about {needed:,} bytes, {room}. What was saved before is as it was"


SAFETENSORS = ".safetensors"
MOST_LAYERS = 10_000  # that a setting lists by a product
UNSAFE_LOADS = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def load_safely(path: Union[str, Path], overrides: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    """Loads a checkpoint as fairseq does, whole and checked, without running what it holds; works outside a run too.

    Args:
        overrides: options in place of the checkpoint's.

    Raises:
        UserError: it is missing, damaged, or refused for what it holds.
    """
    protect_loads()
    return checkpoint_utils.load_checkpoint_to_cpu(str(path), overrides)


def loading_checked(load_checkpoint_to_cpu, path, *args, **kwargs):
    """fairseq's loader, which runs no code of the file, whatever the environment says, and verifies it before.

    Its errors name the file and what to do.
    """
    forbid_unsafe_loads(os.environ)
    with without_code(), named_errors(path):
        if not PathManager.path_requires_pathmanager(str(path)):
            check(path)
        return load_checkpoint_to_cpu(path, *args, **kwargs)


class Contents(NamedTuple):
    """A checkpoint's own account: updates made before it was saved, and whether a run can resume from it."""

    updates: int
    has_optimizer: bool


def look_into(path: Union[str, Path]) -> Contents:
    """Checks a whole file; its tensors stay on disk. Trusts safetensors, which have no checksum.

    Raises:
        DamagedCheckpointError: it is truncated, damaged, or no checkpoint.
        UserError: it is missing, cannot be read, or is refused for what it holds.
    """
    with named_errors(path):
        if str(path).endswith(SAFETENSORS):
            return Contents(updates=0, has_optimizer=False)
        check(path)
        with open(path, "rb") as file:
            is_archive = file.read(2) == b"PK"  # else older than torch 1.6, and cannot be mapped
        with without_code():
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
        history = state.get("optimizer_history") or [{}]
        return Contents(int(history[-1].get("num_updates", 0)), state.get("last_optimizer_state") is not None)


@contextmanager
def named_errors(path: Union[str, Path]) -> Iterator[None]:
    """Turns what torch and fairseq raise for an unreadable file into an error that names the file."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such checkpoint") from error
    except (PermissionError, IsADirectoryError) as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except pickle.UnpicklingError as error:
        if "GLOBAL" not in str(error) and "Unsupported" not in str(error):
            damage = _first_line(error)
            raise DamagedCheckpointError(f"{path}: truncated, damaged or no checkpoint ({damage})") from error
        # torch's own message recommends to allow what it found, or to switch the protection off.
        found = _first_line(error.__context__ or error).split(" Please use")[0].rstrip(".")
        raise UserError(
            f"{path}: refused, nothing of it was run. It holds Python objects beyond weights and settings, which could "
            f"run code when loaded ({found}). Do not use it if you do not trust where it comes from; save weights and "
            "plain settings alone if it is yours"
        ) from error
    except Exception as error:  # damage makes an unpickler raise anything; its KeyError holds just a number
        speaks = isinstance(error, (OSError, RuntimeError, EOFError))
        said = _first_line(error) if speaks else f"reading it fails with {type(error).__name__}"
        raise DamagedCheckpointError(f"{path}: truncated, damaged or no checkpoint ({said})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def without_code() -> AbstractContextManager[None]:
    """Lets torch's safe unpickler read what fairseq puts into checkpoints (tensors, containers, options), no more."""
    return torch.serialization.safe_globals([argparse.Namespace])


def forbid_unsafe_loads(environment: MutableMapping[str, str]) -> MutableMapping[str, str]:
    """Removes from it, for children too, what makes ``torch.load`` run code from a file."""
    if environment.pop(UNSAFE_LOADS, None):
        logger.warning("%s is set, and taken back: a checkpoint could run code by it, and none needs it", UNSAFE_LOADS)
    return environment


def read_setting(text: str) -> Any:
    """The value of a setting such as ``(0.9, 0.999)`` or ``[(512, 3)] * 4 + [(1024, 1)]``.

    That is numbers, strings and containers of these, their sums, and products with numbers, as fairseq's own are.

    Raises:
        UserError: it is anything else; none of it was run.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of its spelling, which is somebody else's
            return _value_of(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise UserError(
            f"setting {text[:200]!r}: refused, nothing of it was run: only numbers, strings and lists are values "
            f"({_first_line(error)})"
        ) from None


def _value_of(node: ast.expr) -> Any:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult))):
        return ast.literal_eval(node)
    left, right = _value_of(node.left), _value_of(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    sizes = [len(value) if isinstance(value, (list, tuple)) else abs(value) for value in (left, right)]
    if sizes[0] * sizes[1] > MOST_LAYERS and (isinstance(left, (list, tuple)) or isinstance(right, (list, tuple))):
        raise ValueError(f"more than {MOST_LAYERS:,} values")
    return left * right


def refusing_archives(load_archive_file, archive_file):
    """For ``load_archive_file``, which unpacks links and absolute names as they stand, and moves what they name."""
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
    path, said = max(updates, key=updates.get), "\n".join(damaged)
    logger.warning("%s\nThe run resumes from the newest intact checkpoint: %s, update %d", said, path, updates[path])
    return path


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
