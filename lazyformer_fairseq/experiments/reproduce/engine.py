"""The engine behind reproductions, which runs a paper's steps and writes a report on their results.

Each step is a command that produces a file or a folder. It runs once, in a separate process. A finished step has a
record; a step that was stopped resumes.

OUT/reproduction.json     the reproduction's settings
OUT/steps/NAME.json       a step's record: its command, its duration in seconds, and when it ended
OUT/report/report.md      the report
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

from lazyformer_fairseq.child_process import exit_on_interrupt, run_forwarding_signals
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
BYTES_PER_PARAMETER = 16  # in a checkpoint: the weights, the optimizer's copy and its two moments, 32 bits each


def our_command(*words: Any, **options: Any) -> tuple[str, ...]:
    """Build a `lazyformer` command for a step.

    Args:
        words: the words after `lazyformer`.
        options: the options by name, with underscores instead of dashes.
    """
    command = [CLI, *map(str, words)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(command)


@dataclass(frozen=True)
class Step:
    """A step of a reproduction.

    Attributes:
        name: the name of the step and its record.
        what: a description for the user.
        command: a module for ``python -m`` and its arguments. The command resumes if it is rerun after a stop.
        output: the file or folder that exists once the step is done.
        needs: the names of the steps that this one depends on.
        checkpoints: the number of checkpoints that a training run keeps, for the plan.
        removes_partial_output: whether an unfinished result is removed first, because the command would reject it.
    """

    name: str
    what: str
    command: tuple[str, ...]
    output: Path
    needs: tuple[str, ...] = ()
    checkpoints: int = 0
    removes_partial_output: bool = False

    def record(self, out: Path) -> Optional[dict[str, Any]]:
        """Return the step's record if the step is done and its result still exists, otherwise None."""
        path = out / "steps" / f"{self.name}.json"
        if path.exists() and self.output.exists():
            return read_json(path)
        return None


WriteSection = Callable[[Path], str]  # takes the folder for pictures and returns the section's text


@dataclass(frozen=True)
class Reproduction:
    """The reproduction of a paper.

    Attributes:
        paper: the paper's name.
        settings: the values that must stay the same when the reproduction resumes.
        steps: the steps in execution order.
        sections: the functions that write the report's sections, by title.
        introduction: the report's introduction.
        note: a sentence for the plan.
        flops_per_second: the training speed per device that the plan assumes, in FLOP/s.
        is_tiny: whether this is the miniature version.
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
        """Return the steps that match patterns such as ``bench_*``, and the steps they depend on.

        Without patterns, all steps are returned.

        Raises:
            UserError: a pattern matches no step.
        """
        names = [step.name for step in self.steps]
        wanted: set[str] = set()
        for pattern in patterns or ["*"]:
            matching = fnmatch.filter(names, pattern)
            if not matching:
                raise UserError(f"--steps {pattern}: no such step{nearest(pattern, names)}; --plan lists all steps")
            wanted.update(matching)
        for step in reversed(self.steps):
            if step.name in wanted:
                wanted.update(step.needs)
        return [step for step in self.steps if step.name in wanted]

    def carry_out(self, out: Path, patterns: Sequence[str]) -> None:
        """Run the steps that match the patterns, then write the report.

        Raises:
            UserError: a pattern matches no step, or steps failed. The message has a sentence about each failed step.
        """
        steps = self.chosen(patterns)
        with exit_on_interrupt():
            failures = run_steps(steps, out, self.settings)
        if len(failures) < len(steps):
            self.report(out)
        if failures:
            raise UserError("\n".join([*failures, "run the same command again to retry the unfinished steps"]))

    def report(self, out: Path) -> None:
        """Write the report on the results so far.

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
        blocks += ["## Step durations", self._what_it_took(out)]
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
            rows.append({"step": step.name, "what": step.what, "hours (last run)": hours})
        return markdown_table(rows, left=("what",))

    def plan(self, out: Path, patterns: Sequence[str], speed: float) -> str:
        """Return a Markdown table of the steps with the estimated training costs, followed by the commands.

        Args:
            out: the reproduction's folder.
            patterns: patterns for step names.
            speed: the total training speed of all devices, in FLOP/s.
        """
        steps = self.chosen(patterns)
        rows = []
        hours_left = 0.0
        gigabytes_left = 0.0
        for step in steps:
            row = {"step": step.name, "what": step.what, "state": "to do"}
            row |= {"FLOPs": "-", "hours": "-", "disk, GB": "-"}
            if step.command[1] == "pretrain":
                _, _, arch, data, *options = step.command
                job = job_of_launch(arch, config=None, data=data, given=options)
                hours = job.flops / speed / 3600
                gigabytes = step.checkpoints * BYTES_PER_PARAMETER * job.parameters / GB
                row |= {"FLOPs": f"{job.flops:.1e}", "hours": f"{hours:,.2f}", "disk, GB": f"{gigabytes:,.2f}"}
                if not step.record(out):
                    hours_left += hours
                    gigabytes_left += gigabytes
            if step.record(out):
                row["state"] = "done"
            rows.append(row)

        absolute = out.absolute()
        existing = next(folder for folder in (absolute, *absolute.parents) if folder.exists())
        free = shutil.disk_usage(existing).free / GB
        to_do = (
            f"The remaining training runs take {hours_left:,.1f} hours, and their checkpoints take "
            f"{gigabytes_left:,.1f} GB; {free:,.1f} GB are free in {existing}."
        )
        if free < gigabytes_left:
            to_do += " THIS DOES NOT FIT."

        assumptions = (
            f"Hours assume a training speed of {speed / 1e12:g} TFLOP/s (--teraflops) and a backward pass that costs "
            f"as much as two forward passes. Checkpoints take {BYTES_PER_PARAMETER} bytes per parameter. These "
            "estimates include only training runs."
        )
        commands = [f"{step.name}: python -m {shlex.join(step.command)}" for step in steps]
        parts = [markdown_table(rows, left=("what", "state")), to_do, assumptions, self.note, *commands]
        return "\n\n".join(part for part in parts if part)


