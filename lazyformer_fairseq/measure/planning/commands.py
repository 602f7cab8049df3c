"""``lazyformer plan``."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

import click

from lazyformer_fairseq.arguments import ExistingPath, refuse_missing_folders
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.planning import PAPER_TERAFLOPS
from lazyformer_fairseq.options import Command, option, takes


def read_size(text: str) -> int:
    """Bytes of ``16GB`` or ``16GiB``. Raises a UserError for what is none of these."""
    found = re.fullmatch(r"(\d*\.?\d+)(m|g)(i?)b", text.lower())
    size = found and float(found[1]) * (2**10 if found[3] else 10**3) ** {"m": 2, "g": 3}[found[2]]
    if not size or size >= 2**60:
        raise UserError(f"{text!r} is no size; write for example 16GB, 16GiB or 800MB")
    return int(size)


@dataclass(frozen=True)
class Planning:
    """Options of ``lazyformer plan``."""

    archs: tuple[str, ...] = option(
        (), "Name of a model, or several: docs/architectures.md has them all.", "--arch", metavar="NAME,..."
    )
    gpus: int = option(8, "How many, on all nodes together.", low=1, high=10**6)
    gpu_memory: int = option("16GB", "Of each, as 16GB (10^9 bytes) or 16GiB.", parse=read_size, metavar="SIZE")
    precision: str = option("fp16", "Of weights and activations.", choices=("fp32", "fp16", "bf16"))
    attention_backend: Optional[str] = option(None, "How attention is computed.", shown="the training's, else auto")
    time: Optional[int] = option(
        None, "Of a sequence, or of a segment.", "--tokens-per-sample", "--tgt-len", low=1, shown="the training's"
    )
    per_update: Optional[int] = option(
        None, "Size of an update.", "--sequences-per-update", low=1, shown="the training's, 256"
    )
    max_update: Optional[int] = option(
        None, "How many.", low=1, high=10**9, shown="the training's, 1000000; language models 40000"
    )
    data: Optional[str] = option(
        None, "Folder of binarised data, or several as a:b:c: for its vocabulary and its size on disk.",
        shown="32768 symbols; of causal archs, those of their text",
    )  # fmt: skip
    teraflops: float = option(
        PAPER_TERAFLOPS, "TFLOP/s that training reaches on a GPU; the default is what the paper's BERT did on a V100.",
        low=0, is_open=True,
    )  # fmt: skip
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
    lazyformer plan --arch bert_base --arch lazyformer_m2x6 (a row for each)
    """
    if bool(asked.archs) == (config is not None):
        raise UserError("give either --arch NAME or --config FILE.yaml")
    if asked.data is not None:
        refuse_missing_folders(asked.data)
    from lazyformer_fairseq.measure.planning.fit import Place, as_json, as_table, as_text, make_plan
    from lazyformer_fairseq.measure.planning.job import job_of_arch, job_of_yaml, vocabulary_of

    given = {name: getattr(asked, name) for name in ("time", "per_update", "max_update")}
    given = {name: value for name, value in given.items() if value is not None}
    place, plans = Place(asked.gpus, asked.gpu_memory, asked.precision), []
    files = [path for folder in (asked.data or "").split(":") if folder for path in Path(folder).iterdir()]
    size = sum(path.stat().st_size for path in files if path.is_file()) if asked.data else None
    for job in [job_of_yaml(config)] if config else map(job_of_arch, asked.archs):
        known = asked.data and vocabulary_of(asked.data, job.is_causal)
        job = replace(job, vocab_size=known or job.vocab_size, **given)
        plans.append(make_plan(job, place, asked.attention_backend or job.attention_backend, asked.teraflops, size))
    if asked.json:
        found = [as_json(made) for made in plans]
        click.echo(json.dumps(found if len(found) > 1 else found[0], indent=2))
    else:
        click.echo(as_text(plans[0]) if len(plans) == 1 else as_table(plans))
