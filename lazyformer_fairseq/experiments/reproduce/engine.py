"""The engine of reproductions: a table of steps, which are commands with their results, and a page about these results.

Each step runs once, in a process of its own. A finished step has a record; a step that was stopped resumes.

OUT/reproduction.json     the settings of the reproduction
OUT/steps/NAME.json       the record of a step: its command, its duration in seconds, and when it ended
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
BYTES_PER_PARAMETER = 16  # in a checkpoint: the weights, the optimizer's copy and two moments, in 32 bits each


def our_command(*words: Any, **options: Any) -> tuple[str, ...]:
    """Return a `lazyformer` command for a step.

    Args:
        words: the words after `lazyformer`.
        options: the options by name, with underscores for dashes.
    """
    command = [CLI, *map(str, words)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(command)


@dataclass(frozen=True)
class Step:
    """A step of a reproduction.

    Attributes:
        name: the name of the step and of its record.
        what: a description for the user.
        command: a module for ``python -m`` and its arguments. If it is run again after a stop, it resumes.
        makes: the file or folder that exists when the step is done.
        needs: the names of the steps whose results it needs.
        checkpoints: the number of checkpoints that a training keeps, for the plan.
        starts_anew: whether the folder of an unfinished result is removed first, because the command would reject it.
    """

    name: str
    what: str
    command: tuple[str, ...]
    makes: Path
    needs: tuple[str, ...] = ()
    checkpoints: int = 0
    starts_anew: bool = False

    def record(self, out: Path) -> Optional[dict[str, Any]]:
        """Return the record of the step if it is done and its result still exists, else None."""
        path = out / "steps" / f"{self.name}.json"
        if path.exists() and self.makes.exists():
            return read_json(path)
        return None


WriteSection = Callable[[Path], str]  # takes the folder for pictures and returns the text of the section


@dataclass(frozen=True)
class Reproduction:
    """The reproduction of a paper.

    Attributes:
        paper: the name of the paper.
        settings: the values that must stay the same when the reproduction resumes.
        steps: the steps, in the order in which they run.
        sections: the functions that write the sections of the page, by title.
        introduction: the introduction of the page.
        note: a sentence for the plan.
        flops_per_second: the training speed of one device that the plan assumes, in FLOP/s.
        is_tiny: whether this is the miniature.
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
        """Return the steps whose names match patterns such as ``bench_*``, and those that they need.

        Without patterns, these are all steps.

        Raises:
            UserError: a pattern matches no step.
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
        """Run the steps whose names match the patterns, then write the page.

        Raises:
            UserError: a pattern matches no step, or steps failed. The message has a sentence for each failed step.
        """
        steps = self.chosen(patterns)
        with stoppable():
            failures = run_steps(steps, out, self.settings)
        if len(failures) < len(steps):
            self.report(out)
        if failures:
            raise UserError("\n".join([*failures, "run the same command again to retry the steps that are not done"]))

    def report(self, out: Path) -> None:
        """Write the page about the results so far.

        Raises:
            UserError: no step is done yet.
        """
        if not any(step.record(out) for step in self.steps):
            raise UserError(f"{out}: no step is done yet, so there is nothing to report; run some steps first")
        folder = out / "report"
        facts = {**describe_machine(device_named("auto")), **describe_versions()}
        written_on = "; ".join(f"{name} {value}" for name, value in facts.items())
        title = f"# {self.paper}, reproduced"
        if self.is_tiny:
            title += " in miniature"
        blocks = [title, f"{self.introduction} Written on: {written_on}."]
        for title, write in self.sections.items():
            blocks += [f"## {title}", write(folder)]
        blocks += ["## Duration of the steps", self._what_it_took(out)]
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
            rows.append({"step": step.name, "what": step.what, "hours of the last run": hours})
        return markdown_table(rows, left=("what",))

    def plan(self, out: Path, patterns: Sequence[str], speed: float) -> str:
        """Return a Markdown table of the steps with the estimated costs of trainings, followed by the commands.

        Args:
            out: the folder of the reproduction.
            patterns: patterns of the names of steps.
            speed: the training speed of all devices together, in FLOP/s.
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
            f"The remaining trainings take {hours_left:,.1f} hours and {gigabytes_left:,.1f} GB of checkpoints; "
            f"{free:,.1f} GB are free in {existing}."
        )
        if free < gigabytes_left:
            to_do += " THIS DOES NOT FIT."
        assumptions = (
            f"The hours are computed for a training speed of {speed / 1e12:g} TFLOP/s (--teraflops), with a backward "
            f"pass as expensive as two forward passes. Checkpoints take {BYTES_PER_PARAMETER} bytes per parameter. "
            "Other steps are not counted."
        )
        commands = [f"{step.name}: python -m {shlex.join(step.command)}" for step in steps]
        parts = [markdown_table(rows, left=("what", "state")), to_do, assumptions, self.note, *commands]
        return "\n\n".join(part for part in parts if part)


