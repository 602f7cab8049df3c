"""Pairs of texts for next-sentence prediction, drawn as BERT draws them, and masked, anew in each epoch.

Devlin et al., 2019, section 3.1 and appendix A.2; what these leave open is as in ``create_pretraining_data.py`` of
github.com/google-research/bert. Input is fairseq-preprocess's format: one sentence an item, ending ``</s>``; a document
boundary is an item of ``</s>`` alone. The ``</s>`` are no part of the texts.
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

SHORT = 0.1  # share of documents whose pairs aim at a length of their own, shorter than there is room for
RANDOM = 0.5  # share of pairs whose second text is of another document, where there is a choice


class Documents:
    """Places of documents among the items of a dataset.

    Args:
        item_sizes: tokens an item, its ``</s>`` included; 1 for a boundary. Runs of several count as one.

    Attributes:
        starts: the first item of each document, (documents,).
        ends: one past the last item of each document, (documents,).
        text_before: tokens of text before each item, and last those of all, int64 (items + 1,).
    """

    def __init__(self, item_sizes: np.ndarray):
        is_text = np.concatenate([[False], np.asarray(item_sizes) > 1, [False]])
        borders = np.flatnonzero(is_text[1:] != is_text[:-1])
        self.starts = borders[::2]
        self.ends = borders[1::2]
        self.text_before = np.zeros(len(item_sizes) + 1, np.int64)
        np.cumsum(item_sizes, out=self.text_before[1:])
        self.text_before -= np.arange(len(self.text_before))  # every item's </s>

    def __len__(self) -> int:
        return len(self.starts)

    def reach(self, start: np.ndarray, length: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """One past the last of the sentences from `start` on, at least one, that are `length` tokens together.

        Or as many as there are until the end of the document; all three (pairs,).
        """
        enough = np.searchsorted(self.text_before, self.text_before[start] + length)
        return np.minimum(np.maximum(enough, start + 1), self.ends[documents])

    def size(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return tokens of text in items `start` to `end`, the latter not included."""
        return self.text_before[end] - self.text_before[start]


class Texts(NamedTuple):
    """One text of each pair: whole sentences of one document, less what is cut of them; all int32 (pairs,).

    Attributes:
        first, end: its first item, and one past its last.
        skip: tokens that are cut from its front.
        size: tokens that are left; those behind are cut too.
    """

    first: np.ndarray
    end: np.ndarray
    skip: np.ndarray
    size: np.ndarray


