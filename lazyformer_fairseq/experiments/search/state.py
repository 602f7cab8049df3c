"""The state from which a search resumes, and the names of the files in its folder."""

from pathlib import Path
from typing import Any

import torch

from lazyformer_fairseq.errors import UserError

SETTINGS = "settings.json"
STATE = "state.pt"
HISTORY = "history.jsonl"
RESULT = "result.json"
LATENCIES = "latencies.json"


def load_state(file: Path) -> dict[str, Any]:
    """A saved state, on the CPU (UserError where it is damaged)."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds of errors on a damaged file
        raise UserError(
            f"{file}: damaged, or no state of a search ({type(error).__name__}); remove it to start anew"
        ) from error


def refuse_other_things(path: Path) -> None:
    """Raises a UserError where a folder holds what no search wrote."""
    is_other = path.exists() and not (path / SETTINGS).exists()
    if is_other and (not path.is_dir() or any(entry.name[0] != "." for entry in path.iterdir())):
        raise UserError(f"{path}: exists already and holds no search; choose another folder")