def run_steps(steps: Sequence[Step], out: Path, settings: Mapping[str, Any]) -> list[str]:
    """Run the steps that are not done yet.

    If a step fails, those that need it are skipped, and the others still run.

    Args:
        steps: the steps, in the order in which they run.
        out: the folder of the reproduction.
        settings: the values that must stay the same when the reproduction resumes.

    Returns:
        A sentence for each step that failed or was skipped.

    Raises:
        UserError: `out` holds another reproduction, or another process is using it.
        KeyboardInterrupt: there was a Ctrl-C or a SIGTERM; the running step has saved what it could.
    """
    failures: dict[str, str] = {}
    with run_lock(out):
        has_begun = (out / "steps").exists()
        keep_settings(out / "reproduction.json", settings, "a reproduction", has_begun)
        for number, step in enumerate(steps, 1):
            title = f"[{number}/{len(steps)}] {step.name}"
            missing = [name for name in step.needs if name in failures]
            if step.record(out):
                click.echo(f"{title}: already done")
            elif missing:
                failures[step.name] = f"step {step.name} was skipped, because it needs {', '.join(missing)}"
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
    """Run a step to its end, and write its record.

    Returns:
        The duration of the step in seconds.

    Raises:
        UserError: the step failed, or its result is missing.
        KeyboardInterrupt: there was a signal; the step has ended.
    """
    if step.starts_anew and step.makes.parent.exists():
        shutil.rmtree(step.makes.parent)
    began = time.monotonic()
    ended = run_to_its_end([sys.executable, "-m", *step.command])
    if ended.signals:
        raise KeyboardInterrupt
    if ended.code:
        raise UserError(f"step {step.name} failed with exit code {ended.code}; see its output for the reason")
    if not step.makes.exists():
        raise UserError(f"step {step.name} ended, but {step.makes} does not exist; see its output for the reason")
    seconds = time.monotonic() - began
    record = {
        "command": shlex.join(step.command),
        "ended": datetime.now().isoformat(timespec="seconds"),
        "seconds": seconds,
    }
    write_json(out / "steps" / f"{step.name}.json", record)
    return seconds


# --- Parts that the sections of all pages use


def missing(steps: str) -> str:
    """Return the sentence that replaces results of steps that are not done yet."""
    return f"No results yet from `{steps}`."


def show_losses(folders: Sequence[Path], report: Path, steps: str) -> str:
    """Write the picture loss.png, and return it in Markdown with a table of validation losses.

    Args:
        folders: the folders of trainings, which need not have begun.
        report: the folder of the page.
        steps: the name of the steps to mention if nothing has been measured yet.
    """
    begun = [str(folder) for folder in folders if (folder / RUN).exists()]
    try:
        shown, silent = read_histories(find_runs(begun))
    except UserError:
        return missing(steps)
    axes = [axis for axis in AXES if axis != "tokens"]  # redundant, as all models read the same tokens in an update
    draw(shown, axes, report / "loss.png")
    picture = "![validation loss against updates, time and FLOPs](loss.png)"
    return "\n\n".join([table(shown), *silent, picture])


def show_picture(picture: Path, report: Path, what: str) -> str:
    """Copy the picture of a step to the folder of the page, and return the Markdown that shows it.

    Args:
        picture: the file of the picture.
        report: the folder of the page.
        what: the alternative text of the picture.
    """
    copy_file(picture, report / picture.name)
    return f"![{what}]({picture.name})"
