"""Names of a run's checkpoints: those that fairseq gives, and ours."""

import re
from pathlib import Path
from typing import Optional, Union

LAST = "checkpoint_last.pt"  # fairseq's default of --restore-file, relative to --save-dir
# Of an epoch, an update (of --save-interval-updates, and of --keep-updates-list), the best, the best ones, the last.
_STEM = r"checkpoint(\d+|_\d+_\d+|_update_\d+|_best|\.best_\S+|_last)"


def listed_name(updates: int, suffix: str) -> str:
    """Of what ``--keep-updates-list`` keeps. fairseq's removal of old checkpoints knows no such name."""
    return f"checkpoint_update_{updates}{suffix}.pt"


def checkpoints_in(folder: Union[str, Path], suffix: Optional[str] = None) -> list[Path]:
    """All checkpoints in a folder, of fairseq's --checkpoint-suffix or (None) of any, the youngest file first."""
    name = re.compile(_STEM + (r"\S*" if suffix is None else re.escape(suffix)) + r"\.pt")
    found = [path for path in Path(folder).glob("checkpoint*.pt") if name.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)
