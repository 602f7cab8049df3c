"""JSON files that are there whole or not at all, measurements of this machine among them; hashes of files."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import atomic_file


def write_json(path: Path, content: Mapping[str, Any], durable: bool = True) -> None:
    """Writes a JSON object in UTF-8, whole; see :func:`~lazyformer_fairseq.storage.atomic.atomic_file`."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with atomic_file(path, durable) as file:
        file.write(text.encode(errors="backslashreplace"))  # half a surrogate, from a file's name, say, as JSON has it


def read_json(path: Path, remedy: str = "remove it and run the same command again") -> dict[str, Any]:
    """Raises a UserError, which ends in the remedy, where the file is not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {type(content).__name__}, not an object; {remedy}")
    return content


def read_text(path: Path, remedy: str) -> str:
    """Raises a UserError, which ends in the remedy, where the file cannot be read or is no text in UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no UTF-8 text ({error.reason} at byte {error.start}); {remedy}") from None


def refuse_other_version(path: Path, content: Mapping[str, Any], known: int, remedy: str = "") -> None:
    """Raises a UserError where what a file holds has another format version than the one that is known."""
    if (version := content.get("format_version")) != known:
        raise UserError(f"{path}: format version {version!r}, but this program reads {known}{remedy}")


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

    def known() -> dict[str, dict]:
        return read_json(path) if path.is_file() else {}

    if (found := known().get(machine, {}).get(key)) is not None:
        return found
    measured, others = measure(), known()
    measured = others.setdefault(machine, {}).setdefault(key, measured)
    with suppress(OSError):
        write_json(path, others)
    return measured


def hash_of(path: Path, kind: str) -> str:
    """In hexadecimal, by a method of hashlib's."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def sha256_of(path: Path) -> str:
    return hash_of(path, "sha256")
