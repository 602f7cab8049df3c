"""``lazyformer bench``: models side by side; back ends of lazy attention, or kinds of attention."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from lazyformer_fairseq.arguments import named
from lazyformer_fairseq.child_process import STOPPED, stoppable
from lazyformer_fairseq.devices.nvidia_smi import precision_on
from lazyformer_fairseq.measure.bench.settings import BackEndSettings, BenchSettings
from lazyformer_fairseq.options import Group, takes
from lazyformer_fairseq.storage.atomic import refuse_filled_folder


@click.group(cls=Group, default="models")
def bench() -> None:
    """Measure models, back ends and kinds of attention on this machine."""


@bench.command()
@takes(BenchSettings, into="")
@click.option("--pattern", "patterns", multiple=True, callback=named("'mine=(sff)x4 (f)x4'"), metavar="NAME=PATTERN",
              help="A further encoder, in the sizes of --baseline-arch and without attention dropout.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path), default=Path("results/bench"),
              help="Folder of the results; must not be there.")  # fmt: skip
def models(output: Path, patterns: Mapping[str, str], device: str, **given: object) -> None:
    """Measure models beside fairseq's roberta_base, Hugging Face's BertModel and our own best bert_base.

    Everything of one length, precision and kind of work takes turns, round after round, in random order. Prints, and
    writes to OUTPUT: results.md, results.csv, results.json, and pictures in the form of LazyFormer's Figure 3.
    Ctrl-C ends it with what has been measured. What the columns mean: docs/performance.md.

    \b
    lazyformer bench --arch lazyformer_m2x6_s,lazyformer_m6x2_s --lengths 128,512,2048 --budget 30min
    lazyformer bench --arch bert_base --lengths 384 --what inference --relative-position-buckets 0
    lazyformer bench --arch transformer_xl_base,par_transformer_base
    """
    refuse_filled_folder(output)
    from lazyformer_fairseq.measure.bench.run import bench_to
    from lazyformer_fairseq.measure.costs.machine import device_named

    settings = BenchSettings(patterns=patterns, device=device_named(device), **given)
    with stoppable("stopped; nothing was written"):
        click.echo(bench_to(output, settings, ["lazyformer", *sys.argv[1:]]))
    click.echo(f"\nwritten to {output}: {', '.join(sorted(path.name for path in output.iterdir()))}")


@bench.command()
@takes(BackEndSettings)
def backends(settings: BackEndSettings) -> None:
    """Measure the attention of lazy blocks on each back end: what --attention-backend auto chooses by.

    In training and inference, with a learned bias, with the positions of causal models and with neither, with and
    without padding; windows without. What the file has of other kinds of device stays,
    and so do other blocks that were measured on this machine. Ctrl-C ends it with what has been measured.

    With --kinds it measures sublayers of these patterns instead, forward and backward, and writes no file.

    \b
    lazyformer bench backends --kinds 's[window=256],s[window=256,global=1]' --lengths 1024,4096 --heads 12x64
    """
    from lazyformer_fairseq.measure.bench import back_ends
    from lazyformer_fairseq.measure.costs.machine import describe_machine, describe_versions, device_named
    from lazyformer_fairseq.modules.attention import choice
    from lazyformer_fairseq.modules.processor import device_kind

    device = device_named(settings.device)
    settings = replace(settings, device=device, precision=settings.precision or precision_on(device))
    if settings.kinds:
        for heads in settings.heads:
            with stoppable("stopped; nothing was written"):
                table, is_whole = back_ends.measure_kinds(settings, heads)
            click.echo(f"{heads[0]} heads of {heads[1]}, {settings.precision}\n\n{table}\n")
            if not is_whole:
                click.echo("stopped early", err=True)
                sys.exit(STOPPED)
        return
    kind, path = device_kind(device), settings.output or choice.user_file()
    blocks = back_ends.blocks_to_measure(settings)
    if settings.show:
        table = choice.table_of(kind)
        click.echo(f"{kind}: {f'as {table.where} has it' if table else 'not measured yet'}\n")
        click.echo(back_ends.choices(blocks, device))
        return
    choice.read_table(path, kind)  # report a damaged file before measuring for minutes
    with stoppable("stopped; nothing was written"):
        rows = back_ends.measure_back_ends(blocks, device, settings.rounds, settings.budget)
    choice.add_rows(path, kind, {**describe_machine(device), **describe_versions()}, rows)
    click.echo(f"{back_ends.table(rows, device)}\n\nwritten to {path}")
    if len(rows) < len(blocks):
        click.echo(f"stopped after {len(rows)} of {len(blocks)} blocks", err=True)
        sys.exit(STOPPED)
