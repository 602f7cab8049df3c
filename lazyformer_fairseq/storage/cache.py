"""Keeps measurements of this machine in the user's cache folder for later processes."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import platformdirs

from lazyformer_fairseq.storage.json_files import read_json, write_json

T = TypeVar("T")
VARIABLE = "LAZYFORMER_CACHE"  # another folder, where the home is not to be written to


def cache_file(name: str) -> Path:
    """Where a file of that name is kept, whether it is there or not."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("lazyformer_fairseq")) / name


def remembered(name: str, machine: str, key: str, measure: Callable[[], T]) -> T:
    """What an earlier process measured; else what `measure` returns, a value of JSON, kept for later ones.

    If processes measure at the same moment, the first to write decides for all later ones. Where the folder cannot
    be written, each process measures for itself.

    Args:
        name: of the file.
        machine: what the measurement holds for.
        key: what is measured.

    Raises:
        UserError: the file is there, but damaged.
    """
    path = cache_file(name)
    if (found := _read(path).get(machine, {}).get(key)) is not None:
        return found
    measured = measure()
    known = _read(path)
    measured = known.setdefault(machine, {}).setdefault(key, measured)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, known)
    return measured


def _read(path: Path) -> dict[str, dict]:
    return read_json(path) if path.is_file() else {}
