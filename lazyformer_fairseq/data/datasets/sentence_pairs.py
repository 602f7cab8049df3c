"""Masked pairs of texts for BERT's next-sentence prediction, sampled again in each epoch.

The sampling follows Devlin et al., 2019, section 3.1 and appendix A.2; details not specified there follow
``create_pretraining_data.py`` of github.com/google-research/bert. The input has fairseq-preprocess's format: each item
is a sentence that ends with ``</s>``, and an item with only ``</s>`` is a document boundary. These ``</s>`` are not
part of the texts.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from lazyformer_fairseq.data.datasets.labelled_texts import token_types_of
from lazyformer_fairseq.data.datasets.masked_blocks import MaskedBlocksDataset
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.progress import Progress
from lazyformer_fairseq.storage.indexed_format import read_items

SHORT = 0.1  # probability that a document gets a random target length below the maximum
RANDOM = 0.5  # probability that the second text is from another document, if both are possible


class Documents:
    """The item ranges of a dataset's documents.

    Args:
        item_sizes: number of tokens per item, including its ``</s>``; 1 for a boundary. Consecutive boundaries count as
            one.

    Attributes:
        starts: index of each document's first item, (documents,).
        ends: index of each document's end, exclusive, (documents,).
        text_before: number of text tokens before each item, followed by their total number, int64 (items + 1,).
    """

    def __init__(self, item_sizes: np.ndarray):
        is_text = np.concatenate([[False], np.asarray(item_sizes) > 1, [False]])
        borders = np.flatnonzero(is_text[1:] != is_text[:-1])
        self.starts = borders[::2]
        self.ends = borders[1::2]
        self.text_before = np.zeros(len(item_sizes) + 1, np.int64)
        np.cumsum(item_sizes, out=self.text_before[1:])
        self.text_before -= np.arange(len(self.text_before))  # the </s> of each item is not text

    def __len__(self) -> int:
        return len(self.starts)

    def reach(self, start: np.ndarray, length: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return the end (exclusive) of the shortest run of sentences from `start` with at least `length` tokens.

        A run has at least one sentence and stops at the end of the document. All arrays are (pairs,).
        """
        enough = np.searchsorted(self.text_before, self.text_before[start] + length)
        return np.minimum(np.maximum(enough, start + 1), self.ends[documents])

    def size(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the number of text tokens in items `start` to `end` (exclusive)."""
        return self.text_before[end] - self.text_before[start]


class Texts(NamedTuple):
    """The first or second texts of all pairs, as truncated runs of sentences; all arrays are int32 (pairs,).

    Attributes:
        first, end: indices of the first item and of the end, exclusive.
        skip: number of tokens truncated at the front.
        size: number of tokens kept; any tokens after them are truncated.
    """

    first: np.ndarray
    end: np.ndarray
    skip: np.ndarray
    size: np.ndarray


@dataclass(frozen=True)
class Pairs:
    """All pairs of an epoch, ordered by the position of their first texts.

    Attributes:
        first, second: the first and second texts of the pairs.
        is_random: True if the second text is from another document instead of following the first, bool (pairs,).
    """

    first: Texts
    second: Texts
    is_random: np.ndarray

    def __len__(self) -> int:
        return len(self.is_random)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Number of text tokens per pair."""
        return self.first.size + self.second.size


def draw_pairs(documents: Documents, room: int, random: np.random.Generator) -> Pairs:
    """Sample the pairs of an epoch.

    Each document is split into chunks of sentences that are at least as long as the document's target length, which is
    `room` or, in 10% of the documents, a random length from 2 to `room`. The first text of a chunk ends after a random
    sentence. In half of the cases, the second text is the rest of the chunk. In the other half, or if the chunk has
    only one sentence, the second text starts at a random sentence of another document, and the next chunk starts with
    the rest of this one. Each sentence therefore occurs once in the pairs of its own document, and some sentences occur
    again in random second texts. If a pair is longer than `room`, tokens are removed from the longer text, at a random
    end each time.

    Args:
        documents: at least two documents.
        room: maximum number of text tokens per pair, at least 2.
        random: random number generator.
    """
    chunks = _draw_chunks(documents, room, random)
    first_size = documents.size(chunks.start, chunks.border)

    second_start = chunks.border.copy()
    second_end = chunks.stop.copy()
    changed = np.flatnonzero(chunks.is_random)
    other = random.integers(0, len(documents) - 1, len(changed))
    other += other >= chunks.document[changed]
    second_start[changed] = random.integers(documents.starts[other], documents.ends[other])
    left = chunks.aim[changed] - first_size[changed]
    second_end[changed] = documents.reach(second_start[changed], left, other)
    second_size = documents.size(second_start, second_end)

    # Tokens are removed from the longer text, or from the second if they are equally long, until both fit.
    half = -(-room // 2)
    first_kept = np.minimum(first_size, np.maximum(room - second_size, half))
    second_kept = np.minimum(second_size, room - first_kept)
    return Pairs(
        first=_cut(chunks.start, chunks.border, first_size, first_kept, random),
        second=_cut(second_start, second_end, second_size, second_kept, random),
        is_random=chunks.is_random,
    )


def _cut(
    first: np.ndarray,
    end: np.ndarray,
    size: np.ndarray,
    kept: np.ndarray,
    random: np.random.Generator,
) -> Texts:
    """Truncate texts to `kept` tokens; each removed token is taken from the front or the back at random."""
    skip = random.binomial(size - kept, 0.5)
    return Texts(
        first=first.astype(np.int32),
        end=end.astype(np.int32),
        skip=skip.astype(np.int32),
        size=kept.astype(np.int32),
    )


@dataclass(frozen=True)
class Chunks:
    """Runs of sentences from which pairs are built, in order; all arrays are (chunks,).

    Attributes:
        document: index of the chunk's document.
        start: index of the first text's first item.
        border: index of the first text's end, exclusive.
        stop: index of the chunk's end, exclusive.
        is_random: True if the second text is from another document instead of the rest of the chunk.
        aim: target number of tokens per pair of this document.
    """

    document: np.ndarray
    start: np.ndarray
    border: np.ndarray
    stop: np.ndarray
    is_random: np.ndarray
    aim: np.ndarray


def _draw_chunks(documents: Documents, room: int, random: np.random.Generator) -> Chunks:
    """Sample the chunks of all documents, vectorized over documents: all first chunks, then all second chunks, etc."""
    aims = np.full(len(documents), room)
    is_short = random.random(len(documents)) < SHORT
    aims[is_short] = random.integers(2, room + 1, is_short.sum())
    places = documents.starts.copy()
    unfinished = np.arange(len(documents))
    found = []
    size = int((documents.ends - documents.starts).sum())
    with Progress(total=size, desc="sample pairs", unit=" sentences", delay=2, leave=False) as progress:
        while len(unfinished):
            start = places[unfinished]
            stop = documents.reach(start, aims[unfinished], unfinished)
            border = start + random.integers(1, np.maximum(stop - start, 2))
            is_random = (stop - start == 1) | (random.random(len(unfinished)) < RANDOM)
            found.append(np.stack([unfinished, start, border, stop, is_random]))
            places[unfinished] = np.where(is_random, border, stop)
            progress.update(int((places[unfinished] - start).sum()))
            unfinished = unfinished[places[unfinished] < documents.ends[unfinished]]
    rows = np.concatenate(found, axis=1)
    document, start, border, stop, is_random = rows[:, np.argsort(rows[1])]
    return Chunks(document, start, border, stop, is_random.astype(bool), aims[document])


@dataclass(eq=False, repr=False)
class SentencePairsDataset(MaskedBlocksDataset):
    """A dataset of masked pairs, ``<s> first </s> second </s>``, sampled by :func:`draw_pairs`.

    The number of pairs varies between epochs.

    Args:
        items, item_sizes, tokens_per_sample, bos, eos, masking, seed, shuffle, name: see :class:`MaskedBlocksDataset`.
        separators: number of ``</s>`` between the two texts.
        has_token_types: whether batches include token types.

    Raises:
        UserError: the items are not sentences, there are fewer than two documents, or `tokens_per_sample` is too small
            for a pair.
    """

    separators: int = 2
    has_token_types: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.room = self.tokens_per_sample - 2 - self.separators  # maximum number of text tokens per pair
        if self.room < 2:
            raise UserError(
                f"--tokens-per-sample {self.tokens_per_sample}: must be at least {self.separators + 4}, because a pair "
                f"consists of <s>, two texts and {self.separators + 1} </s> tokens"
            )
        self.documents = Documents(self.item_sizes)
        if len(self.documents) < 2:
            found = "no sentences"
            if len(self.documents):
                found = f"{len(self.items)} items, all from one document"
            raise UserError(
                f"{self.name} contains {found}; --next-sentence draws texts from other documents, so there must be "
                "at least two documents, binarized with an empty line between them (as `lazyformer corpus` does)"
            )

    @cached_property
    def pairs(self) -> Pairs:
        """Pairs of the current epoch."""
        return draw_pairs(
            self.documents,
            self.room,
            np.random.default_rng((self.seed, self.epoch)),
        )

    @cached_property
    def sizes(self) -> np.ndarray:  # type: ignore[override]  # sampled on first use
        """Number of tokens per pair in the current epoch, including special tokens."""
        return self.pairs.sizes + (2 + self.separators)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch; its pairs are sampled on first use."""
        if epoch != self.epoch:
            vars(self).pop("pairs", None)
            vars(self).pop("sizes", None)
        super().set_epoch(epoch)

    def block(self, index: int) -> np.ndarray:
        """Return pair `index` as ids (T,), before masking."""
        first = self._text(self.pairs.first, index)
        second = self._text(self.pairs.second, index)
        block = np.full(self.sizes[index], self.eos)
        block[0] = self.bos
        block[1 : 1 + len(first)] = first
        block[-1 - len(second) : -1] = second
        return block

    def _text(self, texts: Texts, index: int) -> np.ndarray:
        first_item = int(texts.first[index])
        last_item = int(texts.end[index]) - 1
        tokens = read_items(self.items, first_item, last_item)
        text = tokens[tokens != self.eos]

        skip = int(texts.skip[index])
        size = int(texts.size[index])
        return text[skip : skip + size]

    def __getitem__(self, index: int) -> dict:
        return {
            **super().__getitem__(index),
            "is_random": bool(self.pairs.is_random[index]),
        }

    def collater(self, samples: list[dict]) -> dict:
        """Collate samples into a batch with `next_sentence`, int64 (B,).

        As in BERT, `next_sentence` is 0 if the second text follows the first and 1 otherwise. For models with token
        types, `net_input` also has `token_types` (B, T).
        """
        if not (batch := super().collater(samples)):
            return batch
        batch["next_sentence"] = torch.tensor([int(sample["is_random"]) for sample in samples])
        if self.has_token_types:
            tokens = batch["net_input"]["src_tokens"]
            batch["net_input"]["token_types"] = token_types_of(tokens, self.eos, self.masking.pad_index)
        return batch
