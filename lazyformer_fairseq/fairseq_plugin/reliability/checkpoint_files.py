"""Checkpoint files: whole or not there at all, each with a checksum that shows whether it is as it was written.

torch.save writes a zip archive. A zip archive may end in a comment, which torch does not read; ours is a
SHA-256 of all that torch.save wrote. One rename gives file and checksum their name, so no kill can part them. Files
without a checksum still load: stock fairseq's are zip archives too, where every record has a CRC-32; files from before
torch 1.6 have nothing to check.
"""

import hashlib
import logging
import os
import re
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, Union

import torch
from fairseq.file_io import PathManager
from torch.utils._pytree import tree_leaves

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import atomic_file, unfinished_name

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

    def __init__(self, file: BinaryIO):
        self.file = file
        self.sha256 = hashlib.sha256()
        self.error = None

    def write(self, data) -> int:
        self.sha256.update(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def check(path: Union[str, Path]) -> None:
    """Reads the whole file to see whether it is as it was written.

    Raises:
        DamagedCheckpointError: it is not.
        UserError: it would take more memory than its size says.
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
            intact, damage = _records_are_intact(file), "a record's CRC-32 does not fit its content"
        else:
            intact = start.startswith(_PICKLE)
            damage = "its end is missing" if start == _ARCHIVE else "torch.save wrote no such file" if size else "empty"
        if not intact:
            raise DamagedCheckpointError(f"{path}: truncated, damaged or no checkpoint ({damage})")
        # As torch would unpack them, even from a few zeros or from one place again and again.
        if start == _ARCHIVE and sum(record.file_size for record in zipfile.ZipFile(file).infolist()) > size:
            raise UserError(f"{path}: refused, its records are packed and larger than the file; torch.save packs none")


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
    except Exception as error:  # zipfile may raise anything where the archive's list of records is damaged
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
