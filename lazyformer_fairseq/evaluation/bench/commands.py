"""The commands ``lazyformer bench`` for entire models and ``lazyformer bench attention`` for attention sublayers."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from lazyformer_fairseq.arguments import named
from lazyformer_fairseq.child_process import STOPPED, exit_on_interrupt
from lazyformer_fairseq.evaluation.bench.settings import AttentionSettings, BenchSettings
from lazyformer_fairseq.executors.nvidia_smi import precision_on
from lazyformer_fairseq.options import Group, with_options_from
from lazyformer_fairseq.storage.atomic import refuse_filled_folder


@click.group(cls=Group, default="models")
def bench() -> None:
    """Measure models, attention variants and back ends on this machine."""


@bench.command()
@with_options_from(BenchSettings, into="")
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    callback=named("'mine=(sff)x4 (f)x4'"),
    metavar="NAME=PATTERN",
    help="Additional encoder with the sizes of --baseline-arch and without attention dropout.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("results/bench"),
    help="Folder for the results; it must be empty or not exist yet.",
)
def models(output: Path, patterns: Mapping[str, str], device: str, **given: object) -> None:
    r"""Compare models with fairseq's roberta_base, Hugging Face's BertModel and our bert_base on its fastest back end.

    For each length, precision and workload, all models run once per round, in random order. The command prints tables,
    and writes results.md, results.json and plots in the style of Figure 3 of the LazyFormer paper to OUTPUT. Ctrl-C
    stops the benchmark and keeps the results so far. docs/performance.md explains the columns.

    \b
    lazyformer bench --arch lazyformer_m2x6_s,lazyformer_m6x2_s --lengths 128,512,2048 --budget 30min
    lazyformer bench --arch bert_base --lengths 384 --what inference --relative-position-buckets 0
    lazyformer bench --arch transformer_xl_base,par_transformer_base
    """
    refuse_filled_folder(output)
    from lazyformer_fairseq.evaluation.bench.run import bench_to
    from lazyformer_fairseq.evaluation.costs.machine import device_named
    from lazyformer_fairseq.modules.timing import SELECTOR

    SELECTOR.time_at_once()
    settings = BenchSettings(patterns=patterns, device=device_named(device), **given)
    with exit_on_interrupt("stopped; nothing was written"):
        click.echo(bench_to(output, settings, ["lazyformer", *sys.argv[1:]]))
    click.echo(f"\nwritten to {output}: {', '.join(sorted(path.name for path in output.iterdir()))}")


@bench.command()
@with_options_from(AttentionSettings)
def attention(settings: AttentionSettings) -> None:
    r"""Measure the forward and backward pass of attention sublayers for each pattern and back end.

    The measurements are interleaved with measurements of a plain s that uses torch's fused attention. The command
    prints each sublayer's time in milliseconds and its peak memory. Ctrl-C stops the benchmark and keeps the results so
    far.

    \b
    lazyformer bench attention --patterns 's[window=256],s[window=256,global=1]' --lengths 1024,4096
    lazyformer bench attention --patterns s,sl --backend eager,materialize,recompute,fused --precision bf16
    """
    from lazyformer_fairseq.evaluation.bench.attention import measure_attention
    from lazyformer_fairseq.evaluation.costs.machine import device_named
    from lazyformer_fairseq.modules.timing import SELECTOR

    SELECTOR.time_at_once()
    device = device_named(settings.device)
    settings = replace(settings, device=device, precision=settings.precision or precision_on(device))
    for heads in settings.heads:
        with exit_on_interrupt("stopped; nothing was written"):
            table, is_whole = measure_attention(settings, heads)
        sizes = f"{heads[0]} heads of {heads[1]}, batches of {settings.tokens} tokens, {settings.precision}"
        click.echo(f"{sizes}\n\n{table}\n")
        if not is_whole:
            click.echo("stopped early", err=True)
            sys.exit(STOPPED)
