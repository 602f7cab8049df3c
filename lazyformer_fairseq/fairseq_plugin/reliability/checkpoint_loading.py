"""Reads checkpoints whole, checks them, runs nothing that they hold, and explains in words what is wrong with one.

fairseq would run code from somebody else's file, or follow names in it out of a folder.
"""

import argparse
import ast
import logging
import os
import pickle
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoint_files import DamagedCheckpointError, check
from lazyformer_fairseq.fairseq_plugin.replacements import loading_safely

logger = logging.getLogger(__name__)

SAFETENSORS = ".safetensors"
UNSAFE_LOADS = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


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
        if "GLOBAL" not in str(error) and "Unsupported" not in str(error):
            raise DamagedCheckpointError(
                f"{path}: truncated, damaged or no checkpoint ({_first_line(error)})"
            ) from error
        # torch's own message recommends to allow what it found, or to switch the protection off.
        found = _first_line(error.__context__ or error).split(" Please use")[0].rstrip(".")
        raise UserError(
            f"{path}: refused, nothing of it was run. It holds Python objects beyond weights and settings, which could "
            f"run code when loaded ({found}). Do not use it if you do not trust "
            "where it comes from; save weights and plain settings alone if it is yours"
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
        logger.warning(
            "%s is set, and taken back: no checkpoint needs it here, and one could run code by it", UNSAFE_LOADS
        )
    return environment


def read_setting(text: str) -> Any:
    """The value of a setting such as ``(0.9, 0.999)``: numbers, strings, containers.

    Raises:
        UserError: it is anything else; none of it was run.
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise UserError(
            f"setting {text[:200]!r}: refused, nothing of it was run: only numbers, strings and lists are values "
            f"({_first_line(error)})"
        ) from None


def refusing_archives(load_archive_file, archive_file):
    """For ``load_archive_file``, which unpacks links and absolute names as they stand, and moves what they name."""
    if os.path.isfile(archive_file) or "://" in str(archive_file):
        raise UserError(f"{archive_file}: refused, nothing of it was unpacked; unpack it, and give the folder")
    return load_archive_file(archive_file)
