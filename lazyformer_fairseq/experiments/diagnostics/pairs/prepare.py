"""Pairs as a folder to train on (``lazyformer tasks pairs``)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.data.glue.prepared_data import EncodedExamples
from lazyformer_fairseq.data.text.interface import DICTIONARY_FILE, TextTokenizer
from lazyformer_fairseq.experiments.diagnostics.draws import Draws
from lazyformer_fairseq.experiments.diagnostics.pairs.corpus import CorpusDocuments
from lazyformer_fairseq.experiments.diagnostics.pairs.stretches import (
    PairsSettings,
    Stretches,
    choose_stretches,
    pair_halves,
)
from lazyformer_fairseq.experiments.diagnostics.prepared import write_prepared
from lazyformer_fairseq.experiments.diagnostics.rules import CONSTANT, bag_of_words, constant_answer, shared_words
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.storage.atomic import atomic_folder, refuse_filled_folder

WORDS_ALONE = "which words occur (logistic regression); far from chance it would be a leak"
SHARED_WORDS = "how many rare words both halves share"


def prepare_pairs(
    settings: PairsSettings, corpus: str, out: Path, vocab_size: int = 8192, tokenizer: Optional[Path] = None
) -> dict[str, Any]:
    """Draws the examples and writes `out`, whole or not at all; returns the manifest.

    Args:
        corpus: what `lazyformer corpus` wrote, or raw text that it reads.
        vocab_size, tokenizer: for raw text alone.

    Raises:
        UserError: too little text; or `out` holds something.
    """
    refuse_filled_folder(out)
    with prepared_corpus(corpus, vocab_size, tokenizer, settings.seed) as folder:
        documents, draws, splits = CorpusDocuments(folder), Draws(settings.seed), {}
        stretches = choose_stretches(documents.sizes, settings, draws)
        with atomic_folder(out) as unfinished:
            total = sum(settings.rows.values())
            with tqdm(total=total, desc="read", unit=" documents", disable=None) as progress:
                for split, chosen in stretches.items():
                    splits[split] = _examples(documents, chosen, settings.gap, draws, progress)
            symbols, eos = len(documents.tokenizer.dictionary), documents.tokenizer.special.eos
            train, test = splits["train"], splits["test"]
            rules = {
                CONSTANT: constant_answer(train.targets, test.targets),
                WORDS_ALONE: bag_of_words(train, test, symbols),
                SHARED_WORDS: shared_words(train, test, symbols, eos),
            }
            kept = settings.as_json() | {"corpus": documents.sha256}
            notes = {"documents": {split: len(np.unique(chosen.document)) for split, chosen in stretches.items()}}
            return write_prepared(unfinished, "Pairs", kept, documents.tokenizer, splits, rules, notes)


@contextmanager
def prepared_corpus(corpus: str, vocab_size: int, tokenizer: Optional[Path], seed: int) -> Iterator[Path]:
    """The folder of a prepared corpus; raw text is prepared for as long as the block lasts."""
    folder = Path(corpus)
    if (folder / DICTIONARY_FILE).is_file():
        yield folder
        return
    refuse_without_extra("corpus", "lazyformer tasks pairs of raw text")
    with TemporaryDirectory() as scratch:
        given = {"tokenizer": str(tokenizer)} if tokenizer else {"vocab_size": vocab_size}
        build_corpus([corpus], Path(scratch) / "corpus", CorpusSettings(**given, valid_share=0, seed=seed))
        yield Path(scratch) / "corpus"


def _examples(
    documents: CorpusDocuments, stretches: Stretches, gap: int, draws: Draws, progress: tqdm
) -> EncodedExamples:
    halves, texts = pair_halves(stretches, gap, draws), []
    for document, start, size in zip(*(values.tolist() for values in stretches), strict=True):
        texts.append(documents.read(document)[start : start + size])
        progress.update()
    inputs = [
        build_pair(documents.tokenizer, texts[first][:size], texts[second][-size:])
        for first, second, size in zip(*(values.tolist() for values in halves), strict=True)
    ]
    return EncodedExamples(inputs, halves.targets)


def build_pair(tokenizer: TextTokenizer, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """``<s> first </s> </s> second </s>``, with as many ``</s>`` between as the tokenizer has; int32 (T,)."""
    special = tokenizer.special
    between = [special.eos] * tokenizer.separators
    return np.concatenate([[special.bos], first, between, second, [special.eos]]).astype(np.int32)
