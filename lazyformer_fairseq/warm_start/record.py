"""``warm_start.json`` and the page beside it, in the folder of a model that started warm."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.atomic import write_text
from lazyformer_fairseq.storage.json_files import write_json

RECORD_FILE, PAGE_FILE = "warm_start.json", "warm_start.md"
FORMAT, FORMAT_VERSION = "lazyformer warm start", 1


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes both files."""
    write_json(folder / RECORD_FILE, record)
    write_text(folder / PAGE_FILE, page(record))


def page(record: Mapping[str, Any]) -> str:
    """What became what, and what it cost, in Markdown."""
    name = f" of {record['source']}" if record["source"] else ""
    changed = record["changed_options"].items()
    rows = [_row(index, sublayer) for index, sublayer in enumerate(record["sublayers"])]
    parts = [
        f"# Warm start{name}",
        f"`{record['old_pattern']}` became `{record['new_pattern']}`.",
        "\n".join(f"- `--{name.replace('_', '-')}`: {old} became {new}" for name, (old, new) in changed),
        markdown_table(rows, left=("sublayer", "was", "kept", "borrowed")),
        f"Left out: the old sublayers {', '.join(map(str, record['left_out']))}." if record["left_out"] else "",
        _losses(record["losses"]) if record["losses"] else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _row(index: int, sublayer: Mapping[str, Any]) -> dict[str, str]:
    return {
        "": str(index),
        "sublayer": f"`{sublayer['sublayer']}`",
        "was": "none" if sublayer["from"] is None else f"`{sublayer['was']}` {sublayer['from']}",
        "kept": ", ".join(sublayer["kept"]),
        "borrowed": ", ".join(sublayer["borrowed"]),
        "reads": "" if sublayer["reads"] is None else str(sublayer["reads"]),
    }


def _losses(losses: Mapping[str, Any]) -> str:
    before, after = losses["before"], losses["after"]
    lines = [
        f"Masked-LM loss before any update, {losses['tokens']:,} tokens, one fixed mask: {before:.3f} bits before the "
        f"change, {after:.3f} after it ({after - before:+.3f})."
    ]
    rows = [
        {
            "change": f"{change['old'] if change['new'] is None else change['new']}: {change['change']}",
            "alone, bits": _cost(change["alone"], before),
            "with all below it, bits": _cost(change["so_far"], before),
        }
        for change in losses["changes"]
    ]
    return "\n\n".join([*lines, *([markdown_table(rows)] if rows else [])])


def _cost(loss: Optional[float], before: float) -> str:
    return "cannot stand alone" if loss is None else f"{loss:.3f} ({loss - before:+.3f})"
