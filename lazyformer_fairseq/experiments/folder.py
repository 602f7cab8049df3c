"""An experiment's folder: the results, and the settings, which are checked whenever the experiment resumes.

This module does not import torch, so commands that import it start quickly.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lazyformer_fairseq.storage.atomic import remove_leftovers
from lazyformer_fairseq.storage.json_files import read_checked_json, write_checked_json
from lazyformer_fairseq.storage.run_lock import keep_settings, run_lock

SETTINGS = "settings.json"
RESULTS = "results.json"


@contextmanager
def experiment(
    folder: Path,
    settings: Mapping[str, Any],
    of_what: str,
    begun: str,
    stale_files: Iterable[str] = (),
) -> Iterator[None]:
    """Create and lock an experiment's folder, and store the settings, which may change until work has begun.

    Args:
        folder: the experiment's folder.
        settings: everything that determines the results, including the data's checksums (:func:`hashes_as_settings`).
        of_what: the kind of experiment for error messages, such as "a comparison".
        begun: a glob pattern; work has begun once a file in the folder matches it.
        stale_files: names of files that depend on the settings and are removed when the settings change.

    Raises:
        UserError: the folder cannot be written, another process is using it, or work has begun with different settings.
            The message lists every setting that differs.
    """
    with run_lock(folder):
        remove_leftovers(folder, deep=True)
        made = [folder / name for name in stale_files]
        keep_settings(folder / SETTINGS, settings, of_what, any(folder.glob(begun)), made)
        yield


def hashes_as_settings(hashes: Mapping[str, str]) -> dict[str, str]:
    """Return the files' SHA-256 checksums as entries for an experiment's settings."""
    return {f"the SHA-256 of {name}": sha256 for name, sha256 in hashes.items()}


def load_or_create(path: Path, find: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the contents of a JSON file. If it does not exist, first create it from the result of `find`.

    Use this for values that must not change when an experiment resumes, such as measurements.

    Raises:
        UserError: the file has been damaged since it was written.
    """
    if not path.exists():
        write_checked_json(path, find())
    return read_checked_json(path)
