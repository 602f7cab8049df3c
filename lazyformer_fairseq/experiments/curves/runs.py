"""From what a user names to runs and their logs."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Union

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.curves.history import History
from lazyformer_fairseq.experiments.curves.phases import Phases, logs_of_phases, read_phases

LOGS = "*.log"
STAMP = re.compile(r"^\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
GENERIC = ("", "lazyformer", "lazyformer_lm")  # as a YAML file has it, which sets pattern and sizes one by one
STAMPED_WITHIN = 20  # lines; before them stands what a launcher prints


def logs_of_runs(given: Iterable[str]) -> dict[str, list[Path]]:
    """Logs by run, from words ``[NAME=]RUN``: a folder that holds ``*.log``, or a log; of one NAME they are one run.

    A folder that holds ``phase1``, ``phase2``, ... with logs is a run of these phases.
    A name that is not given is the folder's, or the file's without ``.log``, and stands in brackets.

    Raises:
        UserError: there is no such file, no log in the folder, or two runs of the same name.
    """
    runs: dict[str, list[Path]] = {}
    for word in given:
        name, equals, place = word.partition("=")
        if not equals or "/" in name:
            name, place = "", word
        path = Path(place)
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; give a folder of checkpoints, or a log")
        logs = (logs_of_phases(path) or list(path.glob(LOGS))) if path.is_dir() else [path]
        if not logs:
            raise UserError(
                f"{path}: holds no {LOGS}; our runs write train.log there. Where the output went to a file, give it"
            )
        chosen = name or path.absolute().stem
        if chosen in runs and not name:
            raise UserError(f"{word}: a run is called {chosen} already; give NAME={word}")
        runs.setdefault(chosen, []).extend(logs)
    return {name: sorted(logs, key=_begun) for name, logs in runs.items()}


def _begun(log: Path) -> tuple[str, str]:
    """When its first line was written; without times, logs follow each other by name."""
    with log.open(encoding="utf-8", errors="replace") as file:
        for _, line in zip(range(STAMPED_WITHIN), file, strict=False):
            if found := STAMP.match(line):
                return found[1], log.name
    return "", log.name


def histories(runs: Mapping[str, list[Path]]) -> tuple[dict[str, Union[History, Phases]], list[str]]:
    """The runs that were validated, by name, and a sentence for each that was not.

    Raises:
        UserError: none was, or losses of different kinds.
    """
    read = {name: read_phases(logs) for name, logs in runs.items()}
    silent = [
        f"{name}: no validation in {', '.join(map(str, runs[name]))}"
        + (f" after {history.last_update:,} updates" if history.last_update else ", and no update")
        for name, history in read.items()
        if not history.losses
    ]
    shown = {name: history for name, history in read.items() if history.losses}
    if not shown:
        raise UserError(
            f"nothing to draw: {'; '.join(silent)}. A run is validated when it saves (--save-interval-updates), "
            "every --validate-interval-updates, unless --disable-validation"
        )
    measures = {history.measure: name for name, history in shown.items()}
    if len(measures) > 1:
        what = "; ".join(f"{name}: {measure}" for measure, name in measures.items())
        raise UserError(f"these losses do not compare ({what}); draw one kind at a time")
    return shown, silent


def labels(shown: Mapping[str, Union[History, Phases]]) -> dict[str, str]:
    """What a picture calls each run: its arch where that tells it apart, else its name."""
    archs = [history.arch for history in shown.values()]
    return {
        name: history.arch if archs.count(history.arch) == 1 and history.arch not in GENERIC else name
        for name, history in shown.items()
    }
