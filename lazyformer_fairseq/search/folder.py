"""The folder of a search: its owner, its state so far, its result. Every file is either complete or absent."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.files.claims import claimed, keep_settings
from lazyformer_fairseq.files.json_files import read_json
from lazyformer_fairseq.files.whole import write_text
from lazyformer_fairseq.reliability.checkpoints.files import save
from lazyformer_fairseq.search.settings import SearchSettings

SETTINGS = "settings.json"
STATE = "state.pt"
HISTORY = "history.jsonl"
RESULT = "result.json"
LATENCIES = "latencies.json"


class SearchFolder:
    """A search's files in its folder, which it makes.

    Raises:
        UserError: the folder holds a search begun with other settings, or other things, or is not writable.
    """

    def __init__(self, path: Path, settings: SearchSettings):
        _refuse_other_things(path)
        self.path = path
        begun = (path / STATE).exists()
        keep_settings(path / SETTINGS, asdict(settings), "a search", begun, made_by_them=[path / LATENCIES])

    @classmethod
    @contextmanager
    def claimed(cls, path: Path, settings: SearchSettings) -> Iterator["SearchFolder"]:
        """The folder, which no other process may use until the block ends."""
        _refuse_other_things(path)  # before adding a lock to them
        with claimed(path):
            yield cls(path, settings)

    def save_state(self, state: dict[str, Any]) -> None:
        """Writes the state, then the history in it as JSON lines."""
        save(state, self.path / STATE)
        write_text(self.path / HISTORY, "".join(json.dumps(row) + "\n" for row in state["history"]))

    def load_state(self) -> Optional[dict[str, Any]]:
        """The last saved state, on the CPU; None at the start."""
        path = self.path / STATE
        if not path.exists():
            return None
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds of errors on a damaged file
            raise UserError(
                f"{path}: damaged, or no state of a search ({type(error).__name__}); remove it to start anew"
            ) from error

    def result(self) -> Optional[dict[str, Any]]:
        """The result of a finished search."""
        path = self.path / RESULT
        return read_json(path) if path.exists() else None


def _refuse_other_things(path: Path) -> None:
    is_other = path.exists() and not (path / SETTINGS).exists()
    if is_other and (not path.is_dir() or any(entry.name[0] != "." for entry in path.iterdir())):
        raise UserError(f"{path}: exists already and holds no search; choose another folder")
