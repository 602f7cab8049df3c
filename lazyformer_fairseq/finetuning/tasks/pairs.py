"""Pairs: do two halves belong to the same document? Made of a corpus, long inputs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Optional

import numpy as np

from lazyformer_fairseq.corpus.build import build_corpus
from lazyformer_fairseq.corpus.settings import CorpusSettings
from lazyformer_fairseq.data.datasets.sentence_pairs import Documents
from lazyformer_fairseq.data.prepared_folder import EncodedExamples
from lazyformer_fairseq.data.shards import data_folders, tokenizer_of
from lazyformer_fairseq.data.text.interface import DICTIONARY_FILE, SETTINGS_FILE, TextTokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.extras import refuse_without_extra
from lazyformer_fairseq.finetuning import made
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.atomic import atomic_folder
from lazyformer_fairseq.storage.indexed_format import MappedItems
from lazyformer_fairseq.storage.json_files import sha256_of


@dataclass(frozen=True)
class PairsSettings:
    """All that decides the examples of a corpus.

    Attributes:
        rows: examples by split.
        min_length, max_length: tokens of both halves together, symbols at their ends not counted.
        gap: tokens left out between the halves, so that no sentence is cut in two by them.
        per_document: segments of a document, at most.
        seed: of everything.

    Raises:
        UserError: no example is like that.
    """

    rows: Mapping[str, int] = field(default_factory=lambda: {"train": 10_000, "valid": 1_000, "test": 1_000})
    min_length: int = 500
    max_length: int = 2_000
    gap: int = 32
    per_document: int = 1
    seed: int = 1

    def __post_init__(self):
        if self.min_length < 2 or self.max_length < self.min_length:
            raise UserError(
                f"--min-length {self.min_length}, --max-length {self.max_length}: two halves have 2 tokens at least, "
                "and no length may be below the minimum"
            )
        if odd := [split for split, rows in self.rows.items() if rows < 4 or rows % 2]:
            raise UserError(f"--{odd[0]} {self.rows[odd[0]]}: half are of one document; give an even number from 4")


class Segments(NamedTuple):
    """Parts of documents; all int64 (segments,).

    Attributes:
        document: number of its document.
        start: tokens of the document before it.
        size: its tokens, the gap included.
    """

    document: np.ndarray
    start: np.ndarray
    size: np.ndarray


class Halves(NamedTuple):
    """What examples are made of; all int64 (examples,).

    Attributes:
        first, second: numbers of the segments that the halves are of.
        size: tokens of each of the two halves.
    """

    first: np.ndarray
    second: np.ndarray
    size: np.ndarray

    @property
    def targets(self) -> np.ndarray:
        """1 where both halves are of the same document."""
        return (self.first == self.second).astype(np.int64)


def choose_segments(sizes: np.ndarray, settings: PairsSettings, draws: made.Draws) -> dict[str, Segments]:
    """By split; no document is in two.

    Args:
        sizes: tokens of each document, (documents,).

    Raises:
        UserError: there are too few long documents.
    """
    shortest, longest = settings.min_length + settings.gap, settings.max_length + settings.gap
    order = draws.permutation(len(sizes))
    order = order[sizes[order] >= shortest]
    counts = np.clip(sizes[order] // longest, 1, settings.per_document)
    ends, first, found = np.cumsum(counts), 0, {}
    for split, rows in settings.rows.items():
        before = ends[first - 1] if first else 0
        last = int(np.searchsorted(ends, before + rows)) + 1
        if last > len(order):
            raise UserError(
                f"{int(counts.sum()):,} segments of {shortest:,} to {longest:,} tokens in {len(order):,} of "
                f"{len(sizes):,} documents, but {sum(settings.rows.values()):,} examples are wanted; give more text, "
                "fewer --train, a smaller --min-length, or more --per-document"
            )
        document, count = order[first:last], counts[first:last]
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        step = np.repeat(sizes[document] // count, count)
        whole = np.repeat(document, count), number * step, np.minimum(step, longest)
        found[split] = Segments(*(values[:rows] for values in whole))
        first = last
    return found


def pair_halves(segments: Segments, gap: int, draws: made.Draws) -> Halves:
    """Half of the examples have both halves of their segment, the others the second half of a segment as long.

    Segments are paired with their neighbour by length. A pair keeps its own second halves or exchanges them, and both
    its examples are cut to the shorter one's length: so each half is used once, and no half, no length and no position
    tells the answer.

    Args:
        segments: an even number.

    Raises:
        UserError: too many neighbours are of the same document, whose halves cannot be exchanged.
    """
    shuffled = draws.permutation(len(segments.size))
    by_length = shuffled[np.argsort(segments.size[shuffled], kind="stable")].reshape(-1, 2)
    can_exchange = np.flatnonzero(segments.document[by_length[:, 0]] != segments.document[by_length[:, 1]])
    exchanged = len(by_length) // 2
    if len(can_exchange) < exchanged:
        raise UserError("too few documents: most segments of a length are of the same one; give fewer --per-document")
    chosen = can_exchange[draws.permutation(len(can_exchange))[:exchanged]]
    second = by_length.copy()
    second[chosen] = second[chosen, ::-1]
    size = (segments.size[by_length].min(1) - gap) // 2
    mixed = draws.permutation(by_length.size)
    return Halves(by_length.ravel()[mixed], second.ravel()[mixed], np.repeat(size, 2)[mixed])


class CorpusDocuments:
    """Documents as tokens without the ``</s>`` of their sentences.

    Args:
        corpus: what ``lazyformer corpus`` wrote.

    Attributes:
        tokenizer: the corpus's.
        sizes: tokens of each document, (documents,).
        sha256: of where sentences end, by file.

    Raises:
        UserError: no such data, or no tokenizer beside it.
    """

    def __init__(self, corpus: Path):
        folders = list(map(Path, data_folders(str(corpus))))
        tokenizer = tokenizer_of(str(folders[0]))
        if not (tokenizer / SETTINGS_FILE).is_file():
            raise UserError(f"{corpus}: no tokenizer beside the data; give what `lazyformer corpus` wrote, or raw text")
        self.tokenizer: TextTokenizer = load_tokenizer(tokenizer)
        prefixes = [folder / split for folder in folders for split in ("train", "valid")]
        prefixes = [prefix for prefix in prefixes if prefix.with_suffix(".idx").is_file()]
        if not prefixes:
            raise UserError(f"{corpus}: holds no train.idx; give what `lazyformer corpus` wrote, or raw text")
        self.sha256 = {str(prefix.relative_to(corpus)): sha256_of(prefix.with_suffix(".idx")) for prefix in prefixes}
        self._items = list(map(MappedItems, prefixes))
        self._documents = [Documents(items.sizes) for items in self._items]
        self._ends = np.cumsum(list(map(len, self._documents)))
        self.sizes = np.concatenate([each.size(each.starts, each.ends) for each in self._documents])

    def read(self, number: int) -> np.ndarray:
        """The tokens of a document, (T,)."""
        part = int(np.searchsorted(self._ends, number, side="right"))
        within = number - (int(self._ends[part - 1]) if part else 0)
        documents = self._documents[part]
        ids = self._items[part].read(int(documents.starts[within]), int(documents.ends[within]) - 1)
        return ids[ids != self.tokenizer.special.eos]


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
    with prepared_corpus(corpus, vocab_size, tokenizer, settings.seed) as folder:
        documents, draws, splits = CorpusDocuments(folder), made.Draws(settings.seed), {}
        segments = choose_segments(documents.sizes, settings, draws)
        with atomic_folder(out) as unfinished:
            total = sum(settings.rows.values())
            with Progress(total=total, desc="read", unit=" documents") as progress:
                for split, chosen in segments.items():
                    splits[split] = _examples(documents, chosen, settings.gap, draws, progress)
            symbols, eos = len(documents.tokenizer.dictionary), documents.tokenizer.special.eos
            train, test = splits["train"], splits["test"]
            rules = {
                made.CONSTANT: made.constant_answer(train.targets, test.targets),
                WORDS_ALONE: made.bag_of_words(train, test, symbols),
                SHARED_WORDS: made.shared_words(train, test, symbols, eos),
            }
            kept = asdict(settings) | {"corpus": documents.sha256}
            counts = {split: len(np.unique(chosen.document)) for split, chosen in segments.items()}
            found = (documents.tokenizer, splits, rules)
            return made.write_prepared(unfinished, "Pairs", kept, *found, documents=counts)


@contextmanager
def prepared_corpus(corpus: str, vocab_size: int, tokenizer: Optional[Path], seed: int) -> Iterator[Path]:
    """The folder of a prepared corpus; raw text is prepared for as long as the block lasts."""
    folder = Path(corpus)
    if (folder / DICTIONARY_FILE).is_file():
        yield folder
        return
    refuse_without_extra("corpus", "lazyformer diagnostics pairs of raw text")
    with TemporaryDirectory() as scratch:
        given = {"tokenizer": str(tokenizer)} if tokenizer else {"vocab_size": vocab_size}
        build_corpus([corpus], Path(scratch) / "corpus", CorpusSettings(**given, valid_share=0, seed=seed))
        yield Path(scratch) / "corpus"


def _examples(
    documents: CorpusDocuments, segments: Segments, gap: int, draws: made.Draws, progress: Progress
) -> EncodedExamples:
    halves, texts = pair_halves(segments, gap, draws), []
    for document, start, size in zip(*(values.tolist() for values in segments), strict=True):
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


class Pairs(made.MadeBenchmark):
    """Pairs alone."""

    name, key = "Pairs", "pairs"


BENCHMARK = Pairs()
