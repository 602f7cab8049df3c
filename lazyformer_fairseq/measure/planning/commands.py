"""``lazyformer plan``."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath, refuse_missing_folders
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.planning import PAPER_TERAFLOPS

POSITIVE = click.IntRange(min=1)


@click.command()
@click.option("--arch", "archs", multiple=True, help="Name of a model, or several: docs/architectures.md has them all.")
@click.option("--config", type=ExistingPath(is_file=True), help="YAML file of a training, in place of --arch.")
@click.option("--gpus", type=POSITIVE, default=8, help="How many, on all nodes together.")
@click.option("--gpu-memory", default="16GB", metavar="SIZE", help="Of each, as 16GB (10^9 bytes) or 16GiB.")
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16", "bf16"]), default="fp16", help="Of weights and activations."
)
@click.option(
    "--attention-backend",
    "--lazy-backend",
    "back_end",
    help="How attention is computed.  [default: the training's, else auto]",
)
@click.option("--tokens-per-sample", "--tgt-len", "time", type=POSITIVE, help="[default: the training's]")
@click.option("--batch", "per_update", type=POSITIVE, help="Sequences of an update.  [default: the training's, 256]")
@click.option("--max-update", type=POSITIVE, help="[default: the training's, 1000000; language models 40000]")
@click.option("--data", help="Folder of binarised data, or several as a:b:c: for its vocabulary and its size on disk.")
@click.option(
    "--vocab-size", type=POSITIVE, help="[default: of --data, else 32768; of causal archs, that of their text]"
)
@click.option(
    "--teraflops",
    type=click.FloatRange(min=0, min_open=True),
    default=PAPER_TERAFLOPS,
    help="TFLOP/s that training reaches on a GPU; the default is what the paper's BERT did on a V100.",
)
@click.option("--measure", is_flag=True, help="Time a few updates of one sequence here, in place of --teraflops.")
@click.option("--json", "wants_json", is_flag=True, help="Print numbers for programs: bytes, FLOPs, hours.")
def plan(
    archs: tuple[str, ...],
    config: Optional[Path],
    gpus: int,
    gpu_memory: str,
    precision: str,
    back_end: Optional[str],
    time: Optional[int],
    per_update: Optional[int],
    max_update: Optional[int],
    data: Optional[str],
    vocab_size: Optional[int],
    teraflops: float,
    measure: bool,
    wants_json: bool,
) -> None:  # fmt: skip
    """Print whether a training fits its GPUs, how an update is shared among them, and how long it takes.

    Memory is counted by formula, for each back end of attention: see docs/training.md. No GPU is needed.

    \b
    lazyformer plan --arch lazyformer_m2x6_s --gpus 8 --gpu-memory 16GB --precision fp16
    lazyformer plan --config bert_base.yaml --data data --gpus 4 --gpu-memory 24GB --precision bf16
    lazyformer plan --arch transformer_xl_base --gpus 1 --measure
    lazyformer plan --arch bert_base --arch lazyformer_m2x6 (a row for each)
    """
    if bool(archs) == (config is not None):
        raise UserError("give either --arch NAME or --config FILE.yaml")
    if data is not None:
        refuse_missing_folders(data)
    from lazyformer_fairseq.measure.planning.fit import Place
    from lazyformer_fairseq.measure.planning.job import job_of_arch, job_of_yaml, vocabulary_of
    from lazyformer_fairseq.measure.planning.report import as_json, as_table, as_text, given_speed, make_plan, read_size

    given: dict[str, Any] = {"time": time, "per_update": per_update, "max_update": max_update}
    given = {name: value for name, value in given.items() if value is not None}
    place, plans = Place(gpus, read_size(gpu_memory), precision), []
    for job in [job_of_yaml(config)] if config else map(job_of_arch, archs):
        known = vocab_size or (data and vocabulary_of(data, job.is_causal)) or job.vocab_size
        job = replace(job, vocab_size=known, **given)
        speed = _measured(job) if measure else given_speed(teraflops)
        chosen = back_end or job.attention_backend
        plans.append(make_plan(job, place, chosen, speed, _bytes_of(data) if data else None))
    if wants_json:
        found = [as_json(made) for made in plans]
        click.echo(json.dumps(found if len(found) > 1 else found[0], indent=2))
    else:
        click.echo(as_text(plans[0]) if len(plans) == 1 else as_table(plans))


def _measured(job):
    from lazyformer_fairseq.devices.precision import precision_on
    from lazyformer_fairseq.measure.costs.machine import device_named
    from lazyformer_fairseq.measure.planning.measure import measure_speed

    device = device_named(None)
    return measure_speed(job, 1, precision_on(device), device)


def _bytes_of(data: str) -> int:
    return sum(path.stat().st_size for folder in data.split(":") for path in Path(folder).iterdir() if path.is_file())
