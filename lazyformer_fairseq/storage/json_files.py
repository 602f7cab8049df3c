"""JSON files that are there whole or not at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
