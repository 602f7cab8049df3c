"""Runs the steps, each once, in a process of its own. A step that is done has a record; a stopped one goes on.

OUT/reproduction.json     what is reproduced
OUT/steps/NAME.json       record of a step: its command, when it ended, its seconds
OUT/logs/NAME.log         output of a pre-training
"""

import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

import click
from tqdm import tqdm

from lazyformer_fairseq.child_process import run_to_its_end
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.reproduce.steps import Step
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import keep_settings, run_lock

TAIL = 20_000  # bytes of a log
UPDATES = re.compile(rb"num_updates[= ](\d+)")
STOPPED = 130


class Stopped(Exception):
    """A signal ended the run."""


def record_of(out: Path, step: Step) -> Optional[dict[str, Any]]:
    """The record of a step that is done and whose result is still there."""
    path = out / "steps" / f"{step.name}.json"
    return read_json(path) if path.exists() and step.makes.exists() else None


def run_steps(steps: Sequence[Step], out: Path, settings: Mapping[str, Any]) -> list[str]:
    """Runs what is not done yet. Where a step fails, those that need it are left out, and the others go on.

    Returns:
        a sentence for each step that failed or was left out.

    Raises:
        UserError: OUT holds another reproduction, or another process is at work in it.
        Stopped: Ctrl-C or SIGTERM; the step under way has saved what it could.
    """
    failures: dict[str, str] = {}
    with run_lock(out):
        begun = (out / "steps").exists()
        keep_settings(out / "reproduction.json", settings, "a reproduction", begun)
        for number, step in enumerate(steps, 1):
            before = f"[{number}/{len(steps)}] {step.name}"
            if record_of(out, step):
                click.echo(f"{before}: done already")
                continue
            if lacking := [name for name in step.needs if name in failures]:
                failures[step.name] = f"step {step.name} was left out: it needs {', '.join(lacking)}"
                continue
            click.echo(f"{before}: {step.what}")
            try:
                seconds = run_step(step, out)
                click.echo(f"{before}: done in {seconds / 60:.1f} minutes")
            except UserError as error:
                failures[step.name] = str(error)
                click.echo(f"{before}: failed", err=True)
    return list(failures.values())


def run_step(step: Step, out: Path) -> float:
    """Runs a step to its end, and records it. Returns its seconds. Raises a UserError where it fails."""
    log = out / "logs" / f"{step.name}.log"
    if step.starts_anew and step.makes.parent.exists():
        shutil.rmtree(step.makes.parent)
    began = time.monotonic()
    command = [sys.executable, "-m", *step.command]
    if step.updates:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            code = _run(command, output, lambda: _watch(log, step))
    else:
        code = _run(command)
    _refuse_failure(step, code, log)
    seconds = time.monotonic() - began
    ended = datetime.now().isoformat(timespec="seconds")
    write_json(
        out / "steps" / f"{step.name}.json", {"command": shlex.join(step.command), "ended": ended, "seconds": seconds}
    )
    return seconds


def _refuse_failure(step: Step, code: int, log: Path) -> None:
    """Raises a UserError unless the step ended well, and made what it should."""
    if code:
        told = f"; the end of {log}:\n{_tail(log).decode(errors='replace')[-1500:].strip()}" if step.updates else ""
        raise UserError(f"step {step.name} failed with exit code {code}{told}")
    if not step.makes.exists():
        raise UserError(f"step {step.name} ended, but {step.makes} is not there; look at what it printed")


def _run(command: list[str], *output_and_watch: Any) -> int:
    """Exit code of a process, as :func:`.child_process.run_to_its_end` runs it.

    Raises:
        Stopped: after the process has ended, where there was a signal.
    """
    ended = run_to_its_end(command, *output_and_watch)
    if ended.was_stopped:
        raise Stopped
    return ended.code


def _watch(log: Path, step: Step) -> Iterator[None]:
    """A bar of a training's updates, as its log tells them; moves on with each value taken."""
    often = 0.5 if sys.stderr.isatty() else 60.0  # seconds
    while (made := _updates_in(log)) is None:
        yield
    # From there on: the time left is that of this process's pace, whatever an earlier one had made.
    with tqdm(total=step.updates, initial=made, desc=step.name, unit=" updates", mininterval=often) as bar:
        while True:
            yield
            bar.update((_updates_in(log) or bar.n) - bar.n)


def _updates_in(log: Path) -> Optional[int]:
    found = UPDATES.findall(_tail(log))
    return int(found[-1]) if found else None


def _tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        return file.read()
