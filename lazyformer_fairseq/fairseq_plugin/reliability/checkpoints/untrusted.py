"""Blocks what fairseq would run from somebody else's file, or follow from it out of a folder."""

import argparse
import ast
import logging
import operator
import os
import tarfile
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from pathlib import PurePosixPath
from typing import Any

import torch
from fairseq import file_utils

from lazyformer_fairseq.errors import UserError

logger = logging.getLogger(__name__)

UNSAFE_LOADS = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST_SETTING, MOST_REPEATS = 1_000_000, 1_000


def load_without_code(load_checkpoint_to_cpu, path, *args, **kwargs):
    """fairseq's loader; torch's protection stays on whatever the environment says."""
    forbid_unsafe_loads(os.environ)
    with without_code():
        return load_checkpoint_to_cpu(path, *args, **kwargs)


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


def check_archive_first(original, archive_file):
    """Wraps ``load_archive_file``, which unpacks links and absolute names as they stand, and moves what they name."""
    try:
        path = file_utils.cached_path(archive_file, cache_dir=None)
    except OSError:
        return original(archive_file)  # which says that there is none
    if not os.path.isdir(path):
        check_archive(path)
    return original(archive_file)


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
