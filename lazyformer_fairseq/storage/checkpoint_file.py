"""Files of checkpoints: whole or not there at all, checked, read without running what they hold.

torch.save writes a zip archive. A zip archive may end in a comment, which torch does not read; ours is a
SHA-256 of all that torch.save wrote. One rename gives file and checksum their name, so no kill can part them. Files
without a checksum still load: stock fairseq's are zip archives too, where every record has a CRC-32; files from before
torch 1.6 have nothing to check.
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
PIECE = 2**22  # bytes read at a time

_LABEL = b"lazyformer_fairseq sha256 "
_NO_COMMENT = struct.pack("<H", 0)  # the end of an archive: the length of its comment
_COMMENT_FOLLOWS = struct.pack("<H", len(_LABEL) + 64)
_ENDING = re.compile(re.escape(_COMMENT_FOLLOWS + _LABEL) + rb"([0-9a-f]{64})")
_ENDING_SIZE = len(_COMMENT_FOLLOWS + _LABEL) + 64
_ARCHIVE = b"PK"
_ARCHIVE_END = b"PK\x05\x06"
_PICKLE = b"\x80"  # how files from before torch 1.6 begin


class DamagedCheckpointError(UserError):
    """A file that is not, or no longer, what was once saved; another one may do."""


def save(state: Any, path: Union[str, Path]) -> None:
    """``torch.save``, whole or not at all, with a checksum.

    Raises:
        OSError: the file could not be written; one that was there before is as it was.
    """
    with atomic_file(path) as file:
        hashed = _HashedFile(file)
        try:
            torch.save(state, hashed)  # type: ignore[arg-type] # it needs write alone
        except RuntimeError:  # torch's, when it cannot continue after a failed write
            if hashed.error is not None:
                raise hashed.error from None
            raise
        file.seek(-len(_NO_COMMENT), os.SEEK_END)
        file.write(_COMMENT_FOLLOWS + _LABEL + hashed.sha256.hexdigest().encode())


def on_cpu(state: Any) -> Any:
    """Return a state with its tensors on the CPU, none in half precision, as fairseq saves them.

    Tied tensors stay tied, and are written once.
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
            moved[place] = (each.float() if each.dtype in (torch.bfloat16, torch.float16) else each).cpu()
        return moved[place]

    return tree_map_only(Tensor, move, state)


class _HashedFile:
    """The file interface that torch.save needs; hashes what it writes and remembers why a write failed."""

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
    """Read the whole file to see whether it is as it was written.

    Raises:
        DamagedCheckpointError: it is not, or it would take more memory than its size says.
        OSError: it cannot be read.
    """
    if Path(path).is_fifo():  # to open one is to wait for a process that writes to it
        raise DamagedCheckpointError(f"{path}: is a pipe, no checkpoint")
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
            intact = _records_are_intact(file)
            damage = "a record's CRC-32 does not fit its content"
        else:
            intact = start.startswith(_PICKLE)
            damage = "its end is missing"
            if start != _ARCHIVE:
                damage = "empty"
                if size:
                    damage = "torch.save wrote no such file"
        if not intact:
            raise DamagedCheckpointError(f"{path}: truncated, damaged or no checkpoint ({damage})")
        if checksum:
            _refuse_unpacking(path, file, size)


def _refuse_unpacking(path: Union[str, Path], file: BinaryIO, size: int) -> None:
    """Refuse records that torch would unpack, even from a few zeros or from one place again and again.

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
    """Return the hash of the file as torch.save wrote it: its first `size` bytes, without the comment."""
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


def load(path: Union[str, Path]) -> Any:
    """Return what was saved, tensors on the CPU; checked before, and read without running what it holds.

    Raises:
        UserError: it is missing, damaged, or refused for what it holds.
    """
    forbid_unsafe_loads(os.environ)
    with without_code(), named_errors(path):
        check(path)
        return torch.load(path, map_location="cpu", weights_only=True)


class Contents(NamedTuple):
    """A checkpoint's own account: updates made before it was saved, and whether a run can resume from it."""

    updates: int
    has_optimizer: bool


def look_into(path: Union[str, Path]) -> Contents:
    """Check a whole file; its tensors stay on disk. Trusts safetensors, which have no checksum.

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
        updates = check_place(path, state)
        return Contents(updates, state.get("last_optimizer_state") is not None)


@dataclass(frozen=True)
class DataShard:
    """The part of an epoch that one of several processes has read."""

    shards: PositiveCount
    consumed: Count


@dataclass(frozen=True)
class DataPlace:
    """The place in the data that a run goes on from."""

    epoch: PositiveCount
    iterations_in_epoch: Count = 0
    pieces: list[DataShard] = field(default_factory=list)


def check_place(path: Union[str, Path], state: Mapping[str, Any]) -> int:
    """Return how many updates a checkpoint has behind it, once it is known that its place in the data can be one.

    Raises:
        DamagedCheckpointError: a count in it is no number, or none that can be.
    """
    history = state.get("optimizer_history") or [{}]
    iterator = (state.get("extra_state") or {}).get("train_iterator")  # None in weights that no run goes on with
    remedy = "no run can resume from it"
    try:
        updates = as_type(Count, history[-1].get("num_updates", 0), f"{path}: damaged, its number of updates", remedy)
        if iterator is not None:
            as_type(DataPlace, iterator, f"{path}: damaged, its place in the data", remedy)
    except UserError as error:
        raise DamagedCheckpointError(str(error)) from None
    return updates


@contextmanager
def named_errors(path: Union[str, Path]) -> Iterator[None]:
    """Turn what torch and fairseq raise for an unreadable file into an error that names the file."""
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
            raise DamagedCheckpointError(f"{path}: truncated, damaged or no checkpoint ({damage})") from error
        # torch's own message recommends to allow what it found, or to switch the protection off.
        found = first_line(error.__context__ or error).split(" Please use")[0].rstrip(".")
        raise UserError(
            f"{path}: refused, nothing of it was run. It holds Python objects beyond weights and settings, which could "
            f"run code when loaded ({found}). Do not use it if you do not trust where it comes from; save weights and "
            "plain settings alone if it is yours"
        ) from error
    except Exception as error:  # damage makes an unpickler raise anything; its KeyError holds just a number
        speaks = isinstance(error, (OSError, RuntimeError, EOFError))
        if speaks:
            said = first_line(error)
        else:
            said = f"reading it fails with {type(error).__name__}"
        raise DamagedCheckpointError(f"{path}: truncated, damaged or no checkpoint ({said})") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def without_code() -> AbstractContextManager[None]:
    """Let torch's safe unpickler read what fairseq puts into checkpoints (tensors, containers, options), no more."""
    return torch.serialization.safe_globals([argparse.Namespace])


def forbid_unsafe_loads(
    environment: MutableMapping[str, str],
) -> MutableMapping[str, str]:
    """Remove from it, for children too, what makes ``torch.load`` run code from a file."""
    if environment.pop(UNSAFE_LOADS, None):
        logger.warning(
            "%s is set, and taken back: a checkpoint could run code by it, and none needs it",
            UNSAFE_LOADS,
        )
    return environment
