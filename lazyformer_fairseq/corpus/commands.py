"""The command ``lazyformer corpus``."""

import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Union

import click

from lazyformer_fairseq.child_process import exit_on_interrupt
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.executors.local import processors_here
from lazyformer_fairseq.executors.options import LOCAL, ExecutorOptions, choose_executor
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.options import Command, read_count, with_options_from
from lazyformer_fairseq.storage.remote import is_url


def _parse_output(_context: click.Context, _argument: click.Parameter, text: str) -> Union[str, Path]:
    if is_url(text):
        return text
    return Path(text)


@click.command(cls=Command)
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.argument("out", callback=_parse_output)
@with_options_from(CorpusSettings)
@click.option(
    "--cased",
    is_flag=True,
    help="Keep uppercase letters.  [default: convert to lowercase, as in the LazyFormer paper]",
)
@click.option(
    "--word-budget",
    metavar="N",
    callback=lambda _context, _option, text: text and read_count(text),
    help="Stop if the cleaned text has more than N words (separated by spaces); N may be written as 10M, for example.",
)
@with_options_from(ExecutorOptions, into="place")
def corpus(
    inputs: tuple[str, ...],
    out: Union[str, Path],
    place: ExecutorOptions,
    cased: bool,
    word_budget: Optional[int],
    settings: CorpusSettings,
) -> None:
    """Convert raw text (INPUTs) to OUT, a folder of training data for fairseq-train.

    OUT will contain shards of training data, the validation split, a dictionary, a tokenizer, manifest.json and
    report.html.

    INPUT and OUT may be URLs, such as s3://bucket/folder (see docs/scaling.md).

    An INPUT is a file or folder: a MediaWiki dump (.xml, .xml.bz2), WikiExtractor output, JSON lines, or plain text
    with documents separated by blank lines or by `= Title =` lines. All of these may be compressed (.gz, .bz2 or .zst).
    Parquet files with one document per row are also supported. The format is detected from the content; to set it
    yourself, write FORMAT:INPUT, where FORMAT is mediawiki, wikiextractor, jsonl, text, wikitext, book, babylm or
    parquet. Use book:INPUT for plain-text books, one document per file. Use babylm:INPUT for text whose lines were
    selected by hand, such as BabyLM's; each line is then a paragraph, and no line is dropped. If documents are
    identical, only the first one (in INPUT order) is kept.

    You can stop the command at any time and rerun it to resume.
    """
    refuse_without_extra("corpus", "lazyformer corpus")
    if not inputs:  # click assigns a single path to OUT
        raise click.UsageError(f"specify the output folder too, as in: lazyformer corpus {out} data")
    refuse_missing_inputs(inputs)
    from lazyformer_fairseq.corpus.build import build_corpus
    from lazyformer_fairseq.corpus.manifest import bad_input_messages

    if cased and settings.tokenizer:
        raise UserError("--cased: the tokenizer from --tokenizer determines the casing; omit --cased")
    settings = replace(settings, text=replace(settings.text, lower_case=not cased))
    with exit_on_interrupt(f"{out}: stopped; rerun to resume"):
        executor = None
        here = Path(out)
        if is_url(out):
            here = Path(here.name)
        logs = here.absolute().with_name(f".{here.name}.jobs")
        if place.executor != LOCAL or place.slurm:
            executor = choose_executor(place, logs, "lazyformer-corpus")
        manifest = build_corpus(inputs, out, settings, place.workers or processors_here(), word_budget, executor)
        shutil.rmtree(logs, ignore_errors=True)  # not reached after a failure, so its logs are kept

    documents = manifest["documents"]
    dropped = Counter(documents["dropped"])
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in dropped.most_common())
    if reasons:
        reasons = f" ({reasons})"
    train = _split_in_words(manifest["train"])
    valid = _split_in_words(manifest["valid"])
    click.echo(
        f"{out}: {documents['in']:,} documents, {dropped.total():,} of them dropped{reasons}; "
        f"train {train}; valid {valid}. See {os.path.join(out, 'report.html')}"
    )
    for line in bad_input_messages(manifest):
        click.echo(line)


def _split_in_words(totals: dict[str, Any]) -> str:
    if not totals["tokens"]:
        return "empty"
    return f"{totals['sentences']:,} sentences, {totals['words']:,} words, {totals['tokens']:,} tokens"


def refuse_missing_inputs(inputs: tuple[str, ...]) -> None:
    """Raise a UserError if an input is missing, before any heavy imports."""
    from lazyformer_fairseq.corpus.readers.inputs import parse_spec

    for spec in inputs:
        parse_spec(spec)
