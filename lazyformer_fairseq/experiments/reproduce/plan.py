"""What each step costs, before any runs: arithmetic, not measurement."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from lazyformer_fairseq.data.glue.task_table import TASKS
from lazyformer_fairseq.experiments.reproduce.run import record_of
from lazyformer_fairseq.experiments.reproduce.settings import Inputs, Size
from lazyformer_fairseq.experiments.reproduce.steps import Step, finetuned_updates
from lazyformer_fairseq.measure.costs.flops import count_flops
from lazyformer_fairseq.measure.planning.job import Job, job_of_arch, with_options
from lazyformer_fairseq.report.tables import markdown_table

BYTES_OF_PARAMETER = 14  # in a checkpoint: weights in 16 bits; the optimizer's copy and two moments in 32
FURTHER_CHECKPOINTS = 5  # the last three, best and last
DISK_OF_CORPUS = 3  # times the text, while it is made
MEGABYTES_A_CORE_SECOND = 1.2
BYTES_OF_TOKEN = 5  # of English in GLUE's files, other columns included
GB = 1e9


@dataclass(frozen=True)
class Cost:
    """Of a step; None for what cannot be told beforehand. Hours are those of all devices together, side by side."""

    hours: Optional[float] = None
    flops: Optional[float] = None
    gigabytes: Optional[float] = None


def plan_table(steps: Sequence[Step], size: Size, inputs: Inputs, out: Path, devices: int, speed: float) -> str:
    """A Markdown table of all steps, and sentences that say what it rests on.

    Args:
        devices: GPUs, or cores.
        speed: FLOP/s that training reaches of one.
    """
    costs = {step.name: cost_of(step, size, inputs, devices, speed) for step in steps}
    rows = [
        {
            "step": step.name,
            "what": step.what,
            "state": "done" if record_of(out, step) else "to do",
            "FLOPs": _or_dash(costs[step.name].flops, "{:.1e}"),
            "hours": _or_dash(costs[step.name].hours, "{:,.2f}" if size.is_tiny else "{:,.1f}"),
            "disk, GB": _or_dash(costs[step.name].gigabytes, "{:,.2f}" if size.is_tiny else "{:,.0f}"),
        }
        for step in steps
    ]
    hours = sum(cost.hours or 0 for cost in costs.values())
    disk = sum(cost.gigabytes or 0 for cost in costs.values())
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free / GB
    said = [
        f"In all some {hours:,.1f} hours and {disk:,.1f} GB; {free:,.1f} GB are free in {there}."
        + (" THIS DOES NOT FIT." if free < disk else ""),
        f"By arithmetic: {devices} device{'s' * (devices > 1)}, {speed / 1e12:g} TFLOP/s of training on each "
        "(--devices, --teraflops), a backward pass of two forward passes, "
        f"{MEGABYTES_A_CORE_SECOND} MB of text a core-second, {BYTES_OF_PARAMETER} bytes a parameter of a checkpoint. "
        "Benchmarks take at most the minutes that they are given, and a round.",
    ]
    return "\n\n".join([markdown_table(rows, left=("what", "state")), *said])


def cost_of(step: Step, size: Size, inputs: Inputs, devices: int, speed: float) -> Cost:
    """By the step's name: what it trains, reads or measures."""
    kind, _, arch = step.name.partition("_")
    if kind == "bench":
        return Cost(hours=size.minutes / 60)
    if kind == "corpus" and inputs.raw is not None:
        read = sum(_bytes_in(Path(text.removeprefix("book:"))) for text in inputs.texts(Path()))
        seconds = read / 1e6 / MEGABYTES_A_CORE_SECOND / len(os.sched_getaffinity(0))
        return Cost(seconds / 3600, None, DISK_OF_CORPUS * read / GB)
    if kind == "pretrain":
        job = job_of(arch, size)
        gigabytes = (len(size.kept) + FURTHER_CHECKPOINTS) * BYTES_OF_PARAMETER * job.parameters / GB
        return Cost(job.flops / devices / speed / 3600, job.flops, gigabytes)
    if kind == "glue":
        flops = sum(_flops_of_epoch(task, arch, size, inputs.glue) for task in inputs.tasks)
        flops *= len(size.rates) * len(size.seeds) * size.epochs * len(finetuned_updates(arch, size))
        return Cost(flops / devices / speed / 3600, flops) if flops else Cost()
    return Cost()


def job_of(arch: str, size: Size) -> Job:
    """A pre-training, as `lazyformer plan` counts it."""
    vocabulary = int(size.corpus[size.corpus.index("--vocab-size") + 1])
    options = {name.replace("-", "_"): value for name, value in size.widths(arch).items()}
    options |= {"tokens_per_sample": size.length, "sequences_per_update": size.sequences, "max_update": size.updates}
    return with_options(job_of_arch(arch, vocabulary), options)


def _flops_of_epoch(task: str, arch: str, size: Size, glue: Path) -> float:
    """By the bytes of the task's file; 0 where it is not there yet."""
    split = TASKS[task].splits["train"]
    file = glue / TASKS[task].folder / split.file
    if not file.is_file():
        return 0.0
    rows = min(size.rows or split.rows, split.rows)
    length = max(2, min(2 * size.length, round(file.stat().st_size / split.rows / BYTES_OF_TOKEN)))
    job = job_of(arch, size)
    return 3 * rows * count_flops(job.pattern, job.sizes, length, predicted=0)


def _bytes_in(path: Path) -> int:
    files = [path] if path.is_file() else (file for file in path.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files)


def _or_dash(number: Optional[float], form: str) -> str:
    return "-" if number is None else form.format(number)
