"""``lazyformer plan``."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath, refuse_missing_folders
from lazyformer_fairseq.errors import UserError

POSITIVE = click.IntRange(min=1)


@click.command()
@click.option("--arch", help="Name of a model: docs/architectures.md has them all.")
@click.option("--config", type=ExistingPath(is_file=True), help="YAML file of a training, in place of --arch.")
@click.option("--gpus", type=POSITIVE, default=8, help="How many, on all nodes together.")
@click.option("--gpu-memory", default="16GB", metavar="SIZE", help="Of each, as 16GB (10^9 bytes) or 16GiB.")
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16", "bf16"]), default="fp16", help="Of weights and activations."
)
@click.option("--lazy-backend", "back_end", help="How attention is computed.  [default: the training's, else auto]")
@click.option("--tokens-per-sample", "--tgt-len", "time", type=POSITIVE, help="[default: the training's]")
@click.option("--batch", "per_update", type=POSITIVE, help="Sequences of an update.  [default: the training's, 256]")
@click.option("--max-update", type=POSITIVE, help="[default: the training's, 1000000; language models 40000]")
@click.option("--data", help="Folder of binarised data, or several as a:b:c: for its vocabulary and its size on disk.")
@click.option(
    "--vocab-size", type=POSITIVE, help="[default: of --data, else 32768; of causal archs, that of their text]"
)
@click.option(
    "--peak",
    type=click.FloatRange(min=0, min_open=True),
    default=125.0,
    help="TFLOP/s of a GPU at its best; the default is NVIDIA's for a V100 in fp16.",
)
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.3,
    help="Of that peak which training reaches: an assumption, not a measurement.",
)
@click.option(
    "--measure", is_flag=True, help="Time a few updates of one sequence here, in place of --peak and --share."
)
@click.option("--json", "wants_json", is_flag=True, help="Print numbers for programs: bytes, FLOPs, hours.")
def plan(
    arch: Optional[str],
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
    peak: float,
    share: float,
    measure: bool,
    wants_json: bool,
) -> None:  # fmt: skip
    """Print whether a training fits its GPUs, how an update is shared among them, and how long it takes.

    Memory is counted by formula, for each back end of attention: see docs/training.md. No GPU is needed.

    \b
    lazyformer plan --arch lazyformer_m2x6_s --gpus 8 --gpu-memory 16GB --precision fp16
    lazyformer plan --config bert_base.yaml --data data --gpus 4 --gpu-memory 24GB --precision bf16
    lazyformer plan --arch transformer_xl_base --gpus 1 --measure
    """
    if (arch is None) == (config is None):
        raise UserError("give either --arch NAME or --config FILE.yaml")
    if data is not None:
        refuse_missing_folders(data)
    from lazyformer_fairseq.planning.fit import Place
    from lazyformer_fairseq.planning.job import job_of_arch, job_of_yaml, vocabulary_of
    from lazyformer_fairseq.planning.report import as_json, as_text, assumed_speed, make_plan, read_size

    job = job_of_arch(arch, vocab_size) if arch else job_of_yaml(config, vocab_size)
    if data is not None and vocab_size is None and (found := vocabulary_of(data, job.is_causal)):
        job = replace(job, vocab_size=found)
    given: dict[str, Any] = {"time": time, "per_update": per_update, "max_update": max_update}
    job = replace(job, **{name: value for name, value in given.items() if value is not None})
    place = Place(gpus, read_size(gpu_memory), precision)
    speed = _measured(job) if measure else assumed_speed(peak, share)
    made = make_plan(job, place, back_end or str(job.config.lazy_backend), speed, data and _bytes_of(data))
    click.echo(json.dumps(as_json(made), indent=2) if wants_json else as_text(made))


def _measured(job):
    from lazyformer_fairseq.costs.machine import device_named
    from lazyformer_fairseq.devices.precision import precision_on
    from lazyformer_fairseq.planning.measure import measure_speed

    device = device_named(None)
    return measure_speed(job, 1, precision_on(device), device)


def _bytes_of(data: str) -> int:
    return sum(path.stat().st_size for folder in data.split(":") for path in Path(folder).iterdir() if path.is_file())
