"""The work folder of an unfinished corpus: lets a stopped run resume, and its result appear whole."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.atomic import sync_content
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import differences, run_lock

PLAN = "plan.json"
MANIFEST = "manifest.json"
RESULT, PUBLISHED = "result", "published"


def finished_manifest(folder: Path, plan: dict[str, Any]) -> Optional[dict[str, Any]]:
    """The manifest of an existing corpus; None where ``folder`` does not exist, or is empty.

    Raises:
        UserError: ``folder`` holds something else, or a corpus of another ``plan``; names the difference.
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
    work = folder.absolute().with_name(f".{folder.absolute().name}.unfinished")
    if (work / PUBLISHED).exists() and not (work / RESULT).exists():
        shutil.rmtree(work)  # what publish() was stopped at
    with run_lock(work):
        if (work / PLAN).exists():
            _refuse_other_plan(read_json(work / PLAN), plan, work)
        else:
            write_json(work / PLAN, plan)
        yield work


def publish(work: Path, folder: Path) -> None:
    """Gives the folder ``result`` inside ``work`` the name ``folder``, and removes the rest of ``work``."""
    (work / PUBLISHED).touch()  # from now on a work folder without a result is rubbish, whole or not
    sync_content(work / RESULT)
    if folder.is_dir():
        folder.rmdir()  # an empty one, see finished_manifest
    os.replace(work / RESULT, folder)
    shutil.rmtree(work)


def _refuse_other_plan(there: dict[str, Any], plan: dict[str, Any], folder: Path) -> None:
    for group in ("settings", "versions"):
        begun_with = {name: there[group].get(name) for name in plan[group]}
        if differing := differences(begun_with, plan[group]):
            raise UserError(
                f"{folder} was begun with other {group} ({differing}); give the same, remove it, or choose another "
                "folder"
            )
    before = {(entry["path"], entry["format"]): entry["sha256"] for entry in there["inputs"]}
    now = {(entry["path"], entry["format"]): entry["sha256"] for entry in plan["inputs"]}
    if list(before.items()) != list(now.items()):
        changed = sorted({path for path, _ in set(before.items()) ^ set(now.items()) for path in path[:1]})
        raise UserError(
            f"{folder} was begun with other inputs ({changed[0] if changed else 'in another order'} differs); "
            "give the same, remove it, or choose another folder"
        )
