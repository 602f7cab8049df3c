"""The commands ``lazyformer diagnostics``: listops, pairs, run."""

import sys
from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import ExistingPath, divided, named_patterns, precision_option
from lazyformer_fairseq.devices.precision import precision_on
from lazyformer_fairseq.experiments.diagnostics.settings import TaskRunSettings
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.options import Group, takes
from lazyformer_fairseq.storage.atomic import refuse_filled_folder

A_PATH = click.Path(path_type=Path)
SPLITS = ("train", "valid", "test")


@click.group(cls=Group)
def diagnostics() -> None:
    """Make tasks with long inputs, and compare patterns on them: diagnostics, not a leaderboard."""


def rows_options(**defaults: int) -> Any:
    """An option --SPLIT with the number of examples of each."""

    def add(command):
        for split in reversed(SPLITS):
            size = click.IntRange(1)
            command = click.option(f"--{split}", type=size, default=defaults[split], help=f"Examples of {split}.")(
                command
            )
        return command

    return add


@diagnostics.command()
@click.argument("out", type=A_PATH)
@rows_options(train=96_000, valid=2_000, test=2_000)
@click.option("--min-length", type=click.IntRange(1), default=500, help="Tokens of an expression, at least.")
@click.option("--max-length", type=click.IntRange(1), default=2_000, help="Tokens of an expression, at most.")
@click.option("--max-depth", type=click.IntRange(1), default=10, help="Levels; on the last one are digits alone.")
@click.option("--max-arguments", type=click.IntRange(1), default=10, help="Of an operator, which has two at least.")
@click.option("--operators", multiple=True, callback=divided, default=("MAX", "MIN", "MED", "SM"), type=str,
              metavar="NAME,NAME,...", help="Of MAX, MIN, MED (median, rounded down), SM (sum modulo 10).")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=1, help="The same seed gives the same data on every machine.")
def listops(out: Path, operators: tuple[str, ...], **given: Any) -> None:
    """Draw nested operations on digits, whose value from 0 to 9 is to be found, and write them to OUT.

    Lengths, depth, operators and numbers of examples are Long Range Arena's unless others are given. OUT/report.md has
    the balance of classes and what simple rules reach: a model has learnt something where it beats all of them.

    \b
    lazyformer diagnostics listops listops
    lazyformer diagnostics listops short --min-length 8 --max-length 64 --max-depth 4 --max-arguments 5 --train 20000
    """
    refuse_filled_folder(out)
    refuse_without_extra("huggingface", "lazyformer diagnostics listops")
    from lazyformer_fairseq.finetuning.made import report_of
    from lazyformer_fairseq.finetuning.tasks.listops import ListOpsSettings, prepare_listops

    rows = {split: given.pop(split) for split in SPLITS}
    manifest = prepare_listops(ListOpsSettings(rows=rows, operators=operators, **given), out)
    click.echo(f"{report_of(manifest)}\n\nwritten: {out}")


@diagnostics.command()
@click.argument("corpus")
@click.argument("out", type=A_PATH)
@rows_options(train=10_000, valid=1_000, test=1_000)
@click.option("--min-length", type=click.IntRange(1), default=500, help="Tokens of both halves together, at least.")
@click.option("--max-length", type=click.IntRange(1), default=2_000, help="Tokens of both halves together, at most.")
@click.option("--gap", type=click.IntRange(0), default=32, help="Tokens left out between the halves of a document.")
@click.option("--per-document", type=click.IntRange(1), default=1, help="Examples of a long document, at most.")
@click.option("--vocab-size", type=click.IntRange(10), default=8192, help="Of the tokenizer of raw text.")
@click.option("--tokenizer", type=ExistingPath(), help="Its folder, in place of one trained on raw text.")
@click.option("--seed", type=click.IntRange(0), default=1, help="The same seed and corpus give the same data.")
def pairs(corpus: str, out: Path, vocab_size: int, tokenizer: Optional[Path], **given: Any) -> None:
    """Make pairs of texts of CORPUS, halves of one document or of two, and write them to OUT.

    CORPUS is what `lazyformer corpus` wrote, or raw text that it reads. A half stands in one example alone, no document
    is in two splits, and both kinds of pairs have the same lengths; OUT/report.md has what words alone give away.

    \b
    lazyformer diagnostics pairs data pairs
    lazyformer diagnostics pairs my_texts pairs_of_raw_text --train 400 --valid 100 --test 100 --per-document 10
    """
    refuse_filled_folder(out)
    if not (Path(corpus) / "dict.txt").is_file():
        refuse_without_extra("corpus", "lazyformer diagnostics pairs of raw text")
        from lazyformer_fairseq.corpus.commands import refuse_missing_inputs

        refuse_missing_inputs((corpus,))
    from lazyformer_fairseq.finetuning.made import report_of
    from lazyformer_fairseq.finetuning.tasks.pairs import PairsSettings, prepare_pairs

    rows = {split: given.pop(split) for split in SPLITS}
    manifest = prepare_pairs(PairsSettings(rows=rows, **given), corpus, out, vocab_size, tokenizer)
    click.echo(f"{report_of(manifest)}\n\nwritten: {out}")


@diagnostics.command()
@click.argument("data", type=ExistingPath("is no folder of lazyformer diagnostics", holds="manifest.json"))
@click.argument("out", type=A_PATH)
@click.option("--pattern", "patterns", multiple=True, required=True, callback=named_patterns, metavar="NAME=PATTERN",
              help="A model; may be given several times.")  # fmt: skip
@takes(TaskRunSettings, into="")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cuda where there is a GPU]")
@precision_option
def run(data: Path, out: Path, device: Optional[str], precision: Optional[str], **given: Any) -> None:
    """Train patterns on the task in DATA, and report accuracy, time and what needs no model to OUT.

    With --self-pretrain every model is trained twice, side by side: from scratch, and after it has learnt to fill masks
    in the task's own training inputs (Amos et al., 2023). The models of a seed take turns, update by update, on the
    same batches. It is a diagnostic, not a leaderboard: models are small, and their rate is the same.
    OUT gets table.md, table.csv, learning.png, results.json, and the trained models in runs. Stop it at any time; rerun
    to resume.

    \b
    lazyformer diagnostics run listops results/listops --self-pretrain 1000 \\
        --pattern 'all=(sf)x4' --pattern 'window=(s[window=64,global=1] f)x4'
    """
    from lazyformer_fairseq.data.prepared_folder import PreparedDiagnostic
    from lazyformer_fairseq.experiments.diagnostics.comparison import run as compare
    from lazyformer_fairseq.experiments.folder import stoppable
    from lazyformer_fairseq.measure.costs.machine import device_named

    prepared, device = PreparedDiagnostic.load(data), device_named(device)
    settings = TaskRunSettings(
        data=str(data),
        data_sha256=prepared.sha256,
        max_positions=max(counts["longest"] for counts in prepared.manifest["splits"].values()),
        device=device,
        precision=precision or precision_on(device),
        **given,
    )
    with stoppable():
        table = compare(settings, out, ["lazyformer", *sys.argv[1:]])
    click.echo(f"\n{table}\n\nwritten to {out}: table.md, table.csv, learning.png, results.json")
