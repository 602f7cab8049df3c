"""Names of a run's checkpoints: those that fairseq gives, and ours."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Optional, Union

LAST = "checkpoint_last.pt"  # fairseq's default of --restore-file, relative to --save-dir
# Of an epoch, an update (of --save-interval-updates, and of --keep-updates-list), the best, the best ones, the last.
_NAME = re.compile(
    r"checkpoint(\d+|_\d+_\d+|_update_\d+|_best|\.best_\S+?_(-?\d+\.\d+|nan\d|-?inf\d)|_last)"
    r"(?P<suffix>\S*)\.pt"
)


def listed_name(updates: int, suffix: str) -> str:
    """The name of what ``--keep-updates-list`` keeps. fairseq's removal of old checkpoints does not match it."""
    return f"checkpoint_update_{updates}{suffix}.pt"


def suffix_of(path: Path) -> Optional[str]:
    """fairseq's --checkpoint-suffix in a checkpoint's name; None where the name is no checkpoint's."""
    name = _NAME.fullmatch(path.name)
    return name and name["suffix"]


def checkpoints_in(folder: Union[str, Path], suffix: str) -> list[Path]:
    """All checkpoints in a folder from the run with this suffix, newest file first."""
    ages = {}
    for path in Path(folder).glob("checkpoint*.pt"):
        with suppress(FileNotFoundError):  # a link to nowhere, or just removed
            if suffix_of(path) == suffix and path.is_file():
                ages[path] = path.stat().st_mtime_ns
    return sorted(ages, key=ages.get, reverse=True)
