"""``lazyformer bench``: models side by side; back ends of lazy attention; kinds of attention; SQuAD's inference."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath, named_patterns
from lazyformer_fairseq.devices.precision import precision_on
from lazyformer_fairseq.measure.bench.settings import BackEndSettings, BenchSettings, KindSettings, Table4Settings
from lazyformer_fairseq.options import Group, takes
from lazyformer_fairseq.storage.atomic import refuse_filled_folder

A_RESULT = ExistingPath("no such file; give a folder that lazyformer bench wrote", holds="results.json")


def on_device(command: Callable) -> Callable:
    """The option --device."""
    choice = click.Choice(["auto", "cpu", "cuda"])
    return click.option("--device", type=choice, default="auto", help="auto: a GPU if there is one.")(command)


def output_option(default: Optional[str], help: str) -> Callable:
    """The option --output."""
    return click.option("--output", type=click.Path(path_type=Path), default=default and Path(default), help=help)


@contextmanager
def stopped_plainly() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C, which ends the command with one line. A second one does not disturb what follows."""

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        click.echo("stopped; nothing was written", err=True)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


@click.group(cls=Group, default="models")
def bench() -> None:
    """Measure models, back ends and kinds of attention on this machine."""


@bench.command()
@takes(BenchSettings, into="")
@click.option("--pattern", "patterns", multiple=True, callback=named_patterns, metavar="NAME=PATTERN",
              help="A further encoder, in the sizes of --baseline-arch and without attention dropout.")  # fmt: skip
@on_device
@output_option("results/bench", "Folder of the results; must not be there.")
def models(output: Path, device: str, **given: Any) -> None:
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

    settings = BenchSettings(device=device_named(device), **given)
    with stopped_plainly():
        click.echo(bench_to(output, settings, ["lazyformer", *sys.argv[1:]]))
    click.echo(f"\nwritten to {output}: {', '.join(sorted(path.name for path in output.iterdir()))}")


@bench.command()
@takes(BackEndSettings)
@on_device
@output_option(None, "JSON file.  [default: in your cache folder, where auto looks first]")
@click.option("--show", is_flag=True, help="Measure nothing: print what auto takes, and the measurement that decides.")
def backends(settings: BackEndSettings, device: str, output: Optional[Path], show: bool) -> None:
    """Measure the attention of lazy blocks on each back end: what --attention-backend auto chooses by.

    In training and inference, with a learned bias, with the positions of causal models and with neither, with and
    without padding; windows without. What the file has of other kinds of device stays,
    and so do other blocks that were measured on this machine. Ctrl-C ends it with what has been measured.
    """
    from lazyformer_fairseq.measure.bench import back_ends
    from lazyformer_fairseq.measure.costs.machine import PRECISIONS, describe_machine, describe_versions, device_named
    from lazyformer_fairseq.modules.attention import choice
    from lazyformer_fairseq.modules.processor import device_kind

    device = device_named(device)
    kind, path = device_kind(device), output or choice.user_file()
    dtype = str(PRECISIONS[settings.precision or precision_on(device)]).removeprefix("torch.")
    sizes = (settings.lengths, settings.layers, settings.batches, settings.heads)
    blocks = back_ends.blocks_to_measure(*sizes, dtype, settings.tokens, settings.windows)
    if show:
        table = choice.table_of(kind)
        click.echo(f"{kind}: {f'as {table.where} has it' if table else 'not measured yet'}\n")
        click.echo(back_ends.choices(blocks, device))
        return
    choice.read_table(path, kind)  # report a damaged file before measuring for minutes
    with stopped_plainly():
        rows = back_ends.measure_back_ends(blocks, device, settings.rounds, settings.budget)
    choice.add_rows(path, kind, {**describe_machine(device), **describe_versions()}, rows)
    click.echo(f"{back_ends.table(rows, device)}\n\nwritten to {path}")
    if len(rows) < len(blocks):
        click.echo(f"stopped after {len(rows)} of {len(blocks)} blocks", err=True)
        sys.exit(130)


@bench.command()
@takes(KindSettings)
@on_device
def kinds(settings: KindSettings, device: str) -> None:
    """Measure kinds of attention beside torch's fused full attention, forward and backward.

    It gives them queries, keys and values (to a c, what it gates), in an encoder without bias and padding. Where
    transformers is installed, Hugging Face's Longformer runs beside each plain window. After Ctrl-C it prints what it
    has measured.

    \b
    lazyformer bench kinds --kinds 's[window=256],s[window=256,global=1]' --lengths 1024,4096
    """
    from lazyformer_fairseq.measure.bench.kinds import measure_kinds, table
    from lazyformer_fairseq.measure.costs.machine import PRECISIONS, device_named

    device = device_named(device)
    dtype = PRECISIONS[settings.precision or precision_on(device)]
    for heads in settings.heads:
        with stopped_plainly():
            rows = measure_kinds(settings, heads, device, dtype)
        click.echo(f"{heads[0]} heads of {heads[1]}, {dtype}\n\n{table(rows)}\n")
        if len({row.length for row in rows}) < len(settings.lengths):
            click.echo("stopped early", err=True)
            sys.exit(130)


@bench.command()
@takes(Table4Settings)
@on_device
@output_option("results/table4", "Folder for table4.md and table4.json; must not be there.")
def table4(settings: Table4Settings, device: str, output: Path) -> None:
    """Measure what PAR Transformer's Table 4 does: latency of SQuAD's inference at batch 1, encoder and span head.

    Each model has the relative bias of its arch, or none. The table has parameters, FLOPs and the paper's latency on
    an A100 too; on a processor also CPU time, which other work on the machine lengthens less.

    \b
    lazyformer bench table4 --threads 1
    """
    from lazyformer_fairseq.measure.bench.table_4 import table_4_to
    from lazyformer_fairseq.measure.costs.machine import device_named

    device = device_named(device)
    with stopped_plainly():
        click.echo(table_4_to(output, settings, device, settings.precision or precision_on(device)))
    click.echo(f"\nwritten to {output}: table4.json, table4.md")


@bench.command()
@click.argument("folder", type=A_RESULT)
def draw(folder: Path) -> None:
    """Draw the pictures of a benchmark again, from the results.json in FOLDER."""
    from lazyformer_fairseq.measure.bench.pictures import draw_all
    from lazyformer_fairseq.storage.json_files import read_json

    drawn = draw_all(read_json(folder / "results.json"), folder)
    click.echo(f"written to {folder}: {', '.join(drawn)}")
