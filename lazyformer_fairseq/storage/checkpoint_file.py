"""Checkpoint files that are written atomically, verified by a checksum, and loaded without executing code.

torch.save writes a zip archive. A zip archive may end with a comment, which torch ignores; this module stores a SHA-256
of the torch.save output there. A single rename publishes the file together with its checksum, so they stay consistent
even if the process is killed. Files without a checksum can also be loaded: stock fairseq's checkpoints are zip archives
with a CRC-32 per record, while files from before torch 1.6 cannot be verified.
"""

import argparse
import hashlib
import logging
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Union

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import atomic_file
from lazyformer_fairseq.storage.checked import Count, PositiveCount, as_type

logger = logging.getLogger(__name__)

SAFETENSORS = ".safetensors"
UNSAFE_LOADS = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
PIECE = 2**22  # bytes to read per chunk

_LABEL = b"lazyformer_fairseq sha256 "
_NO_COMMENT = struct.pack("<H", 0)  # the end of an archive without a comment: the comment's length, 0
_COMMENT_FOLLOWS = struct.pack("<H", len(_LABEL) + 64)
_ENDING = re.compile(re.escape(_COMMENT_FOLLOWS + _LABEL) + rb"([0-9a-f]{64})")
_ENDING_SIZE = len(_COMMENT_FOLLOWS + _LABEL) + 64
_ARCHIVE = b"PK"
_ARCHIVE_END = b"PK\x05\x06"
_PICKLE = b"\x80"  # the start of files from before torch 1.6


class DamagedCheckpointError(UserError):
    """An error for a damaged checkpoint; it is a class of its own because an older checkpoint may be intact."""


def save(state: Any, path: Union[str, Path]) -> None:
    """Save a state with ``torch.save``, atomically and with a checksum.

    Raises:
        OSError: the file could not be written; an existing file is unchanged.
    """
    with atomic_file(path) as file:
        hashed = _HashedFile(file)
        try:
            torch.save(state, hashed)  # type: ignore[arg-type] # it only needs write
        except RuntimeError:  # raised by torch after a failed write
            if hashed.error is not None:
                raise hashed.error from None
            raise
        file.seek(-len(_NO_COMMENT), os.SEEK_END)
        file.write(_COMMENT_FOLLOWS + _LABEL + hashed.sha256.hexdigest().encode())


def on_cpu(state: Any) -> Any:
    """Move a state's tensors to the CPU and convert half precision to fp32, as in fairseq's checkpoints.

    Tied tensors stay tied and are written only once.
    """
    moved: dict[tuple, Tensor] = {}

    def move(each: Tensor) -> Tensor:
        place = (
            each.device,
            each.data_ptr(),
            each.dtype,
            each.shape,
            each.stride(),
        )
        if place not in moved:
            if each.dtype in (torch.bfloat16, torch.float16):
                each = each.float()
            moved[place] = each.cpu()
        return moved[place]

    return tree_map_only(Tensor, move, state)


class _HashedFile:
    """A file object for torch.save that hashes the data and records the error of a failed write."""

    error = None

    def __init__(self, file: BinaryIO):
        self.file = file
        self.sha256 = hashlib.sha256()
        self.flush = file.flush

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise


def check(path: Union[str, Path]) -> None:
    """Verify the integrity of a checkpoint file by reading all of it.

    Raises:
        DamagedCheckpointError: the file is damaged, or loading it would need more memory than the size of the file.
        OSError: the file cannot be read.
    """
    if Path(path).is_fifo():  # opening a pipe would wait for a writer
        raise DamagedCheckpointError(f"{path} is a pipe, not a checkpoint")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(_ARCHIVE))
        file.seek(max(0, size - _ENDING_SIZE))
        ending = file.read()
        if checksum := _ENDING.fullmatch(ending):
            intact = _sha256(file, size - _ENDING_SIZE) == checksum[1].decode()
            damage = "its checksum does not match its contents"
        elif ending[-22:-18] == _ARCHIVE_END and ending.endswith(_NO_COMMENT):
            _refuse_unpacking(path, file, size)
            intact = _records_are_intact(file)
            damage = "a record's CRC-32 does not match its contents"
        else:
            intact = start.startswith(_PICKLE)
            damage = "its end is missing"
            if start != _ARCHIVE:
                damage = "empty"
                if size:
                    damage = "it was not written by torch.save"
        if not intact:
            raise DamagedCheckpointError(f"{path}: truncated, damaged or not a checkpoint ({damage})")
        if checksum:
            _refuse_unpacking(path, file, size)


