"""A reproduction: a table of steps, each a command with what it makes, and a page about what they made.

Each step runs once, in a process of its own. A finished step has a record; a stopped one resumes.

OUT/reproduction.json     what is reproduced
OUT/steps/NAME.json       record of a step: its command, when it ended, its seconds
OUT/report/report.md      the page
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
from typing import Any, Optional

import click

from lazyformer_fairseq.child_process import run_to_its_end, stoppable
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.evaluation.costs.machine import describe_machine, describe_versions, device_named
from lazyformer_fairseq.evaluation.planning.job import job_of_launch
from lazyformer_fairseq.experiments.curves.report import AXES, draw, find_runs, read_histories, table
from lazyformer_fairseq.report.tables import markdown_table
from lazyformer_fairseq.storage.atomic import copy_file, write_text
from lazyformer_fairseq.storage.json_files import read_json, write_json
from lazyformer_fairseq.storage.run_lock import keep_settings, run_lock
from lazyformer_fairseq.training.run_record import RUN

CLI = "lazyformer_fairseq.cli"
PYTHONS_PROSE = "demo"
GB = 1e9
BYTES_PER_PARAMETER = 16  # in a checkpoint, all in 32 bits: weights, the optimizer's copy, two moments


def our_command(*words: Any, **options: Any) -> tuple[str, ...]:
    """Return a command of `lazyformer` for a step: its words, then options by name, dashes written as underscores."""
    command = [CLI, *map(str, words)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(command)


@dataclass(frozen=True)
class Step:
    """A row of the table.

    Attributes:
        name: also of its record.
        what: a description for the reader.
        command: a module, which ``python -m`` runs, and its arguments. Run again after a stop, it resumes.
        makes: the file or folder that is there when the step is done.
        needs: names of other steps.
        checkpoints: number of checkpoints that a training keeps, for the plan.
        starts_anew: an unfinished `makes` is removed first, because the command would refuse it.
    """

    name: str
    what: str
    command: tuple[str, ...]
    makes: Path
    needs: tuple[str, ...] = ()
    checkpoints: int = 0
    starts_anew: bool = False

    def record(self, out: Path) -> Optional[dict[str, Any]]:
        """Return the record of a step that is done and whose result is still there."""
        path = out / "steps" / f"{self.name}.json"
        if path.exists() and self.makes.exists():
            return read_json(path)
        return None


WriteSection = Callable[[Path], str]  # from what is there; pictures go into the folder that it is given


@dataclass(frozen=True)
class Reproduction:
    """A paper to reproduce.

    Attributes:
        paper: its name.
        settings: values that must stay the same when the reproduction resumes.
        steps: the steps, in the order in which they run.
        sections: functions that write the sections of the page, by title.
        introduction: the introduction of the page.
        note: a sentence for the plan.
        flops_per_second: speed that the plan assumes for one device.
        is_tiny: whether it is the miniature.
    """

    paper: str
    settings: Mapping[str, Any]
    steps: Sequence[Step]
    sections: Mapping[str, WriteSection]
    introduction: str
    note: str
    flops_per_second: float
    is_tiny: bool

    def chosen(self, patterns: Sequence[str]) -> list[Step]:
        """Return the steps that patterns such as ``bench_*`` name, and those that they need; all without patterns.

        Raises:
            UserError: a pattern names no step.
        """
        names = [step.name for step in self.steps]
        wanted: set[str] = set()
        for pattern in patterns or ["*"]:
            matching = fnmatch.filter(names, pattern)
            if not matching:
                raise UserError(f"--steps {pattern}: no such step{nearest(pattern, names)}; --plan lists them all")
            wanted.update(matching)
        for step in reversed(self.steps):
            if step.name in wanted:
                wanted.update(step.needs)
        return [step for step in self.steps if step.name in wanted]

    def carry_out(self, out: Path, patterns: Sequence[str]) -> None:
        """Run the steps that these patterns name, then write the page.

        Raises:
            UserError: a pattern names no step, or steps failed, with a sentence for each.
        """
        steps = self.chosen(patterns)
        with stoppable():
            failures = run_steps(steps, out, self.settings)
        if len(failures) < len(steps):
            self.report(out)
        if failures:
            raise UserError("\n".join([*failures, "the same command tries again what is not done"]))

    def report(self, out: Path) -> None:
        """Write the page of what is there.

        Raises:
            UserError: no step is done yet.
        """
        if not any(step.record(out) for step in self.steps):
            raise UserError(f"{out}: no step is done yet, so there is nothing to report")
        folder = out / "report"
        facts = {**describe_machine(device_named("auto")), **describe_versions()}
        written_on = "; ".join(f"{name} {value}" for name, value in facts.items())
        title = f"# {self.paper}, reproduced"
        if self.is_tiny:
            title += " in miniature"
        blocks = [title, f"{self.introduction} Written on: {written_on}."]
        for title, write in self.sections.items():
            blocks += [f"## {title}", write(folder)]
        blocks += ["## What it took", self._what_it_took(out)]
        write_text(folder / "report.md", "\n\n".join(blocks) + "\n")
        click.echo(f"written: {folder / 'report.md'}")

    def _what_it_took(self, out: Path) -> str:
        rows = []
        for step in self.steps:
            record = step.record(out)
            if record:
                hours = f"{record['seconds'] / 3600:,.3f}"
            else:
                hours = "not done"
            rows.append({"step": step.name, "what": step.what, "hours of its last start": hours})
        return markdown_table(rows, left=("what",))

    def plan(self, out: Path, patterns: Sequence[str], speed: float) -> str:
        """Return a Markdown table of the steps with the costs of trainings, by arithmetic, and the commands.

        Args:
            out: folder of the reproduction.
            patterns: patterns of names of steps.
            speed: FLOP/s of training that all devices reach together.
        """
        steps = self.chosen(patterns)
        rows = []
        hours_left = 0.0
        gigabytes_left = 0.0
        for step in steps:
            row = {"step": step.name, "what": step.what, "state": "to do"}
            row |= {"FLOPs": "-", "hours": "-", "disk, GB": "-"}
            if step.command[1] == "pretrain":
                job = job_of_launch(step.command[2], None, step.command[3], step.command[4:])
                hours = job.flops / speed / 3600
                gigabytes = step.checkpoints * BYTES_PER_PARAMETER * job.parameters / GB
                row |= {"FLOPs": f"{job.flops:.1e}", "hours": f"{hours:,.2f}", "disk, GB": f"{gigabytes:,.2f}"}
                if not step.record(out):
                    hours_left += hours
                    gigabytes_left += gigabytes
            if step.record(out):
                row["state"] = "done"
            rows.append(row)
        existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free / GB
        to_do = (
            f"Trainings to do: {hours_left:,.1f} hours and {gigabytes_left:,.1f} GB of checkpoints; {free:,.1f} GB are "
            f"free in {existing}."
        )
        if free < gigabytes_left:
            to_do += " THIS DOES NOT FIT."
        assumptions = (
            f"Hours are by arithmetic: {speed / 1e12:g} TFLOP/s of training (--teraflops), with a backward pass of two "
            f"forward passes. Checkpoints take {BYTES_PER_PARAMETER} bytes per parameter. Other steps are not counted."
        )
        commands = [f"{step.name}: python -m {shlex.join(step.command)}" for step in steps]
        parts = [markdown_table(rows, left=("what", "state")), to_do, assumptions, self.note, *commands]
        return "\n\n".join(part for part in parts if part)


def run_steps(steps: Sequence[Step], out: Path, settings: Mapping[str, Any]) -> list[str]:
    """Run what is not done yet. Where a step fails, those that need it are left out, and the others go on.

    Returns:
        a sentence for each step that failed or was left out.

    Raises:
        UserError: OUT holds another reproduction, or another process is at work in it.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the running step has saved what it could.
    """
    failures: dict[str, str] = {}
    with run_lock(out):
        has_begun = (out / "steps").exists()
        keep_settings(out / "reproduction.json", settings, "a reproduction", has_begun)
        for number, step in enumerate(steps, 1):
            title = f"[{number}/{len(steps)}] {step.name}"
            missing = [name for name in step.needs if name in failures]
            if step.record(out):
                click.echo(f"{title}: done already")
            elif missing:
                failures[step.name] = f"step {step.name} was left out: it needs {', '.join(missing)}"
            else:
                click.echo(f"{title}: {step.what}")
                try:
                    seconds = run_step(step, out)
                    click.echo(f"{title}: done in {seconds / 60:.1f} minutes")
                except UserError as error:
                    failures[step.name] = str(error)
                    click.echo(f"{title}: failed", err=True)
    return list(failures.values())


def run_step(step: Step, out: Path) -> float:
    """Run a step to its end, and record it.

    Returns:
        its seconds.

    Raises:
        UserError: it failed, or has not made what it should.
        KeyboardInterrupt: there was a signal; the step has ended.
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
    seconds = time.monotonic() - began
    record = {
        "command": shlex.join(step.command),
        "ended": datetime.now().isoformat(timespec="seconds"),
        "seconds": seconds,
    }
    write_json(out / "steps" / f"{step.name}.json", record)
    return seconds


# --- For the sections of every page


def missing(steps: str) -> str:
    """Return the sentence that stands where the results of these steps are not there yet."""
    return f"Not there yet: `{steps}`."


def show_losses(folders: Sequence[Path], report: Path, steps: str) -> str:
    """Return a table of validation losses with their picture, and write loss.png.

    Args:
        folders: folders of trainings, which may not have begun.
        report: the page's folder.
        steps: to name where nothing was measured yet.
    """
    begun = [str(folder) for folder in folders if (folder / RUN).exists()]
    try:
        shown, silent = read_histories(find_runs(begun))
    except UserError:
        return missing(steps)
    axes = [axis for axis in AXES if axis != "tokens"]  # all models read the same tokens in an update
    draw(shown, axes, report / "loss.png")
    picture = "![validation loss against updates, time and FLOPs](loss.png)"
    return "\n\n".join([table(shown), *silent, picture])


def show_picture(picture: Path, report: Path, what: str) -> str:
    """Copy a picture that a step has made into the page's folder; return the Markdown that shows it."""
    copy_file(picture, report / picture.name)
    return f"![{what}]({picture.name})"