def run_steps(steps: Sequence[Step], out: Path, settings: Mapping[str, Any]) -> list[str]:
    """Run the steps that are not done yet.

    If a step fails, the steps that depend on it are skipped, and the others still run.

    Args:
        steps: the steps in execution order.
        out: the reproduction's folder.
        settings: the values that must stay the same when the reproduction resumes.

    Returns:
        A sentence about each step that failed or was skipped.

    Raises:
        UserError: `out` contains a different reproduction, or another process is using it.
        KeyboardInterrupt: on Ctrl-C or SIGTERM, after the running step has saved what it could.
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
                failures[step.name] = f"step {step.name} was skipped because it depends on {', '.join(missing)}"
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
    """Run a step to completion and write its record.

    Returns:
        The step's duration in seconds.

    Raises:
        UserError: the step failed, or its result is missing.
        KeyboardInterrupt: on a signal, after the step has ended.
    """
    if step.removes_partial_output and step.output.parent.exists():
        shutil.rmtree(step.output.parent)
    began = time.monotonic()
    ended = run_forwarding_signals([sys.executable, "-m", *step.command])
    if ended.signals:
        raise KeyboardInterrupt
    if ended.code:
        raise UserError(
            f"step {step.name} failed with exit code {ended.code}; see its log messages above for the reason"
        )
    if not step.output.exists():
        raise UserError(
            f"step {step.name} finished without creating {step.output}; see its log messages above for the reason"
        )
    seconds = time.monotonic() - began
    record = {
        "command": shlex.join(step.command),
        "ended": datetime.now().isoformat(timespec="seconds"),
        "seconds": seconds,
    }
    write_json(out / "steps" / f"{step.name}.json", record)
    return seconds


# --- Functions shared by the sections of all reports


def missing(steps: str) -> str:
    """Return the sentence that stands in for the results of unfinished steps."""
    return f"No results yet from `{steps}`."


def show_losses(folders: Sequence[Path], report: Path, steps: str) -> str:
    """Write loss.png, and return Markdown with a table of validation losses and the picture.

    Args:
        folders: the folders of runs, which may not have started yet.
        report: the report's folder.
        steps: the steps' name, which is mentioned if there are no measurements yet.
    """
    begun = [str(folder) for folder in folders if (folder / RUN).exists()]
    try:
        shown, silent = read_histories(find_runs(begun))
    except UserError:
        return missing(steps)
    # A panel against tokens would be redundant, because all models read the same number of tokens per update.
    axes = [axis for axis in AXES if axis != "tokens"]
    draw(shown, axes, report / "loss.png")
    picture = "![validation loss against updates, time and FLOPs](loss.png)"
    return "\n\n".join([table(shown), *silent, picture])


def show_picture(picture: Path, report: Path, what: str) -> str:
    """Copy a step's picture to the report's folder, and return Markdown that shows it.

    Args:
        picture: the picture file.
        report: the report's folder.
        what: the picture's alt text.
    """
    copy_file(picture, report / picture.name)
    return f"![{what}]({picture.name})"
