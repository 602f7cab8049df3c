"""The page that a warm start writes: what became what, and what it cost."""

from collections.abc import Mapping
from typing import Any, Optional

from lazyformer_fairseq.report.tables import markdown_table


def page(record: Mapping[str, Any]) -> str:
    """In Markdown."""
    name = f" of {record['source']}" if record["source"] else ""
    rows = [_row(index, sublayer) for index, sublayer in enumerate(record["sublayers"])]
    parts = [
        f"# Warm start{name}",
        f"`{record['old_pattern']}` became `{record['new_pattern']}`, heads {record['heads']}.",
        _options(record),
        markdown_table(rows, left=("sublayer", "was", "kept", "borrowed")),
        _left_out(record),
        _losses(record["losses"]) if record["losses"] else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _options(record: Mapping[str, Any]) -> str:
    changed = record["changed_options"].items()
    return "\n".join(f"- `--{name.replace('_', '-')}`: {old} became {new}" for name, (old, new) in changed)


def _row(index: int, sublayer: Mapping[str, Any]) -> dict[str, str]:
    order, distance = sublayer["head_order"], sublayer["distance"]
    moved = "" if order is None else str(sum(new != old for new, old in enumerate(order)))
    return {
        "": str(index),
        "sublayer": f"`{sublayer['sublayer']}`",
        "was": "none" if sublayer["from"] is None else f"`{sublayer['was']}` {sublayer['from']}",
        "kept": ", ".join(sublayer["kept"]),
        "borrowed": ", ".join(sublayer["borrowed"]),
        "reads": "" if sublayer["reads"] is None else str(sublayer["reads"]),
        "heads moved": moved,
        "distance": "" if distance is None else f"{distance['plain']:.3f} to {distance['matched']:.3f}",
    }


def _left_out(record: Mapping[str, Any]) -> str:
    gone = ", ".join(map(str, record["left_out"]))
    return f"Left out: the old sublayers {gone}." if gone else ""


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
