"""A toy text in WikiText's layout, and what ``lazyformer lm prepare`` makes of it."""

from pathlib import Path

from helpers import toy_texts

from lazyformer_fairseq.language_modeling.prepare import prepare


def write_toy_wikitext(folder: Path) -> Path:
    """wiki.train.tokens and so on: words with spaces around, an empty line after each text. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (split, texts) in enumerate({"train": 40, "valid": 6, "test": 6}.items()):
        lines = (text.replace(".", " .") for text in toy_texts(texts, seed=number))
        (folder / f"wiki.{split}.tokens").write_text("".join(f" {line} \n \n" for line in lines))
    return folder


def prepare_toy_wikitext(folder: Path) -> Path:
    """Prepared data in `folder`/data."""
    prepare("wikitext", write_toy_wikitext(folder / "text"), folder / "data")
    return folder / "data"
