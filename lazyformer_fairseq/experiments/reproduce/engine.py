"""Steps of a reproduction: a table, each row a command with what it makes, which the plan prints and the run goes down.

Each runs once, in a process of its own. A step that is done has a record; a stopped one goes on.

OUT/reproduction.json     what is reproduced
OUT/steps/NAME.json       record of a step: its command, when it ended, its seconds
"""

import fnmatch
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Optional

import click

from lazyformer_fairseq.child_process import run_to_its_end, stoppable
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.evaluation.costs.machine import describe_machine, describe_versions, device_named
from lazyformer_fairseq.experiments.curves.report import AXES, csv_rows, draw, histories, labels, logs_of_runs, table
from lazyformer_fairseq.report.tables import markdown_table, write_csv
from lazyformer_fairseq.storage.atomic import copy_file
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import keep_settings, run_lock

CLI = "lazyformer_fairseq.cli"
GB = 1e9


class Cost(NamedTuple):
    """Of a step; None for what cannot be told beforehand. Hours are those of all devices together, side by side."""

    hours: Optional[float] = None
    flops: Optional[float] = None
    gigabytes: Optional[float] = None


@dataclass(frozen=True)
class Step:
    """A row.

    Attributes:
        name: also of its record.
        what: in words.
        command: a module, which ``python -m`` runs, and its arguments. Run again after a stop, it goes on.
        makes: what is there when it is done.
        needs: names of steps.
        starts_anew: an unfinished `makes` must go first: the command would refuse it.
    """

    name: str
    what: str
    command: tuple[str, ...]
    makes: Path
    needs: tuple[str, ...] = ()
    starts_anew: bool = False


@dataclass(frozen=True)
class Reproduction:
    """Of a paper.

    Attributes:
        settings: what must stay the same when it is resumed.
        cost_of: arithmetic, before any step runs.
        rests_on: sentences that say what the costs rest on.
        write: the page of what is there; returns its path.
    """

    steps: Sequence[Step]
    settings: Mapping[str, Any]
    cost_of: Callable[[Step], Cost]
    rests_on: Sequence[str]
    write: Callable[[], Path]
    is_tiny: bool

    def carry_out(self, out: Path, only: Sequence[str], plan_alone: bool, report_alone: bool) -> None:
        """Runs the steps that these patterns name, all if none, then writes the page; or one of the two.

        Raises:
            UserError: a pattern names no step; or steps failed, with a sentence for each.
        """
        steps = chosen(self.steps, only)
        if plan_alone:
            return click.echo(plan(self, steps, out))
        failures: list[str] = []
        if not report_alone:
            with stoppable():
                failures = run_steps(steps, out, self.settings)
        if report_alone or len(failures) < len(steps):
            if not any(record_of(out, step) for step in self.steps):
                raise UserError(f"{out}: no step is done yet, so there is nothing to report")
            click.echo(f"written: {self.write()}")
        if failures:
            raise UserError("\n".join([*failures, "the same command tries again what is not done"]))
        return None


def chosen(steps: Sequence[Step], only: Sequence[str]) -> list[Step]:
    """Those that patterns such as ``bench_*`` name, and those that they need; in order. All where there is none.

    Raises:
        UserError: a pattern names no step.
    """
    names = [step.name for step in steps]
    wanted = {name for pattern in only or ["*"] for name in fnmatch.filter(names, pattern)}
    for pattern in only:
        if not fnmatch.filter(names, pattern):
            raise UserError(f"--steps {pattern}: no such step{nearest(pattern, names)}; --plan lists them all")
    for step in reversed(steps):
        wanted |= {*step.needs} if step.name in wanted else set()
    return [step for step in steps if step.name in wanted]


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
        KeyboardInterrupt: Ctrl-C or SIGTERM; the step under way has saved what it could.
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
    """Runs a step to its end, and records it. Returns its seconds.

    Raises:
        UserError: it failed, or has not made what it should.
        KeyboardInterrupt: after it has ended, where there was a signal.
    """
    if step.starts_anew and step.makes.parent.exists():
        shutil.rmtree(step.makes.parent)
    began = time.monotonic()
    ended = run_to_its_end([sys.executable, "-m", *step.command])
    if ended.signals:
        raise KeyboardInterrupt
    if ended.code:
        raise UserError(f"step {step.name} failed with exit code {ended.code}; look at what it printed")
    if not step.makes.exists():
        raise UserError(f"step {step.name} ended, but {step.makes} is not there; look at what it printed")
    seconds, now = time.monotonic() - began, datetime.now().isoformat(timespec="seconds")
    record = {"command": shlex.join(step.command), "ended": now, "seconds": seconds}
    write_json(out / "steps" / f"{step.name}.json", record)
    return seconds


