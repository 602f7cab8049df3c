"""``lazyformer corpus``: the command line of this package."""

from pathlib import Path
from typing import Any, Optional

import click

from lazyformer_fairseq.arguments import GroupWithDefault
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import refuse_without_extra

STOPPED_BY_INTERRUPT = 130  # exit code of shells


@click.group(cls=GroupWithDefault, default="build")
def corpus() -> None:
    """Turn raw text into what fairseq-train reads.

    `lazyformer corpus INPUT... OUT` is `lazyformer corpus build INPUT... OUT`; see `lazyformer corpus build --help`.
    """


def corpus_options(command):
    """The options that build and bench share."""
    options = [
        click.option("--vocab-size", default=32_768, type=click.IntRange(10),
                     help="Size of the dictionary, all included."),
        click.option("--word-coverage", type=click.FloatRange(0, 1, min_open=True),
                     help="Keep the most frequent words that make up this share of the text; rarer ones become <unk>.  "
                          "[default: 0.999; 1 with another model's tokenizer]"),
        click.option("--min-word-count", type=click.IntRange(1), help="Instead: words that occur less become <unk>."),
        click.option("--valid-share", default=0.005, type=click.FloatRange(0, 1),
                     help="Share of documents held out, at least one; 0 for none: train with --disable-validation."),
        click.option("--min-document-characters", default=100, type=click.IntRange(0),
                     help="Drop shorter documents; a sign of Chinese, Japanese or Korean counts for three letters."),
        click.option("--min-line-words", default=5, type=click.IntRange(0),
                     help="Drop shorter lines unless they end like a sentence; two signs count for a word."),
        click.option("--min-line-letters", default=0.5, type=click.FloatRange(0, 1),
                     help="Drop lines with a smaller share of letters and spaces."),
        click.option("--near-duplicates", is_flag=True,
                     help="Drop near-duplicates (MinHash), not only equal documents."),
        click.option("--spacy-model", help="Installed spaCy model that finds sentences.  [default: rules, no model]"),
        click.option("--unit-megabytes", type=click.FloatRange(0, min_open=True),
                     help="Input in a unit, the atom of work.  [default: a 64th of the input, 0.25 to 32]"),
        click.option("--bad-files", type=click.Choice(["stop", "skip"]), default="stop",
                     help="At a broken file: stop and name it, or note it in the manifest and go on."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@corpus.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.argument("out", type=click.Path(path_type=Path))
@corpus_options
@click.option("--seed", default=1, help="Chooses the documents held out.")
@click.option("--shards", type=click.IntRange(1), help="Folders of training data.  [default: one a gigabyte of input]")
@click.option("--tokenizer", metavar="FOLDER", help="Use this tokenizer, case and vocabulary.  [default: train one]")
@click.option("--cased", is_flag=True, help="Keep upper case.  [default: lower-case, as the paper]")
@click.option("--workers", type=click.IntRange(1), help="Tasks at the same time.  [default: the CPU cores there are]")
@click.option("--executor", type=click.Choice(["local", "slurm", "ray"]), default="local", help="Where tasks run.")
@click.option("--slurm", multiple=True, metavar="KEY=VALUE", help="Option of sbatch: partition=..., time=...; repeat.")
def build(
    inputs: tuple[str, ...],
    out: Path,
    workers: Optional[int],
    executor: str,
    slurm: tuple[str, ...],
    cased: bool,
    **options: Any,
) -> None:
    """Turn INPUTs into OUT, binarised.

    OUT gets shards of training data, the validation split, dictionary, tokenizer, manifest.json and report.html.

    An INPUT is a file or a folder: a MediaWiki dump (.xml, .xml.bz2), WikiExtractor's output, JSON lines, plain text
    with documents divided by blank lines or `= Title =` lines, books as .epub; all also as .gz, .bz2 or .zst. The
    format is found from the content; FORMAT:INPUT sets it (mediawiki, wikiextractor, jsonl, text, wikitext, book).
    Say book:INPUT for plain-text books, one document a file. Of equal documents the first in the order given stays.

    Stop it at any time; rerun to resume.
    """
    refuse_without_extra("corpus", "lazyformer corpus")
    refuse_missing_inputs(inputs)
    from lazyformer_fairseq.corpus.build import build_corpus
    from lazyformer_fairseq.corpus.executors import ExecutorSettings, available_cores
    from lazyformer_fairseq.corpus.settings import CorpusSettings
    from lazyformer_fairseq.data.text.normalisation import TextSettings

    settings = CorpusSettings(text=TextSettings(lower_case=not cased), **options)
    if cased and settings.tokenizer:
        raise UserError("--cased: the settings of --tokenizer decide this; leave it out")
    if slurm and executor != "slurm":
        raise UserError(f"--slurm {slurm[0]}: has a meaning with --executor slurm alone")
    where = ExecutorSettings(executor, workers or available_cores(), slurm_options(slurm))
    try:
        manifest = build_corpus(inputs, out, settings, where)
    except KeyboardInterrupt:
        click.echo(f"{out}: stopped; rerun to resume", err=True)
        raise SystemExit(STOPPED_BY_INTERRUPT) from None
    documents = manifest["documents"]
    sizes = {
        split: f"{manifest[split]['sentences']:,} sentences, {manifest[split]['tokens']:,} tokens"
        if manifest[split]["tokens"]
        else "empty"
        for split in ("train", "valid")
    }
    click.echo(
        f"{out}: {documents['in']:,} documents, {sum(documents['dropped'].values()):,} of them dropped; "
        f"train {sizes['train']}; valid {sizes['valid']}. See {out / 'report.html'}"
    )


@corpus.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@corpus_options
@click.option("--workers", default=(1, 2), multiple=True, type=click.IntRange(1), help="Worker counts to measure.")
@click.option("--repeats", default=3, type=click.IntRange(1), help="Runs of each, in turn.")
@click.option("--csv", type=click.Path(path_type=Path), help="Also write the table there.")
def bench(inputs: tuple[str, ...], workers: tuple[int, ...], repeats: int, csv: Optional[Path], **options: Any) -> None:
    """Measure what INPUTs cost.

    Builds a corpus in a temporary folder and prints seconds by step, megabytes a second, memory and disk.
    """
    refuse_without_extra("corpus", "lazyformer corpus")
    refuse_missing_inputs(inputs)
    from lazyformer_fairseq.corpus.bench import run_bench
    from lazyformer_fairseq.corpus.settings import CorpusSettings

    click.echo(run_bench(inputs, CorpusSettings(**options), workers, repeats, csv))


def refuse_missing_inputs(inputs: tuple[str, ...]) -> None:
    """Raises a UserError, before anything heavy is imported."""
    from lazyformer_fairseq.corpus.readers.inputs import parse_spec

    for spec in inputs:
        parse_spec(spec)


def slurm_options(pairs: tuple[str, ...]) -> dict[str, str]:
    """``("time=4:00:00",)`` as a dictionary.

    Raises:
        UserError: one without ``=``.
    """
    for pair in pairs:
        if "=" not in pair:
            raise UserError(f"--slurm {pair}: expected KEY=VALUE, such as partition=cpu")
    return dict(pair.split("=", 1) for pair in pairs)
