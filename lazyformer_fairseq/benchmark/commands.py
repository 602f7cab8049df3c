"""``lazyformer bench``: models side by side; back ends of lazy attention; the loader of batches."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.benchmark.loader.command import loader
from lazyformer_fairseq.existing_paths import ExistingPath
from lazyformer_fairseq.files.whole import refuse_filled_folder
from lazyformer_fairseq.several_values import divided, named_patterns, numbers, products

A_PATH = click.Path(path_type=Path)
POSITIVE = click.IntRange(min=1)
DEVICE = click.Choice(["auto", "cpu", "cuda"])


def several(*names: str, default: str, help: str, convert: Callable = divided, metavar: str = "A,B,...") -> Callable:
    """An option that takes comma-separated values, or may be given several times."""
    return click.option(*names, multiple=True, default=[default], callback=convert, metavar=metavar, help=help)


def device_named(name: str) -> str:
    """cpu or cuda; "auto" is cuda where there is a GPU.

    Raises:
        UserError: there is none.
    """
    import torch

    from lazyformer_fairseq.errors import UserError

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


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


@click.group(invoke_without_command=True)
@several("--arch", "archs", default="lazyformer_m2x6_s", help="Encoders, and causal models, to measure.")
@click.option("--pattern", "patterns", multiple=True, callback=named_patterns, metavar="NAME=PATTERN",
              help="A further encoder, in the sizes of --baseline-arch and without attention dropout.")  # fmt: skip
@several("--lengths", default="128,512", help="Tokens of a sequence.", convert=numbers(int), metavar="N,N,...")
@click.option("--batch", type=POSITIVE, help="Sequences.  [default: as many as --tokens make up]")
@click.option("--tokens", type=POSITIVE, default=1024, help="Of a batch; at least one sequence.")
@several("--precision", "precisions", default="fp32", help="Of fp32, bf16 and fp16.")
@several("--backend", "back_ends", default="auto", help="Of the models: auto, eager, materialize, recompute, fused.")
@several("--relative-position-buckets", "buckets", default="32,0", convert=numbers(int), metavar="N,N,...",
         help="Of the relative bias, of the models and our BERT; 0: none.")  # fmt: skip
@several("--what", "workloads", default="training,encoder,inference",
         help="An update; the encoder's forward and backward; inference at batch 1 and at the batch.")  # fmt: skip
@several("--baseline-backend", "baseline_back_ends", default="eager,materialize,recompute,fused",
         help="Of our BERT; the fastest of them is the baseline.")  # fmt: skip
@click.option("--baseline-arch", default="bert_base", help="Whose sizes the three baselines have.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="auto: a GPU if there is one."
)
@click.option("--rounds", type=click.IntRange(min=2), default=10, help="Samples of each row.")
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), help="Begin no round after it.  [default: no limit]"
)
@click.option("--compile", is_flag=True, help="Let torch compile every model and the loss.")
@click.option("--tgt-len", type=POSITIVE, default=64, help="Tokens of a causal model's segment.")
@click.option("--mem-len", type=click.IntRange(min=0), default=640, help="Tokens that it remembers.")
@click.option("--output", type=A_PATH, default=Path("results/bench"), help="Folder of the results; must not be there.")
@click.pass_context
def bench(context: click.Context, output: Path, device: str, **given: Any) -> None:
    """Measure models beside fairseq's roberta_base, Hugging Face's BertModel and our own best bert_base.

    Everything of one length, precision and kind of work takes turns, round after round, in random order. Prints, and
    writes to OUTPUT: results.md, results.csv, results.json, and pictures in the form of the papers' figures and tables.
    Ctrl-C ends it with what has been measured. What the columns mean: docs/performance.md.

    \b
    lazyformer bench --arch lazyformer_m2x6_s,lazyformer_m6x2_s --lengths 128,512,2048 --minutes 30
    lazyformer bench --arch bert_base --lengths 384 --what inference --relative-position-buckets 0
    lazyformer bench --arch transformer_xl_base,par_transformer_base
    """
    if context.invoked_subcommand is not None:
        return
    refuse_filled_folder(output)
    from lazyformer_fairseq.benchmark.models.settings import BenchSettings
    from lazyformer_fairseq.benchmark.models.write import bench_to

    settings = BenchSettings(device=device_named(device), **given)
    with stopped_plainly():
        click.echo(bench_to(output, settings, ["lazyformer", *sys.argv[1:]]))
    click.echo(f"\nwritten to {output}: {', '.join(sorted(path.name for path in output.iterdir()))}")


@bench.command()
@several("--lengths", default="32,128,512,2048", help="Tokens of a sequence.", convert=numbers(int), metavar="N,N,...")
@several("--layers", default="1,2,4", help="Of a lazy block: an s and those that read it.", convert=numbers(int),
         metavar="N,N,...")  # fmt: skip
@several("--batches", default="1,8,32", help="Sequences of a batch.", convert=numbers(int), metavar="N,N,...")
@several("--heads", default="4x16,4x64,12x64", help="Heads, and the size of each.", convert=products, metavar="NxN,...")
@click.option("--tokens", type=POSITIVE, default=4096, help="Of a batch at most; longer sequences come alone.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="[default: fp32, on a GPU bf16]")
@click.option("--device", type=DEVICE, default="auto", help="auto: a GPU if there is one.")
@click.option("--rounds", type=click.IntRange(min=2), default=10, help="Samples of each back end; the median counts.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=20, show_default=True,
              help="Begin no further round after it; the first one of each block is always made.")  # fmt: skip
@click.option("--output", type=A_PATH, help="JSON file.  [default: in your cache folder, where auto looks first]")
@click.option("--show", is_flag=True, help="Measure nothing: print what auto takes, and the measurement that decides.")
def backends(
    lengths: tuple[int, ...],
    layers: tuple[int, ...],
    batches: tuple[int, ...],
    heads: tuple[tuple[int, int], ...],
    tokens: int,
    precision: Optional[str],
    device: str,
    rounds: int,
    minutes: float,
    output: Optional[Path],
    show: bool,
) -> None:
    """Measure the attention of lazy blocks on each back end: what --lazy-backend auto chooses by.

    In training and inference, with a learned bias, with the positions of causal models and with neither, with and
    without padding. What the file has of other kinds of device stays,
    and so do other blocks that were measured on this machine. Ctrl-C ends it with what has been measured.
    """
    from lazyformer_fairseq.benchmark.backends import speed
    from lazyformer_fairseq.benchmark.models.settings import PRECISIONS
    from lazyformer_fairseq.costs.machine import describe_machine, describe_versions
    from lazyformer_fairseq.modules.attention import measured
    from lazyformer_fairseq.modules.processor import device_kind

    device = device_named(device)
    kind, path = device_kind(device), output or measured.user_file()
    dtype = str(PRECISIONS[precision or ("bf16" if device == "cuda" else "fp32")]).removeprefix("torch.")
    blocks = speed.blocks_to_measure(lengths, layers, batches, heads, dtype, tokens)
    if show:
        table = measured.table_of(kind)
        click.echo(f"{kind}: {f'as {table.where} has it' if table else 'not measured yet'}\n")
        click.echo(speed.choices(blocks, device))
        return
    measured.read_table(path, kind)  # report a damaged file before measuring for minutes
    with stopped_plainly():
        rows = speed.measure_back_ends(blocks, device, rounds, minutes)
    measured.add_rows(path, kind, {**describe_machine(device), **describe_versions()}, rows)
    click.echo(f"{speed.table(rows)}\n\nwritten to {path}")
    if len(rows) < len(blocks):
        click.echo(f"stopped after {len(rows)} of {len(blocks)} blocks", err=True)
        sys.exit(130)


@bench.command()
@click.argument(
    "folder", type=ExistingPath("no such file; give a folder that lazyformer bench wrote", holds="results.json")
)
def draw(folder: Path) -> None:
    """Draw the pictures of a benchmark again, from the results.json in FOLDER."""
    from lazyformer_fairseq.benchmark.models.write import draw_again

    click.echo(f"written to {folder}: {', '.join(draw_again(folder))}")


bench.add_command(loader)