@dataclass(frozen=True)
class Pairs:
    """The pairs of an epoch, in the order of their first texts.

    Attributes:
        first, second: the two texts of each.
        is_random: whether the second text is of another document, bool (pairs,); else it follows the first.
    """

    first: Texts
    second: Texts
    is_random: np.ndarray

    def __len__(self) -> int:
        return len(self.is_random)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Tokens of text in each pair."""
        return self.first.size + self.second.size


def draw_pairs(documents: Documents, room: int, random: np.random.Generator) -> Pairs:
    """Draw the pairs of an epoch.

    Each document is cut into chunks of sentences that are at least as long as its aim: `room`, or in 10% of the
    documents a length from 2 to `room`. A chunk's first text ends after one of its sentences, at random. In half of the
    cases the rest follows it; in the other half, and after a chunk of one sentence, comes a text of another document,
    from a random sentence on, and the next chunk begins with the rest. So each sentence is once in a first text or
    follows one; as a random second text some come again. Pairs longer than `room` lose tokens of their longer text,
    each from its front or its back.

    Args:
        random: generator of all that is drawn.
        documents: two documents at least.
        room: tokens of text that a pair may have, at least 2.
    """
    chunks = _draw_chunks(documents, room, random)
    second_start = chunks.border.copy()
    second_end = chunks.stop.copy()
    changed = np.flatnonzero(chunks.is_random)
    other = random.integers(0, len(documents) - 1, len(changed))
    other += other >= chunks.document[changed]
    second_start[changed] = random.integers(documents.starts[other], documents.ends[other])
    left = chunks.aim[changed] - documents.size(chunks.start[changed], chunks.border[changed])
    second_end[changed] = documents.reach(second_start[changed], left, other)

    first_size = documents.size(chunks.start, chunks.border)
    second_size = documents.size(second_start, second_end)
    # The longer text, of equals the second, loses tokens until both fit.
    first_kept = np.minimum(first_size, np.maximum(room - second_size, -(-room // 2)))
    second_kept = np.minimum(second_size, room - first_kept)
    return Pairs(
        _cut(chunks.start, chunks.border, first_size, first_kept, random),
        _cut(second_start, second_end, second_size, second_kept, random),
        chunks.is_random,
    )


def _cut(
    first: np.ndarray,
    end: np.ndarray,
    size: np.ndarray,
    kept: np.ndarray,
    random: np.random.Generator,
) -> Texts:
    """Return texts of which so many tokens are kept; each of the others is cut from the front or the back."""
    skip = random.binomial(size - kept, 0.5)
    return Texts(*(each.astype(np.int32) for each in (first, end, skip, kept)))


@dataclass(frozen=True)
class Chunks:
    """Runs of sentences that pairs are made of, in order; all (chunks,).

    Attributes:
        document: document of each.
        start: first item of the first text.
        border: one past its last item.
        stop: one past the last item that follows.
        is_random: whether a text of another document replaces what follows.
        aim: tokens that a pair of this document is to have.
    """

    document: np.ndarray
    start: np.ndarray
    border: np.ndarray
    stop: np.ndarray
    is_random: np.ndarray
    aim: np.ndarray


def _draw_chunks(documents: Documents, room: int, random: np.random.Generator) -> Chunks:
    """Draw all documents at once: the first chunk of each, then the second of each that has one, and so on."""
    aims = np.full(len(documents), room)
    is_short = random.random(len(documents)) < SHORT
    aims[is_short] = random.integers(2, room + 1, is_short.sum())
    places = documents.starts.copy()
    unfinished = np.arange(len(documents))
    found = []
    size = int((documents.ends - documents.starts).sum())
    with Progress(total=size, desc="draw pairs", unit=" sentences", delay=2, leave=False) as progress:
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
    """``<s> first </s> second </s>``, see :func:`~lazyformer_fairseq.data.datasets.sentence_pairs.draw_pairs`.

    An epoch has a number of pairs of its own.

    Args:
        items, item_sizes, tokens_per_sample, bos, eos, masking, seed, shuffle, name: as for
            :class:`MaskedBlocksDataset`.
        separators: how many ``</s>`` stand between the two texts.
        has_token_types: whether batches say which text a token is of.

    Raises:
        UserError: where the items are not sentences of two documents or more, or a pair has no room.
    """

    separators: int = 2
    has_token_types: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.room = self.tokens_per_sample - 2 - self.separators  # of text
        if self.room < 2:
            raise UserError(
                f"tokens_per_sample is {self.tokens_per_sample}; a pair needs room for <s>, two texts and "
                f"{self.separators + 1} </s>: at least {self.separators + 4}"
            )
        self.documents = Documents(self.item_sizes)
        if len(self.documents) < 2:
            found = "no sentence"
            if len(self.documents):
                found = f"{len(self.items)} items, all of one document"
            raise UserError(
                f"{self.name}: holds {found}; --next-sentence draws texts of other documents, and needs two or more, "
                "with an empty line between them where they are binarised (lazyformer corpus leaves one)"
            )

    @cached_property
    def pairs(self) -> Pairs:
        """Pairs of the epoch."""
        return draw_pairs(
            self.documents,
            self.room,
            np.random.default_rng((self.seed, self.epoch)),
        )

    @cached_property
    def sizes(self) -> np.ndarray:  # type: ignore[override]  # drawn when they are asked for
        """Tokens of each pair in this epoch, all counted."""
        return self.pairs.sizes + (2 + self.separators)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; its pairs are drawn when they are asked for."""
        if epoch != self.epoch:
            vars(self).pop("pairs", None)
            vars(self).pop("sizes", None)
        super().set_epoch(epoch)

    def block(self, index: int) -> np.ndarray:
        """Pair `index` as ids (T,), before masking."""
        first = self._text(self.pairs.first, index)
        second = self._text(self.pairs.second, index)
        block = np.full(self.sizes[index], self.eos)
        block[0] = self.bos
        block[1 : 1 + len(first)] = first
        block[-1 - len(second) : -1] = second
        return block

    def _text(self, texts: Texts, index: int) -> np.ndarray:
        tokens = read_items(self.items, int(texts.first[index]), int(texts.end[index]) - 1)
        skip = int(texts.skip[index])
        return tokens[tokens != self.eos][skip : skip + int(texts.size[index])]

    def __getitem__(self, index: int) -> dict:
        return {
            **super().__getitem__(index),
            "is_random": bool(self.pairs.is_random[index]),
        }

    def collater(self, samples: list[dict]) -> dict:
        """Return a batch with `next_sentence`, int64 (B,): BERT's 0 if the second text follows, 1 if it does not.

        For models with token types `net_input` has `token_types` (B, T) too.
        """
        if not (batch := super().collater(samples)):
            return batch
        batch["next_sentence"] = torch.tensor([int(sample["is_random"]) for sample in samples])
        if self.has_token_types:
            tokens = batch["net_input"]["src_tokens"]
            batch["net_input"]["token_types"] = token_types_of(tokens, self.eos, self.masking.pad_index)
        return batch