def plan(reproduction: Reproduction, steps: Sequence[Step], out: Path) -> str:
    """A Markdown table of steps with their costs, sentences that say what it rests on, and the commands."""
    costs = {step.name: reproduction.cost_of(step) for step in steps}
    fine, coarse = ("{:,.2f}", "{:,.2f}") if reproduction.is_tiny else ("{:,.1f}", "{:,.0f}")
    forms = {"FLOPs": ("flops", "{:.1e}"), "hours": ("hours", fine), "disk, GB": ("gigabytes", coarse)}
    rows = []
    for step in steps:
        state = "done" if record_of(out, step) else "to do"
        numbers = {title: (getattr(costs[step.name], name), form) for title, (name, form) in forms.items()}
        told = {title: "-" if number is None else form.format(number) for title, (number, form) in numbers.items()}
        rows.append({"step": step.name, "what": step.what, "state": state, **told})
    left = [costs[step.name] for step in steps if not record_of(out, step)]
    hours, disk = (sum(getattr(cost, name) or 0 for cost in left) for name in ("hours", "gigabytes"))
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free / GB
    in_all = f"To do: some {hours:,.1f} hours and {disk:,.1f} GB; {free:,.1f} GB are free in {there}."
    commands = (f"{step.name}: python -m {shlex.join(step.command)}" for step in steps)
    said = [in_all + " THIS DOES NOT FIT." * (free < disk), *reproduction.rests_on, *commands]
    return "\n\n".join([markdown_table(rows, left=("what", "state")), *said])


# --- Of every page


def missing(step: str) -> str:
    return f"Not there yet: `{step}`."


def written_on() -> str:
    """A sentence on this machine and its versions."""
    facts = {**describe_machine(device_named("auto")), **describe_versions()}
    return f"Written on: {'; '.join(f'{name} {value}' for name, value in facts.items())}."


def losses_of(folders: Sequence[Path], report: Path, step: str) -> list[str]:
    """Blocks on the validation losses of trainings, with loss.png and loss.csv; what `step` lacks where none began."""
    try:
        shown, silent = histories(logs_of_runs([str(folder) for folder in folders if (folder / "train.log").exists()]))
    except UserError:
        return [missing(step)]
    names = labels(shown)
    draw(shown, names, [axis for axis in AXES if axis != "tokens"], report / "loss.png")  # all see the same
    write_csv(list(csv_rows(shown)), report / "loss.csv")
    return [table(shown, names), *silent, "![validation loss against updates, time and FLOPs](loss.png)"]


def copied(picture: Path, folder: Path, what: str) -> str:
    """Copies a picture that a step has made into the folder of the page; returns Markdown that shows it."""
    copy_file(picture, folder / picture.name)
    return f"![{what}]({picture.name})"


def what_it_took(steps: Sequence[Step], out: Path) -> str:
    """A table of all steps, with hours."""
    rows = []
    for step in steps:
        record = record_of(out, step)
        hours = f"{record['seconds'] / 3600:,.3f}" if record else "not done"
        rows.append({"step": step.name, "what": step.what, "hours of its last start": hours})
    return markdown_table(rows, left=("what",))