def _refuse_unpacking(path: Union[str, Path], file: BinaryIO, size: int) -> None:
    """Reject archives with compressed or overlapping records, which could expand to more than the file size.

    Nothing is decompressed. A damaged archive directory is reported by the check of the records instead.
    """
    try:
        unpacked = sum(record.file_size for record in zipfile.ZipFile(file).infolist())
    except Exception as error:  # zipfile may raise anything for a damaged directory
        if isinstance(error, OSError):
            raise
        return
    if unpacked > size:
        why = "its records are compressed and larger than the file; torch.save does not compress records"
        raise DamagedCheckpointError(f"{path}: refused, because {why}")


def _sha256(file: BinaryIO, size: int) -> str:
    """Hash the torch.save output in a file: its first `size` bytes, as if the archive had no comment."""
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
    except Exception as error:  # zipfile may raise anything here, too
        if isinstance(error, OSError):
            raise
        return False


def load(path: Union[str, Path]) -> Any:
    """Verify a checkpoint file and load its state onto the CPU, without executing code from the file.

    Raises:
        UserError: the file is missing or damaged, or contains disallowed objects.
    """
    forbid_unsafe_loads(os.environ)
    with without_code(), named_errors(path):
        check(path)
        return torch.load(path, map_location="cpu", weights_only=True)


class Contents(NamedTuple):
    """A summary of a checkpoint: its number of updates, and whether it includes the optimizer state."""

    updates: int
    has_optimizer: bool


def look_into(path: Union[str, Path]) -> Contents:
    """Verify and summarize a checkpoint without loading its tensors into memory.

    safetensors files have no checksum and are not verified.

    Raises:
        DamagedCheckpointError: the file is truncated, damaged or not a checkpoint.
        UserError: the file is missing, cannot be read, or contains disallowed objects.
    """
    with named_errors(path):
        if str(path).endswith(SAFETENSORS):
            return Contents(updates=0, has_optimizer=False)
        check(path)
        with open(path, "rb") as file:
            is_archive = file.read(2) == b"PK"  # files from before torch 1.6 are not archives and cannot be mapped
        with without_code():
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
        updates = check_place(path, state)
        return Contents(updates, state.get("last_optimizer_state") is not None)


@dataclass(frozen=True)
class DataShard:
    """A part of an epoch with a constant batch size: the number of processes, and the number of batches consumed."""

    shards: PositiveCount
    consumed: Count


@dataclass(frozen=True)
class DataPlace:
    """The position in the data from which a run resumes."""

    epoch: PositiveCount
    iterations_in_epoch: Count = 0
    pieces: list[DataShard] = field(default_factory=list)


def check_place(path: Union[str, Path], state: Mapping[str, Any]) -> int:
    """Validate a checkpoint's position in the data and return its number of updates.

    Raises:
        DamagedCheckpointError: a count is not a number or is out of range.
    """
    history = state.get("optimizer_history") or [{}]
    iterator = (state.get("extra_state") or {}).get("train_iterator")  # None if there is no training state
    remedy = "no run can resume from it"
    try:
        updates = as_type(Count, history[-1].get("num_updates", 0), f"{path} has a damaged number of updates", remedy)
        if iterator is not None:
            as_type(DataPlace, iterator, f"{path} has a damaged position in the data", remedy)
    except UserError as error:
        raise DamagedCheckpointError(str(error)) from None
    return updates


@contextmanager
def named_errors(path: Union[str, Path]) -> Iterator[None]:
    """Convert torch's and fairseq's exceptions about an unreadable file to errors that name the file."""
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
            damage = first_line(error)
            raise DamagedCheckpointError(f"{path}: truncated, damaged or not a checkpoint ({damage})") from error
        # torch's message recommends allowing the objects or disabling the protection.
        found = first_line(error.__context__ or error).split(" Please use")[0].rstrip(".")
        raise UserError(
            f"{path}: refused without running any code in it. It contains Python objects other than weights and "
            f"settings, which could run code when loaded ({found}). Do not use the file if you do not trust its "
            "source; if the file is your own, save only weights and plain settings"
        ) from error
    except Exception as error:  # unpickling damaged data can raise anything, such as a KeyError with just a number
        speaks = isinstance(error, (OSError, RuntimeError, EOFError))
        if speaks:
            said = first_line(error)
        else:
            said = f"reading it fails with {type(error).__name__}"
        raise DamagedCheckpointError(f"{path}: truncated, damaged or not a checkpoint ({said})") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0][:200]


def without_code() -> AbstractContextManager[None]:
    """Restrict torch's safe unpickler to the contents of fairseq's checkpoints: tensors, containers and options."""
    return torch.serialization.safe_globals([argparse.Namespace])


def forbid_unsafe_loads(
    environment: MutableMapping[str, str],
) -> MutableMapping[str, str]:
    """Remove, for this process and its children, the environment variable that allows ``torch.load`` to run code."""
    if environment.pop(UNSAFE_LOADS, None):
        logger.warning(
            "%s was set and has been removed, because it allows checkpoints to run code, which no checkpoint needs",
            UNSAFE_LOADS,
        )
    return environment
