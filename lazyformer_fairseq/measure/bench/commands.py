"""``lazyformer bench``: models side by side; back ends of lazy attention; the loader of batches; the start of a run."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import (
    ExistingPath,
    GroupOfCommands,
    divided,
    named_patterns,
    numbers,
    patterns_apart,
    precision_option,
    products,
    refuse_missing_folders,
)
from lazyformer_fairseq.devices.precision import precision_on
from lazyformer_fairseq.storage.atomic import refuse_filled_folder

A_PATH = click.Path(path_type=Path)
POSITIVE = click.IntRange(min=1)
ABOVE_0 = click.FloatRange(min=0, min_open=True)
ROUNDS = click.IntRange(min=2)
A_RESULT = ExistingPath("no such file; give a folder that lazyformer bench wrote", holds="results.json")


def several(*names: str, default: str, help: str, convert: Callable = divided, metavar: str = "A,B,...") -> Callable:
    """An option that takes comma-separated values, or may be given several times."""
    apart = re.split(r",(?![^\[]*\])", default)  # help can break lines between them
    return click.option(*names, multiple=True, default=apart, callback=convert, metavar=metavar, help=help)


def whole_numbers(name: str, default: str, help: str, variable: str = "") -> Callable:
    """The same for numbers."""
    names = [name, variable] if variable else [name]
    return several(*names, default=default, help=help, convert=numbers(int), metavar="N,N,...")


def on_device(command: Callable) -> Callable:
    """The option --device."""
    choice = click.Choice(["auto", "cpu", "cuda"])
    return click.option("--device", type=choice, default="auto", help="auto: a GPU if there is one.")(command)


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


@click.group(cls=GroupOfCommands, invoke_without_command=True)
@several("--arch", "archs", default="lazyformer_m2x6_s", help="Encoders, and causal models, to measure.")
@click.option("--pattern", "patterns", multiple=True, callback=named_patterns, metavar="NAME=PATTERN",
              help="A further encoder, in the sizes of --baseline-arch and without attention dropout.")  # fmt: skip
@whole_numbers("--lengths", "128,512", "Tokens of a sequence; each is a measurement of its own.")
@click.option("--batch", type=POSITIVE, help="Sequences.  [default: as many as --tokens make up]")
@click.option("--tokens", type=POSITIVE, default=1024, help="Of a batch; at least one sequence.")
@several("--precision", "precisions", default="fp32", help="Of fp32, bf16 and fp16.")
@several(
    "--backend", "back_ends", default="auto", help="Of models: auto, eager, materialize, recompute, fused, tiles, flex."
)
@whole_numbers("--relative-position-buckets", "32,0", "Of the relative bias, of the models and our BERT; 0: none.",
               "buckets")  # fmt: skip
@several("--what", "workloads", default="training,encoder,inference",
         help="An update; the encoder's forward and backward; inference at batch 1 and at the batch.")  # fmt: skip
@several("--baseline-backend", "baseline_back_ends", default="eager,materialize,recompute,fused",
         help="Of our BERT; the fastest of them is the baseline.")  # fmt: skip
@click.option("--baseline-arch", default="bert_base", help="Whose sizes the three baselines have.")
@on_device
@click.option("--rounds", type=ROUNDS, default=10, help="Samples of each row.")
@click.option("--minutes", type=ABOVE_0,
              help="Begin no round after it; one round of each row always runs.  [default: no limit]")  # fmt: skip
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
    from lazyformer_fairseq.measure.bench.models.run import bench_to
    from lazyformer_fairseq.measure.bench.models.settings import BenchSettings
    from lazyformer_fairseq.measure.costs.machine import device_named

    settings = BenchSettings(device=device_named(device), **given)
    with stopped_plainly():
        click.echo(bench_to(output, settings, ["lazyformer", *sys.argv[1:]]))
    click.echo(f"\nwritten to {output}: {', '.join(sorted(path.name for path in output.iterdir()))}")


@bench.command()
@whole_numbers("--lengths", "32,128,512,2048", "Tokens of a sequence.")
@whole_numbers("--layers", "1,2,4", "Of a lazy block: an s and those that read it.")
@whole_numbers("--batches", "1,8,32", "Sequences of a batch.")
@several("--heads", default="4x16,4x64,12x64", help="Heads, and the size of each.", convert=products, metavar="NxN,...")
@whole_numbers("--windows", "0,32,256", "Keys to either side that a query sees; 0 for all keys.")
@click.option("--tokens", type=POSITIVE, default=4096, help="Of a batch at most; longer sequences come alone.")
@precision_option
@on_device
@click.option("--rounds", type=ROUNDS, default=10, help="Samples of each back end; the median counts.")
@click.option("--minutes", type=ABOVE_0, default=20, show_default=True,
              help="Begin no further round after it; the first one of each block is always made.")  # fmt: skip
@click.option("--output", type=A_PATH, help="JSON file.  [default: in your cache folder, where auto looks first]")
@click.option("--show", is_flag=True, help="Measure nothing: print what auto takes, and the measurement that decides.")
def backends(
    precision: Optional[str],
    device: str,
    rounds: int,
    minutes: float,
    output: Optional[Path],
    show: bool,
    **sizes: Any,
) -> None:
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
    dtype = str(PRECISIONS[precision or precision_on(device)]).removeprefix("torch.")
    blocks = back_ends.blocks_to_measure(precision=dtype, **sizes)
    if show:
        table = choice.table_of(kind)
        click.echo(f"{kind}: {f'as {table.where} has it' if table else 'not measured yet'}\n")
        click.echo(back_ends.choices(blocks, device))
        return
    choice.read_table(path, kind)  # report a damaged file before measuring for minutes
    with stopped_plainly():
        rows = back_ends.measure_back_ends(blocks, device, rounds, minutes)
    choice.add_rows(path, kind, {**describe_machine(device), **describe_versions()}, rows)
    click.echo(f"{back_ends.table(rows, device)}\n\nwritten to {path}")
    if len(rows) < len(blocks):
        click.echo(f"stopped after {len(rows)} of {len(blocks)} blocks", err=True)
        sys.exit(130)


@bench.command()
@several("--kinds", default="s[window=256],s[strided=64],s[fixed=64,summary=8],s[linformer=256],s[window=256]l",
         help="Patterns of s, l and c, such as s[window=256].", convert=patterns_apart)  # fmt: skip
@whole_numbers("--lengths", "1024,4096", "Tokens of a sequence.")
@click.option("--batch", type=POSITIVE, default=1, show_default=True, help="Sequences.")
@several("--heads", default="12x64", help="Heads, and the size of each.", convert=products, metavar="NxN")
@precision_option
@click.option("--backend", "back_end", default="auto", help="auto, or one that computes all of them.")
@on_device
@click.option("--rounds", type=ROUNDS, default=10, show_default=True, help="Samples of each; the median counts.")
@click.option("--minutes", type=ABOVE_0, help="Begin no round after it; one of each always runs.  [default: no limit]")
def kinds(
    kinds: tuple[str, ...],
    lengths: tuple[int, ...],
    heads: tuple[tuple[int, int], ...],
    precision: Optional[str],
    device: str,
    **given: Any,
) -> None:
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
    dtype = PRECISIONS[precision or precision_on(device)]
    for number, size in heads:
        with stopped_plainly():
            rows = measure_kinds(kinds, lengths, heads=(number, size), device=device, precision=dtype, **given)
        click.echo(f"{number} heads of {size}, {dtype}\n\n{table(rows)}\n")
        if len({row.length for row in rows}) < len(set(lengths)):
            click.echo("stopped early", err=True)
            sys.exit(130)


@bench.command()
@several("--arch", "archs", default="distilbert_base,bert_base_absolute,bert_base,par_bert_base,lazy_par_bert_base,"
         "lazyformer_m2x6_s", help="Encoders; bert_base_absolute is always measured.")  # fmt: skip
@click.option("--tokens", "length", type=POSITIVE, default=384, show_default=True, help="Of the sequence.")
@precision_option
@on_device
@click.option("--threads", type=POSITIVE, help="On a processor.  [default: torch's]")
@click.option("--rounds", type=ROUNDS, default=40, show_default=True, help="Samples of each; the median counts.")
@click.option("--minutes", type=ABOVE_0, help="Begin no round after it; one of each always runs.  [default: no limit]")
@click.option("--output", type=A_PATH, default=Path("results/table4"), show_default=True,
              help="Folder for table4.md and table4.json; must not be there.")  # fmt: skip
def table4(device: str, precision: Optional[str], output: Path, **given: Any) -> None:
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
        click.echo(table_4_to(output, device=device, precision=precision or precision_on(device), **given))
    click.echo(f"\nwritten to {output}: table4.json, table4.md")


@bench.command()
@click.argument("folder", type=A_RESULT)
def draw(folder: Path) -> None:
    """Draw the pictures of a benchmark again, from the results.json in FOLDER."""
    from lazyformer_fairseq.measure.bench.models.pictures import draw_all
    from lazyformer_fairseq.storage.json_files import read_json

    drawn = draw_all(read_json(folder / "results.json"), folder)
    click.echo(f"written to {folder}: {', '.join(drawn)}")


@bench.command(context_settings={"ignore_unknown_options": True})
@click.argument("data")
@click.argument("fairseq_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--arch", default="lazyformer_m2x6_s", help="The model to compare with.")
@click.option("--tokens-per-sample", type=POSITIVE, default=512, help="Longest block, as in pre-training.")
@click.option("--batch-size", type=POSITIVE, default=16, help="Blocks of a batch; an update is one batch.")
@whole_numbers("--workers", "0,2", "Numbers of data workers to try; 0 is a thread.")
@click.option("--seconds", type=ABOVE_0, default=10.0, help="For each measurement.")
@on_device
def loader(
    data: str,
    fairseq_options: tuple[str, ...],
    arch: str,
    tokens_per_sample: int,
    batch_size: int,
    workers: tuple[int, ...],
    seconds: float,
    device: str,
) -> None:
    """Measure the tokens a second that the data loader gives, alone, and those that training takes.

    DATA is what pre-training reads, as lazyformer corpus writes it. Other options of fairseq-train may follow, such as
    --bf16.

    \b
    lazyformer bench loader data --arch bert_base --batch-size 4
    """
    refuse_missing_folders(data)
    from lazyformer_fairseq.measure.bench.loader import as_rows, measure_speeds
    from lazyformer_fairseq.measure.costs.machine import device_named
    from lazyformer_fairseq.report.tables import markdown_table

    command = [
        *_reading(data, arch, tokens_per_sample, batch_size),
        *("--optimizer", "fused_adam", "--lr-scheduler", "linear_warmup", "--lr", "1e-4", "--clip-norm", "1.0"),
        *("--num-workers", "0", *fairseq_options),
        *(["--cpu"] if device_named(device) == "cpu" else []),
    ]
    click.echo(markdown_table(as_rows(measure_speeds(command, workers, seconds))))


@bench.command(context_settings={"ignore_unknown_options": True})
@click.argument("data")
@click.argument("fairseq_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--processes", type=POSITIVE, default=8, help="As many as a machine has GPUs.")
@click.option("--num-workers", type=click.IntRange(min=0), default=1, help="Data workers of each; 0 is a thread.")
@click.option("--arch", default="lazyformer_m2x6_s", help="The model that would be trained; it is not built.")
@click.option("--tokens-per-sample", type=POSITIVE, default=512, help="Longest block, as in pre-training.")
@click.option("--batch-size", type=POSITIVE, default=16, help="Blocks of a batch.")
def startup(
    data: str,
    fairseq_options: tuple[str, ...],
    processes: int,
    num_workers: int,
    arch: str,
    tokens_per_sample: int,
    batch_size: int,
) -> None:
    """Measure the time to the first batch, stage by stage, and the memory, of processes that read DATA at once.

    DATA is what pre-training reads, as lazyformer corpus writes it. Other options of fairseq-train may follow. No model
    is built, and no GPU is used. The first run on new DATA also checks it and packs it; the next ones find that done.

    \b
    lazyformer bench startup data --processes 8
    """
    refuse_missing_folders(data)
    from lazyformer_fairseq.measure.bench.start_up import measure_start_up, memory_rows, stage_rows
    from lazyformer_fairseq.report.tables import markdown_table

    command = [
        *_reading(data, arch, tokens_per_sample, batch_size),
        *("--cpu", "--no-save", "--num-workers", str(num_workers), *fairseq_options),
    ]
    with stopped_plainly():
        measured = measure_start_up(command, processes)
    click.echo(markdown_table(stage_rows(measured)))
    if rows := memory_rows(measured):
        click.echo(f"\n{markdown_table(rows)}")
    else:
        click.echo("\nmemory: not measured; only Linux tells what part of a shared page is whose", err=True)


def _reading(data: str, arch: str, tokens_per_sample: int, batch_size: int) -> list[str]:
    """Arguments of fairseq-train for pre-training on DATA, those of its optimizer excepted."""
    from lazyformer_fairseq import USER_DIR

    return [
        *(data, "--user-dir", str(USER_DIR), "--task", "full_sentences_masked_lm", "--arch", arch),
        *("--tokens-per-sample", str(tokens_per_sample), "--max-positions", str(tokens_per_sample)),
        *("--criterion", "masked_lm_accuracy", "--max-update", "1000000", "--batch-size", str(batch_size)),
        *("--log-format", "none"),
    ]
