"""The folder of an experiment: settings, which are kept once and compared when it resumes, and what is found in it.

Nothing here loads torch before it is asked for, so that commands may import it.
"""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import keep_settings, run_lock

SETTINGS, RESULTS = "settings.json", "results.json"
STOPPED = 130  # exit code, as a shell has it of a command that Ctrl-C ended


@contextmanager
def experiment(
    folder: Path, settings: Any, of_what: str, begun: str, made_by_them: Iterable[str] = ()
) -> Iterator[None]:
    """Makes the folder, keeps other processes out of it, and its settings in it, which may change until work has begun.

    Args:
        settings: a dataclass of all that decides the results.
        of_what: "a comparison", say, for the error.
        begun: a glob pattern; work has begun where something in the folder answers to it.
        made_by_them: names of files to remove where the settings change.

    Raises:
        UserError: the folder cannot be written, another process is at work in it, or work has begun with other
            settings; names each of these.
    """
    with run_lock(folder):
        made = [folder / name for name in made_by_them]
        keep_settings(folder / SETTINGS, asdict(settings), of_what, any(folder.glob(begun)), made)
        yield


def kept(path: Path, find: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What the JSON file holds; where there is none yet, what `find` returns, written there first.

    For what must stay as it was first found, such as a measurement.
    """
    if not path.exists():
        write_json(path, find())
    return read_json(path)


def record(settings: Any, command: Sequence[str], device: str) -> dict[str, Any]:
    """What the results of every experiment begin with: `command`, `machine`, `versions`, `settings`."""
    from lazyformer_fairseq.measure.costs.machine import describe_machine, describe_versions

    return {
        "command": " ".join(command),
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "settings": asdict(settings),
    }


@contextmanager
def stoppable() -> Iterator[None]:
    """The work of a command that resumes: Ctrl-C and SIGTERM end the process in words, with exit code 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        yield
    except KeyboardInterrupt:
        click.echo("stopped; rerun to resume", err=True)
        sys.exit(STOPPED)
