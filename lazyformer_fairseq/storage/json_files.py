"""JSON files that are written completely or not at all, with a checksum if they must not be edited; hashes of files."""

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
        file.write(text.encode(errors="backslashreplace"))  # half of a surrogate pair, as in some file names


def read_json(path: Path, remedy: str = AGAIN) -> dict[str, Any]:
    """Read a JSON object; raise a UserError, which ends in the remedy, if it is not one or exceeds limits."""
    try:
        content = checked.parse_json(checked.read_limited(path, checked.LARGEST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: contains {type(content).__name__}, not an object; {remedy}")
    return content


def read_as(expected: type[T], path: Path, remedy: str = AGAIN) -> T:
    """Read a JSON object as a dataclass, or as another type that pydantic knows.

    Raises:
        UserError: the file is not a JSON object, or a field is missing or of another type; ends in the remedy.
    """
    return checked.as_type(expected, read_json(path, remedy), path, remedy)


CHECKSUM = "sha256"  # the key of a checked file for the hash of all other keys


def write_checked_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum, so that a damaged number is not mistaken for a result."""
    write_json(path, {**content, CHECKSUM: _checksum(content)})


def read_checked_json(path: Path, remedy: str = AGAIN) -> dict[str, Any]:
    """Read a file written by :func:`write_checked_json`.

    Args:
        path: the file.
        remedy: what a user should do about a damaged file; the error ends in it.

    Returns:
        The content without its checksum.

    Raises:
        UserError: the file is missing, is not a JSON object, or is not as it was written.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a regular file; {remedy}")
    content = read_json(path, remedy)
    said = content.pop(CHECKSUM, None)
    if said != _checksum(content):
        raise UserError(f"{path}: damaged, its checksum does not match its content; {remedy}")
    return content


def read_checked_as(expected: type[T], path: Path, remedy: str = AGAIN) -> T:
    """Read a file written by :func:`write_checked_json` as :func:`read_as` does."""
    return checked.as_type(expected, read_checked_json(path, remedy), path, remedy)


def _checksum(content: Mapping[str, Any]) -> str:
    """Hash the values of an object, regardless of the order of keys and of white space."""
    values = json.loads(json.dumps(content))  # as read from the file: tuples become lists, keys become strings
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_text(path: Path, remedy: str) -> str:
    """Return the text of a UTF-8 file; raise a UserError, which ends in the remedy, if it cannot be read."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: this is a pipe or a device, not a regular file; {remedy}")
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); {remedy}") from None


def refuse_other_version(path: Path, content: Mapping[str, Any], known: int, remedy: str = "") -> None:
    """Raise a UserError if the content of a file has another format version than the known one."""
    if (version := content.get("format_version")) != known:
        raise UserError(f"{path}: format version {version!r}, but this program reads {known}{remedy}")


VARIABLE = "LAZYFORMER_CACHE"  # overrides the cache folder, if the home folder must not be written to


def cache_file(name: str) -> Path:
    """Return the path of a file in the cache folder, whether it exists or not."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("lazyformer_fairseq")) / name


def recall(name: str, machine: str, key: str, is_valid: Callable[[Any], bool] = lambda _: True) -> Any:
    """Return the value that :func:`remember` stored under a key; None if there is none or it is not valid.

    Args:
        name: the name of the file in the cache folder.
        machine: the machine for which the value holds.
        key: the measured quantity.
        is_valid: a function that tells whether a value is acceptable.
    """
    found = _read_cache(cache_file(name)).get(machine, {}).get(key)
    if found is not None and is_valid(found):
        return found
    return None


def remember(name: str, machine: str, key: str, value: T, is_valid: Callable[[Any], bool] = lambda _: True) -> T:
    """Store a JSON value for later processes, and return the value that counts.

    If several processes measure at the same time, the first one to write decides for all later ones. If the folder
    cannot be written, each process uses its own measurement.
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


def remembered(
    name: str,
    machine: str,
    key: str,
    measure: Callable[[], T],
    is_valid: Callable[[Any], bool] = lambda _: True,
) -> T:
    """Return the stored value, or else store and return the result of `measure`."""
    found = recall(name, machine, key, is_valid)
    if found is None:
        return remember(name, machine, key, measure(), is_valid)
    return found


def _read_cache(path: Path) -> dict[str, dict[str, Any]]:
    """Return the content of a file in the cache folder; empty if it cannot be read, as a cache must not stop a run."""
    if not path.is_file():
        return {}
    try:
        return read_as(dict[str, dict[str, Any]], path)
    except UserError as error:
        logger.warning("%s; measuring again", error)
        return {}


def hash_of(path: Path, algorithm: str) -> str:
    """Return the hash of a file in hexadecimal, by one of hashlib's algorithms."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    return hash_of(path, "sha256")
