"""Reads checkpoints whole, checks them, runs nothing that they hold, and explains in words what is wrong with one."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints.files import DamagedCheckpointError, check
from lazyformer_fairseq.fairseq_plugin.reliability.checkpoints.untrusted import without_code
from lazyformer_fairseq.fairseq_plugin.reliability.installing import loading_safely

SAFETENSORS = ".safetensors"


def load_safely(path: Union[str, Path], overrides: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    """Loads a checkpoint as fairseq does, whole and checked, without running what it holds; works outside a run too.

    Args:
        overrides: options in place of the checkpoint's.

    Raises:
        UserError: it is missing, damaged, or refused for what it holds.
    """
    with loading_safely():
        return checkpoint_utils.load_checkpoint_to_cpu(str(path), overrides)


def checked(load_checkpoint_to_cpu, path, *args, **kwargs):
    """fairseq's loader, with the checksum verified before, and errors that name the file and what to do."""
    with named_errors(path):
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
