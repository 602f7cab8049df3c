"""The folder of a search: whose it is, what it has so far, what it has found. All files are whole or not there."""

import json
import os
from pathlib import Path
from typing import Any, Optional

import torch

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.files.json_files import read_json, write_json
from lazyformer_fairseq.search.settings import SearchSettings

SETTINGS = "settings.json"
STATE = "state.pt"
HISTORY = "history.jsonl"
RESULT = "result.json"
LATENCIES = "latencies.json"


class SearchFolder:
    """Claims a folder for a search.

    Args:
        path: of the folder; made where it is not.
        settings: of the search.

    Raises:
        UserError: the folder holds a search of other settings that has begun, or other things, or cannot be written.
    """

    def __init__(self, path: Path, settings: SearchSettings):
        self.path = path
        ours = json.loads(json.dumps(settings.as_json()))
        if self._file(SETTINGS).exists():
            if differing := _differences(read_json(self._file(SETTINGS)), ours):
                if self._file(STATE).exists():
                    raise UserError(
                        f"{path}: holds a search of other settings ({differing}); give those, or another folder"
                    )
                self._file(LATENCIES).unlink(missing_ok=True)  # nothing has been searched yet, so nothing is lost
                write_json(self._file(SETTINGS), ours)
            return
        if path.exists() and (not path.is_dir() or any(entry.name[0] != "." for entry in path.iterdir())):
            raise UserError(f"{path}: exists already and holds no search; choose another folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_json(self._file(SETTINGS), ours)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); choose another folder") from error

    def _file(self, name: str) -> Path:
        return self.path / name

    def save_state(self, state: dict[str, Any]) -> None:
        """Writes the state, then the history in it as JSON lines."""
        unfinished = self._file(f".{STATE}")
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._file(STATE))
        lines = self._file(f".{HISTORY}")
        lines.write_text("".join(json.dumps(row) + "\n" for row in state["history"]), encoding="utf-8")
        lines.replace(self._file(HISTORY))

    def load_state(self) -> Optional[dict[str, Any]]:
        """What was saved last, on the CPU; None at the start."""
        path = self._file(STATE)
        if not path.exists():
            return None
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds over a damaged file
            raise UserError(
                f"{path}: damaged, or no state of a search ({type(error).__name__}); remove it to start anew"
            ) from error

    def result(self) -> Optional[dict[str, Any]]:
        """Of a finished search."""
        return read_json(self._file(RESULT)) if self._file(RESULT).exists() else None


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """In words; empty where there are none."""
    return "; ".join(
        f"{name} is {theirs.get(name)!r} there, {ours.get(name)!r} here"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    )
