"""The folder of a corpus in the making: what makes a run that was stopped go on, and its result appear whole."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.files.whole import rewritten_file

PLAN = "plan.json"
MANIFEST = "manifest.json"
RESULT, PUBLISHED = "result", "published"


def finished_manifest(folder: Path, plan: dict[str, Any]) -> Optional[dict[str, Any]]:
    """The manifest of a corpus that is there already; None where ``folder`` is not there, or empty.

    Raises:
        UserError: ``folder`` holds something else, or a corpus of another ``plan``; the difference is named.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        _refuse_other_plan({name: manifest[name] for name in plan}, plan, folder)
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{folder}: exists already; remove it or choose another folder") from None
    return manifest


@contextmanager
def work_folder(folder: Path, plan: dict[str, Any]) -> Iterator[Path]:
    """Yields the folder ``.NAME.unfinished`` beside ``folder``, as the last run of the same plan left it.

    Raises:
        UserError: it cannot be made, another run is at work in it, or it was begun with another ``plan``.
    """
    work = work_of(folder)
    if (work / PUBLISHED).exists() and not (work / RESULT).exists():
        shutil.rmtree(work)  # what publish() was stopped at
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("w")
    except OSError as error:
        raise UserError(f"{work}: cannot be written ({error.strerror}); choose another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{work}: another run is at work there; wait for it or choose another folder") from None
        if (work / PLAN).exists():
            _refuse_other_plan(json.loads((work / PLAN).read_text(encoding="utf-8")), plan, work)
        else:
            write_json(work / PLAN, plan)
        yield work


def work_of(folder: Path) -> Path:
    """``.NAME.unfinished`` beside ``folder``."""
    return folder.absolute().with_name(f".{folder.absolute().name}.unfinished")


def publish(work: Path, folder: Path) -> None:
    """Gives the folder ``result`` inside ``work`` the name ``folder``, and removes the rest of ``work``."""
    (work / PUBLISHED).touch()  # from now on a work folder without a result is rubbish, whole or not
    if folder.is_dir():
        folder.rmdir()  # an empty one, see finished_manifest
    os.replace(work / RESULT, folder)
    shutil.rmtree(work)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole or not at all."""
    with rewritten_file(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _refuse_other_plan(there: dict[str, Any], plan: dict[str, Any], folder: Path) -> None:
    for group in ("settings", "versions"):
        for name, value in plan[group].items():
            if there[group].get(name) != value:
                raise UserError(
                    f"{folder} was begun with {name} = {there[group].get(name)!r}, not {value!r}; "
                    "give the same, remove it, or choose another folder"
                )
    before = {(entry["path"], entry["format"]): entry["sha256"] for entry in there["inputs"]}
    now = {(entry["path"], entry["format"]): entry["sha256"] for entry in plan["inputs"]}
    if list(before.items()) != list(now.items()):
        changed = sorted({path for path, _ in set(before.items()) ^ set(now.items()) for path in path[:1]})
        raise UserError(
            f"{folder} was begun with other inputs ({changed[0] if changed else 'in another order'} differs); "
            "give the same, remove it, or choose another folder"
        )
