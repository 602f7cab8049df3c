"""The command ``lazyformer plan``."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import find_config, refuse_missing_folders
from lazyformer_fairseq.evaluation.planning import NO_GPU, PAPER_TERAFLOPS, V100_BYTES
from lazyformer_fairseq.executors.cpuinfo import has_bf16
from lazyformer_fairseq.executors.nvidia_smi import count_gpus, precision_here, smallest_memory
from lazyformer_fairseq.options import Command, Gpus, option, read_gpus, with_options_from
from lazyformer_fairseq.patterns.architectures import ARCHITECTURES


@dataclass(frozen=True)
class Planning:
    """Options for ``lazyformer plan``."""

    gpus: Optional[Gpus] = option(
        None,
        "Total number of GPUs across all nodes, optionally with the memory per GPU.",
        parse=read_gpus,
        metavar="N or NxSIZE",
        shown="this machine's GPUs, or its CPU if it has none",
    )
    precision: Optional[str] = option(
        None,
        "Precision of weights and activations.",
        choices=("fp32", "fp16", "bf16"),
        shown="on GPUs, bf16 if this machine's GPUs support it and --gpus sets no SIZE, otherwise fp16; on a CPU, the "
        "same as `lazyformer pretrain`",
    )
    attention_backend: Optional[str] = option(None, "Attention back end.", shown="ARCH's, otherwise auto")
    time: Optional[int] = option(
        None,
        "Number of tokens per sequence or segment.",
        "--tokens-per-sample",
        "--tgt-len",
        low=1,
        shown="ARCH's",
    )
    per_update: Optional[int] = option(
        None,
        "Number of sequences per update.",
        "--sequences-per-update",
        low=1,
        shown="ARCH's; 256 for encoders",
    )
    max_update: Optional[int] = option(
        None,
        "Number of updates.",
        low=1,
        high=10**9,
        shown="ARCH's; 1000000 for encoders, 40000 for most language models",
    )
    optimizer: Optional[str] = option(
        None,
        "Name of the optimizer. muon keeps one moment for each weight of a matrix; all others keep two moments per "
        "weight.",
        metavar="NAME",
        shown="ARCH's, which is Adam or LAMB",
    )
    data: Optional[str] = option(
        None,
        "Folder of binarized data, or several as a:b:c, from which to read the vocabulary size and the size on disk.",
        shown="32768 symbols; for causal archs, the vocabulary of their training text",
    )
    teraflops: Optional[float] = option(
        None,
        "Training speed per GPU, in TFLOP/s.",
        low=0,
        high=10**5,
        is_open=True,
        shown=f"{PAPER_TERAFLOPS}, like the paper's BERT on a V100; on a CPU, the measured matmul speed",
    )
    json: bool = option(False, "Print memory (bytes), FLOPs and hours as JSON.")


@click.command(cls=Command)
@click.argument("archs", metavar="ARCH...", nargs=-1, required=True)
@with_options_from(Planning, "asked")
def plan(archs: tuple[str, ...], asked: Planning) -> None:
    r"""Print whether training ARCH fits on the GPUs, the batch size per GPU, and how long training takes.

    ARCH is the name of a model (docs/patterns.md lists all models) or a YAML file, as for `lazyformer pretrain`. Memory
    use is measured with fake tensors, which takes a few seconds and needs no GPU; see docs/training.md.

    \b
    lazyformer plan lazyformer_m2x6_s (on this machine's GPUs, or its CPU)
    lazyformer plan my_training.yaml --data data --gpus 4x24GB --precision bf16
    lazyformer plan bert_base lazyformer_m2x6 --gpus 8x16GB (prints one row per model)
    """
    if asked.data is not None:
        refuse_missing_folders(asked.data)
    from lazyformer_fairseq.evaluation.planning.fit import as_json, as_table, as_text, make_plan
    from lazyformer_fairseq.evaluation.planning.job import job_of_arch, job_of_yaml, vocabulary_of

    given = {name: getattr(asked, name) for name in ("time", "per_update", "max_update", "optimizer")}
    given = {name: value for name, value in given.items() if value is not None}
    place = _place(archs, asked)
    plans = []
    size = None
    if asked.data:
        folders = asked.data.split(":")
        files = [path for folder in folders for path in Path(folder).rglob("*")]
        size = sum(path.stat().st_size for path in files if path.is_file())
    for arch in archs:
        found = job_of_yaml(find_config(arch)) if arch.endswith(".yaml") else job_of_arch(arch)
        known = asked.data and vocabulary_of(asked.data, found.is_causal)
        job = replace(found, vocab_size=known or found.vocab_size, **given)
        back_end = asked.attention_backend or job.attention_backend
        plans.append(make_plan(job, place, back_end, asked.teraflops, size))
    if asked.json:
        numbers = [as_json(made) for made in plans]
        shown = numbers if len(numbers) > 1 else numbers[0]
        click.echo(json.dumps(shown, indent=2))
    elif len(plans) > 1:
        click.echo(as_table(plans))
    else:
        click.echo(as_text(plans[0]))


def _place(archs: Sequence[str], asked: Planning) -> Any:
    """Return the machine to plan for, which is this machine unless the options override its properties."""
    from lazyformer_fairseq.evaluation.planning.fit import Hardware

    there = count_gpus()
    given = asked.gpus or Gpus(0)
    memory = given.memory
    if not (there or given.count or memory):
        by_pretrain = "fp32"
        if has_bf16() and ARCHITECTURES.keys() >= set(archs):
            by_pretrain = "bf16"
        return Hardware.of_processor(asked.precision or by_pretrain)
    precision = asked.precision or (precision_here() if there and not memory else "fp16")
    if not (memory := memory or smallest_memory()):
        click.echo(NO_GPU, err=True)
    return Hardware(given.count or there or 1, memory or V100_BYTES, precision)
