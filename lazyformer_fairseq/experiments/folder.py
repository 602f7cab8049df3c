"""The folder of an experiment: its settings, kept once and compared when it resumes, and its results.

Nothing here loads torch before it is asked for, so that commands may import it.
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
    made_by_them: Iterable[str] = (),
) -> Iterator[None]:
    """Make the folder, keep other processes out of it, and keep its settings, which may change until work has begun.

    Args:
        folder: the folder of the experiment.
        settings: all that decides the results, :func:`hashes_as_settings` of the data included.
        of_what: the experiment in words for an error, such as "a comparison".
        begun: a glob pattern; work has begun where a file of the folder matches it.
        made_by_them: names of files to remove where the settings change.

    Raises:
        UserError: the folder cannot be written, another process is at work in it, or work has begun with other
            settings; names each of these.
    """
    with run_lock(folder):
        remove_leftovers(folder, deep=True)
        made = [folder / name for name in made_by_them]
        keep_settings(folder / SETTINGS, settings, of_what, any(folder.glob(begun)), made)
        yield


def hashes_as_settings(hashes: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of files, by name, as settings that an experiment keeps."""
    return {f"the SHA-256 of {name}": sha256 for name, sha256 in hashes.items()}


def kept(path: Path, find: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of a JSON file; where there is none yet, what `find` returns, written there first.

    It keeps what must stay as it was first found, such as a measurement.

    Raises:
        UserError: the file was damaged since.
    """
    if not path.exists():
        write_checked_json(path, find())
    return read_checked_json(path)
