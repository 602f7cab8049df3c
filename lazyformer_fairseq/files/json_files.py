"""JSON files that are there whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from lazyformer_fairseq.errors import UserError


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes beside `path` and renames: whoever reads `path` never sees half a file, nor does a crash leave one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Raises a UserError where the file is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); remove it and run the same command again") from None
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: holds {type(content).__name__}, not an object; remove it and run the same command again"
        )
    return content
