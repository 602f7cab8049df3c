"""Reads checkpoints whole, checks them, runs nothing that they hold, and explains in words what is wrong with one.

fairseq would run code from somebody else's file, or follow names in it out of a folder.
"""

import argparse
import ast
import logging
import operator
import os
import pickle
import tarfile
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Optional, Union

import torch
from fairseq import checkpoint_utils, file_utils
from fairseq.file_io import PathManager

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_files import DamagedCheckpointError, check
from lazyformer_fairseq.fairseq_plugin.replacements import loading_safely

logger = logging.getLogger(__name__)

SAFETENSORS = ".safetensors"
UNSAFE_LOADS = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST_SETTING, MOST_REPEATS = 1_000_000, 1_000


def load_safely(path: Union[str, Path], overrides: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    """Loads a checkpoint as fairseq does, whole and checked, without running what it holds; works outside a run too.

    Args:
        overrides: options in place of the checkpoint's.

    Raises:
        UserError: it is missing, damaged, or refused for what it holds.
    """
    with loading_safely():
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
        if "GLOBAL" in str(error) or "Unsupported" in str(error):
            raise UserError(_refusal(path, error)) from error
        raise DamagedCheckpointError(_damage(path, error)) from error
    except Exception as error:  # damage makes an unpickler raise anything
        raise DamagedCheckpointError(_damage(path, error)) from error


def _refusal(path: Any, error: Exception) -> str:
    """torch's own message recommends to allow what it found, or to switch the protection off; this one does not."""
    found = _first_line(error.__context__ or error).split(" Please use")[0].rstrip(".")
    return (
        f"{path}: refused, nothing of it was run. It holds Python objects beyond weights and settings, which could "
        f"run code when loaded ({found}). Do not use it if you do not trust "
        "where it comes from; save weights and plain settings alone if it is yours"
    )


def _damage(path: Any, error: Exception) -> str:
    """An unpickler's KeyError holds just a number: its type has to do."""
    speaks = isinstance(error, (OSError, RuntimeError, EOFError, pickle.UnpicklingError))
    said = _first_line(error) if speaks else f"reading it fails with {type(error).__name__}"
    return f"{path}: truncated, damaged or no checkpoint ({said})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def without_code() -> AbstractContextManager[None]:
    """Lets torch's safe unpickler read what fairseq puts into checkpoints (tensors, containers, options), no more."""
    return torch.serialization.safe_globals([argparse.Namespace])


def forbid_unsafe_loads(environment: MutableMapping[str, str]) -> MutableMapping[str, str]:
    """Removes from it, for children too, what makes ``torch.load`` run code from a file."""
    if environment.pop(UNSAFE_LOADS, None):
        logger.warning(
            "%s is set, and taken back: no checkpoint needs it here, and one could run code by it", UNSAFE_LOADS
        )
    return environment


def read_setting(text: str) -> Any:
    """The value of a setting such as ``[(512, 3)] * 4 + [(512, 2)]``: numbers, strings, containers, + - * /.

    Raises:
        UserError: it is anything else; none of it was run.
    """
    try:
        if len(text) > LONGEST_SETTING:
            raise ValueError("too long")
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise UserError(
            f"setting {text[:200]!r}: refused, nothing of it was run: only numbers, strings, lists and their sums are "
            f"values ({error})"
        ) from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.List(elts):
            return [_value(element) for element in elts]
        case ast.Tuple(elts):
            return tuple(_value(element) for element in elts)
        case ast.Dict(keys, values) if None not in keys:
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
        case ast.BinOp(left, operation, right) if type(operation) in OPERATORS:
            return _calculated(type(operation), _value(left), _value(right))
    raise ValueError(f"it holds a {type(node).__name__}")


def _calculated(operation: type, left: Any, right: Any) -> Any:
    lengths = [len(value) for value in (left, right) if isinstance(value, (str, bytes, list, tuple))]
    if operation is ast.Mult and lengths:
        times = right if isinstance(right, int) else left
        if times * max(lengths) > MOST_REPEATS:
            raise ValueError("it repeats too often")
    return OPERATORS[operation](left, right)


def checking_archive_first(load_archive_file, archive_file):
    """For ``load_archive_file``, which unpacks links and absolute names as they stand, and moves what they name."""
    try:
        path = file_utils.cached_path(archive_file, cache_dir=None)
    except OSError:
        return load_archive_file(archive_file)  # which says that there is none
    if not os.path.isdir(path):
        check_archive(path)
    return load_archive_file(archive_file)


def check_archive(path: str) -> None:
    """Raises a UserError where a tar archive is damaged or has a member that is not a file or folder inside it."""
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                if name.is_absolute() or ".." in name.parts or not (member.isfile() or member.isdir()):
                    kind = "points out of the archive" if member.isfile() or member.isdir() else "is a link or a device"
                    raise UserError(f"{path}: refused, nothing of it was unpacked: its member {member.name!r} {kind}")
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: no archive of a model, or a damaged one ({error})") from None
