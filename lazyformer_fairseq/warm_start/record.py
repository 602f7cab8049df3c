"""``warm_start.json`` and the page beside it, in the folder of a model that started warm."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.warm_start.report import page

RECORD_FILE, PAGE_FILE = "warm_start.json", "warm_start.md"
FORMAT, FORMAT_VERSION = "lazyformer warm start", 1


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes both files."""
    write_json(folder / RECORD_FILE, record)
    write_text(folder / PAGE_FILE, page(record))


def read_record(folder: Path) -> dict[str, Any]:
    """Raises a UserError where the folder holds none, or one of another format or version."""
    path = folder / RECORD_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; give a folder that `lazyformer import --sublayer-pattern` wrote")
    record = read_json(path, "write the folder again with `lazyformer import`")
    if record.get("format") != FORMAT or record.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: not the record of a warm start of version {FORMAT_VERSION}; write the folder again with "
            "`lazyformer import`"
        )
    return record
