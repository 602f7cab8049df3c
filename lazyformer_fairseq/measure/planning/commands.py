"""``lazyformer plan``."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath, refuse_missing_folders
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.planning import PAPER_TERAFLOPS
from lazyformer_fairseq.options import Command, option, takes


@dataclass(frozen=True)
class Planning:
    """Options of ``lazyformer plan``."""

    archs: tuple[str, ...] = option(
        (), "Name of a model, or several: docs/architectures.md has them all.", "--arch", metavar="NAME,..."
    )
    gpus: int = option(8, "How many, on all nodes together.", low=1)
    gpu_memory: str = option("16GB", "Of each, as 16GB (10^9 bytes) or 16GiB.", metavar="SIZE")
    precision: str = option("fp16", "Of weights and activations.", choices=("fp32", "fp16", "bf16"))
    attention_backend: Optional[str] = option(None, "How attention is computed.", shown="the training's, else auto")
    time: Optional[int] = option(
        None, "Of a sequence, or of a segment.", "--tokens-per-sample", "--tgt-len", low=1, shown="the training's"
    )
    per_update: Optional[int] = option(
        None, "Size of an update.", "--sequences-per-update", low=1, shown="the training's, 256"
    )
    max_update: Optional[int] = option(None, "How many.", low=1, shown="the training's, 1000000; language models 40000")
    data: Optional[str] = option(
        None, "Folder of binarised data, or several as a:b:c: for its vocabulary and its size on disk."
    )
    vocab_size: Optional[int] = option(
        None, "Symbols.", low=1, shown="of --data, else 32768; of causal archs, that of their text"
    )
    teraflops: float = option(
        PAPER_TERAFLOPS, "TFLOP/s that training reaches on a GPU; the default is what the paper's BERT did on a V100.",
        low=0, is_open=True,
    )  # fmt: skip
    measure: bool = option(False, "Time a few updates of one sequence here, in place of --teraflops.")
    json: bool = option(False, "Print numbers for programs: bytes, FLOPs, hours.")


@click.command(cls=Command)
@click.option("--config", type=ExistingPath(is_file=True), help="YAML file of a training, in place of --arch.")
@takes(Planning, "asked")
def plan(config: Optional[Path], asked: Planning) -> None:
    """Print whether a training fits its GPUs, how an update is shared among them, and how long it takes.

    Memory is counted by formula, for each back end of attention: see docs/training.md. No GPU is needed.

    \b
    lazyformer plan --arch lazyformer_m2x6_s --gpus 8 --gpu-memory 16GB --precision fp16
    lazyformer plan --config bert_base.yaml --data data --gpus 4 --gpu-memory 24GB --precision bf16
    lazyformer plan --arch transformer_xl_base --gpus 1 --measure
    lazyformer plan --arch bert_base --arch lazyformer_m2x6 (a row for each)
    """
    if bool(asked.archs) == (config is not None):
        raise UserError("give either --arch NAME or --config FILE.yaml")
    if asked.data is not None:
        refuse_missing_folders(asked.data)
    from lazyformer_fairseq.measure.planning.job import job_of_arch, job_of_yaml
    from lazyformer_fairseq.measure.planning.report import as_json, as_table, as_text

    plans = _plans(asked, [job_of_yaml(config)] if config else map(job_of_arch, asked.archs))
    if asked.json:
        found = [as_json(made) for made in plans]
        click.echo(json.dumps(found if len(found) > 1 else found[0], indent=2))
    else:
        click.echo(as_text(plans[0]) if len(plans) == 1 else as_table(plans))


def _plans(asked: Planning, jobs: Iterable[Any]) -> list[Any]:
    """A plan of each job, with what was asked for in place of the training's own."""
    from lazyformer_fairseq.measure.planning.fit import Place
    from lazyformer_fairseq.measure.planning.job import vocabulary_of
    from lazyformer_fairseq.measure.planning.report import given_speed, make_plan, read_size

    given = {name: getattr(asked, name) for name in ("time", "per_update", "max_update")}
    given = {name: value for name, value in given.items() if value is not None}
    place, plans = Place(asked.gpus, read_size(asked.gpu_memory), asked.precision), []
    for job in jobs:
        known = asked.vocab_size or (asked.data and vocabulary_of(asked.data, job.is_causal)) or job.vocab_size
        job = replace(job, vocab_size=known, **given)
        speed = _measured(job) if asked.measure else given_speed(asked.teraflops)
        chosen = asked.attention_backend or job.attention_backend
        plans.append(make_plan(job, place, chosen, speed, _bytes_of(asked.data) if asked.data else None))
    return plans


def _measured(job):
    from lazyformer_fairseq.devices.precision import precision_on
    from lazyformer_fairseq.measure.costs.machine import device_named
    from lazyformer_fairseq.measure.planning.measure import measure_speed

    device = device_named(None)
    return measure_speed(job, 1, precision_on(device), device)


def _bytes_of(data: str) -> int:
    return sum(path.stat().st_size for folder in data.split(":") for path in Path(folder).iterdir() if path.is_file())
