"""Writes JSON files atomically and reads them safely, optionally with a checksum; caches values and hashes files."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage import checked
from lazyformer_fairseq.storage.atomic import atomic_file

logger = logging.getLogger(__name__)

T = TypeVar("T")
AGAIN = "remove it and run the same command again"


def write_json(path: Path, content: Mapping[str, Any], durable: bool = True) -> None:
    """Write a JSON object in UTF-8; see :func:`~lazyformer_fairseq.storage.atomic.atomic_file`."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with atomic_file(path, durable) as file:
        file.write(text.encode(errors="backslashreplace"))  # unpaired surrogates, as in some file names


def read_json(path: Path, remedy: str = AGAIN) -> dict[str, Any]:
    """Read a JSON object; raise a UserError that ends with the remedy if the file is invalid or exceeds limits."""
    try:
        content = checked.parse_json(checked.read_limited(path, checked.LARGEST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: found {type(content).__name__}, not an object; {remedy}")
    return content


def read_as(expected: type[T], path: Path, remedy: str = AGAIN) -> T:
    """Read a JSON object as a dataclass or another type that pydantic supports.

    Raises:
        UserError: the file is not a JSON object, or a field is missing or has the wrong type; the message ends with the
            remedy.
    """
    return checked.as_type(expected, read_json(path, remedy), path, remedy)


CHECKSUM = "sha256"  # key of the hash over all other keys


def write_checked_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum, to prevent damaged numbers from being mistaken for results."""
    write_json(path, {**content, CHECKSUM: _checksum(content)})


def read_checked_json(path: Path, remedy: str = AGAIN) -> dict[str, Any]:
    """Read a file written by :func:`write_checked_json`.

    Args:
        path: the file.
        remedy: advice at the end of the error message.

    Returns:
        The contents without the checksum.

    Raises:
        UserError: the file is missing, is not a JSON object, or was changed after it was written.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file; {remedy}")
    content = read_json(path, remedy)
    said = content.pop(CHECKSUM, None)
    if said != _checksum(content):
        raise UserError(f"{path} is damaged: its checksum does not match its contents; {remedy}")
    return content


def read_checked_as(expected: type[T], path: Path, remedy: str = AGAIN) -> T:
    """Read a file written by :func:`write_checked_json` as a dataclass; see :func:`read_as`."""
    return checked.as_type(expected, read_checked_json(path, remedy), path, remedy)


def _checksum(content: Mapping[str, Any]) -> str:
    """Hash an object's values, independently of key order and whitespace."""
    values = json.loads(json.dumps(content))  # as read from the file: tuples become lists, keys become strings
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_text(path: Path, remedy: str) -> str:
    """Read a UTF-8 file; raise a UserError that ends with the remedy if it cannot be read."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is a pipe or a device, not a regular file; {remedy}")
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); {remedy}") from None


def refuse_other_version(path: Path, content: Mapping[str, Any], known: int, remedy: str = "") -> None:
    """Raise a UserError if the format version of a file's contents is not the supported one."""
    if (version := content.get("format_version")) != known:
        raise UserError(f"{path}: format version {version!r} is not supported, only {known}{remedy}")


VARIABLE = "LAZYFORMER_CACHE"  # overrides the cache folder, for read-only home folders


def cache_file(name: str) -> Path:
    """Return the path of a file in the cache folder; the file need not exist."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("lazyformer_fairseq")) / name


def cache_get(name: str, machine: str, key: str, is_valid: Callable[[Any], bool] = lambda _: True) -> Any:
    """Look up a value stored by :func:`cache_set`; return None if there is none or it is not valid.

    Args:
        name: file name in the cache folder.
        machine: machine on which the value was measured.
        key: the measured quantity.
        is_valid: predicate for acceptable values.
    """
    found = _read_cache(cache_file(name)).get(machine, {}).get(key)
    if found is not None and is_valid(found):
        return found
    return None


def cache_set(name: str, machine: str, key: str, value: T, is_valid: Callable[[Any], bool] = lambda _: True) -> T:
    """Store a JSON value for later processes unless a valid one exists, and return the stored value.

    If several processes measure at the same time, later ones use the first value written. If the cache folder cannot be
    written, each process uses its own measurement.
    """
    path = cache_file(name)
    others = _read_cache(path)
    first = others.setdefault(machine, {}).setdefault(key, value)
    if not is_valid(first):
        others[machine][key] = value
        first = value
    with suppress(OSError):
        write_json(path, others)
    return first


def cached(
    name: str,
    machine: str,
    key: str,
    measure: Callable[[], T],
    is_valid: Callable[[Any], bool] = lambda _: True,
) -> T:
    """Return the cached value, or call `measure` and cache its result."""
    found = cache_get(name, machine, key, is_valid)
    if found is None:
        return cache_set(name, machine, key, measure(), is_valid)
    return found


def _read_cache(path: Path) -> dict[str, dict[str, Any]]:
    """Read a file in the cache folder; return an empty dictionary if it is missing or invalid."""
    if not path.is_file():
        return {}
    try:
        return read_as(dict[str, dict[str, Any]], path)
    except UserError as error:
        logger.warning("%s; measuring again", error)
        return {}


def hash_of(path: Path, algorithm: str) -> str:
    """Return the hexadecimal hash of a file, computed with one of hashlib's algorithms."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    return hash_of(path, "sha256")
