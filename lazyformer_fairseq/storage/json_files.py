"""JSON files that are there whole or not at all, with a checksum where nobody may change them; hashes of files."""

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
    """Write a JSON object in UTF-8, whole; see :func:`~lazyformer_fairseq.storage.atomic.atomic_file`."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with atomic_file(path, durable) as file:
        file.write(text.encode(errors="backslashreplace"))  # half a surrogate, from a file's name, say, as JSON has it


def read_json(path: Path, remedy: str = AGAIN) -> dict[str, Any]:
    """Raise a UserError, which ends in the remedy, for what is no JSON object, or beyond the limits of `checked`."""
    try:
        content = checked.parse_json(checked.read_limited(path, checked.LARGEST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds {type(content).__name__}, not an object; {remedy}")
    return content


def read_as(expected: type[T], path: Path, remedy: str = AGAIN) -> T:
    """Read a JSON object as an instance of a dataclass, or as another type that pydantic knows.

    Raises:
        UserError: the file is no JSON object, or a field is missing or of another type; ends in the remedy.
    """
    return checked.as_type(expected, read_json(path, remedy), path, remedy)


CHECKSUM = "sha256"  # the key of a checked file that holds the hash of all the others


def write_checked_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum, so that no damage to a number passes for a result."""
    write_json(path, {**content, CHECKSUM: _checksum(content)})


def read_checked_json(path: Path, remedy: str = AGAIN) -> dict[str, Any]:
    """Read what :func:`write_checked_json` wrote.

    Args:
        path: path of the file.
        remedy: what a user should do about a damaged file; the error ends in it.

    Returns:
        The content without its checksum.

    Raises:
        UserError: the file is missing, no JSON object, or not as it was written.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is no file; {remedy}")
    content = read_json(path, remedy)
    said = content.pop(CHECKSUM, None)
    if said != _checksum(content):
        raise UserError(f"{path}: damaged, its checksum does not fit its content; {remedy}")
    return content


def read_checked_as(expected: type[T], path: Path, remedy: str = AGAIN) -> T:
    """Read what :func:`write_checked_json` wrote as an instance of a dataclass; raises as both of them do."""
    return checked.as_type(expected, read_checked_json(path, remedy), path, remedy)


def _checksum(content: Mapping[str, Any]) -> str:
    """Hash values, whatever the order of keys and the spaces between them."""
    values = json.loads(json.dumps(content))  # as they come back from the file: tuples become lists, keys strings
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def read_text(path: Path, remedy: str) -> str:
    """Return the text of a file; raise a UserError, which ends in the remedy, if it is no text in UTF-8."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: is a pipe or a device, no regular file; {remedy}")
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no UTF-8 text ({error.reason} at byte {error.start}); {remedy}") from None


def refuse_other_version(path: Path, content: Mapping[str, Any], known: int, remedy: str = "") -> None:
    """Raise a UserError where what a file holds has another format version than the one that is known."""
    if (version := content.get("format_version")) != known:
        raise UserError(f"{path}: format version {version!r}, but this program reads {known}{remedy}")


VARIABLE = "LAZYFORMER_CACHE"  # another folder, where the home is not to be written to


def cache_file(name: str) -> Path:
    """Return where a file of that name is kept, whether it is there or not."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("lazyformer_fairseq")) / name


def recall(name: str, machine: str, key: str, is_valid: Callable[[Any], bool] = lambda _: True) -> Any:
    """Return what :func:`remember` kept under a key; None for nothing, or for something that is not valid.

    Args:
        name: name of the file in the cache folder.
        machine: what the value holds for.
        key: what was measured.
        is_valid: whether a value is one that may stand there.
    """
    found = _read_cache(cache_file(name)).get(machine, {}).get(key)
    if found is not None and is_valid(found):
        return found
    return None


def remember(name: str, machine: str, key: str, value: T, is_valid: Callable[[Any], bool] = lambda _: True) -> T:
    """Keep a value of JSON for later processes, and return the one that counts.

    If processes measure at the same moment, the first to write decides for all later ones. Where the folder cannot be
    written, each process measures for itself.
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
    """Return what :func:`recall` finds; else keep and return what `measure` returns."""
    found = recall(name, machine, key, is_valid)
    if found is None:
        return remember(name, machine, key, measure(), is_valid)
    return found


def _read_cache(path: Path) -> dict[str, dict[str, Any]]:
    """Return the content of a file in the cache folder; nothing if it cannot be read, as no run ends for a cache."""
    if not path.is_file():
        return {}
    try:
        return read_as(dict[str, dict[str, Any]], path)
    except UserError as error:
        logger.warning("%s: measured again", error)
        return {}


def hash_of(path: Path, algorithm: str) -> str:
    """Return the hash of a file in hexadecimal, by an algorithm of hashlib's."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    return hash_of(path, "sha256")
