"""The command ``lazyformer``."""

import logging
from pathlib import Path
from typing import Optional

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="lazyformer_fairseq")
def main() -> None:
    """LazyFormer and PAR encoders for fairseq. Pre-training and fine-tuning run through fairseq-train (see README)."""
    logging.getLogger().setLevel(logging.WARNING)  # fairseq lets every library say everything


@main.command()
@click.argument("text", type=click.Path(path_type=Path))
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--vocab-size", default=32_768, type=click.IntRange(min=10), help="Size of the dictionary, all included.")
@click.option("--valid-share", default=0.005, type=click.FloatRange(0, 1), help="Share of the documents held out.")
@click.option("--seed", default=1, help="Chooses the documents held out.")
@click.option("--spacy-model", help="Installed spaCy model that finds sentences.  [default: rules, no model needed]")
def corpus(text: Path, data: Path, vocab_size: int, valid_share: float, seed: int, spacy_model: Optional[str]) -> None:
    """Turn TEXT into the folder DATA that fairseq-train reads: tokenizer, dictionary, train and valid split.

    TEXT is a UTF-8 file, or a folder of .txt files, with documents divided by blank lines or by lines `= Title =`.
    """
    from lazyformer_fairseq.corpus.binarise import prepare_corpus
    from lazyformer_fairseq.corpus.documents import read_documents

    counts = prepare_corpus(read_documents(text), data, vocab_size, valid_share, seed, spacy_model=spacy_model)
    documents, train, valid = counts["documents"], counts["train"], counts["valid"]
    click.echo(
        f"{data}: {documents['in']:,} documents, {sum(documents['dropped'].values()):,} of them dropped; "
        f"train {train['sentences']:,} sentences, {train['tokens']:,} tokens; "
        f"valid {valid['sentences']:,} sentences, {valid['tokens']:,} tokens"
    )


@main.command()
@click.option("--corpus", help="Text file or folder of .txt files.  [default: the English prose that Python carries]")
@click.option("--output", type=click.Path(path_type=Path), default=Path("results/demo"), help="Folder of the results.")
@click.option("--updates", type=click.IntRange(min=12), help="Updates of pre-training.")
def demo(corpus: Optional[str], output: Path, updates: Optional[int]) -> None:
    """Pre-train a tiny BERT and a tiny LazyFormer side by side, fine-tune both, print a table, draw a picture.

    Interrupted, it goes on from there when run again.
    """
    from lazyformer_fairseq.demo.run import run_demo
    from lazyformer_fairseq.demo.settings import DemoSettings

    chosen = {"corpus": corpus, "updates": updates}
    run_demo(DemoSettings(**{name: value for name, value in chosen.items() if value is not None}), output)


if __name__ == "__main__":
    main()
