"""The log-likelihood of sentences under masked, causal and count models, in nats.

A masked LM defines no likelihood of a sentence. Its pseudo-log-likelihood (Salazar et al., 2020, "Masked Language Model
Scoring", section 2) is the sum over its tokens of log P(token | all others), with each token masked in turn. That makes
words of several tokens too likely, because the rest of a word gives the token away. The variant of Kauf and Ivanova
(2023, "A Better Way to Do Masked Language Model Scoring", PLL-word-l2r) therefore also masks the tokens of the same
word to the right.

Every model reads batches of sentences of the same length. So there is no padding, and a score does not depend on the
other sentences in the batch.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np
from torch import Tensor

from lazyformer_fairseq.progress import Progress

SENTENCES_AT_ONCE = 256


@dataclass(frozen=True)
class EncodedSentence:
    """A sentence as the input of a model.

    Attributes:
        ids: token ids (T,) including special tokens, cut to the model's maximum length.
        is_scored: whether each token belongs to the sentence itself, bool (T,).
        begins_word: whether each token begins a word, bool (T,).
        is_cut: whether the sentence exceeds the model's maximum length.
        is_unknown: whether one of its tokens is not in the vocabulary.
    """

    ids: np.ndarray
    is_scored: np.ndarray
    begins_word: np.ndarray
    is_cut: bool = False
    is_unknown: bool = False


@dataclass(frozen=True)
class LanguageModel:
    """The parts of a model that scoring needs.

    Attributes:
        encode: encodes a sentence for the model.
        log_probabilities: takes token ids (B, T), the places to predict, bool (B, T), and the right ids at these places
            (M,), row by row; returns the log-probability of each, float64 (M,). A causal model predicts from the ids
            before.
        weights: the tensors that the scores depend on, by name.
        mask: the id of a masked LM's mask; None for a causal model.
        name: the type of score, for reports.
    """

    encode: Callable[[str], EncodedSentence]
    log_probabilities: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    weights: Mapping[str, Tensor]
    mask: Optional[int] = None
    name: str = "log-likelihood"


@dataclass(frozen=True)
class SentenceScores:
    """The scores of sentences.

    Attributes:
        nats: the log-likelihood or pseudo-log-likelihood of each sentence.
        cut: number of sentences that exceed the model's maximum length.
        unknown: number of sentences with a token that is not in the vocabulary.
        tokens: number of scored tokens.
    """

    nats: dict[str, float]
    cut: int
    unknown: int
    tokens: int


def score(
    model: LanguageModel,
    sentences: Sequence[str],
    description: str,
    max_tokens: int = 16384,
    masks_rest_of_word: bool = False,
) -> SentenceScores:
    """Score sentences, with a progress bar.

    Args:
        model: the model.
        sentences: raw texts without repetition.
        description: the label of the progress bar.
        max_tokens: maximum number of tokens per batch; a batch has at least one row.
        masks_rest_of_word: whether to also mask the tokens of the same word to the right of the scored one.
    """
    encoded = {sentence: model.encode(sentence) for sentence in sentences}
    by_length = sorted(encoded, key=lambda sentence: len(encoded[sentence].ids))
    tokens = sum(int(each.is_scored.sum()) for each in encoded.values())
    nats: dict[str, float] = {}
    with Progress(total=tokens, desc=description, unit=" tokens", unit_scale=True) as progress:
        for length, group in itertools.groupby(by_length, key=lambda sentence: len(encoded[sentence].ids)):
            while chunk := list(itertools.islice(group, SENTENCES_AT_ONCE)):
                totals = np.zeros(len(chunk))
                rows = _rows([encoded[sentence] for sentence in chunk], model.mask, masks_rest_of_word)
                while batch := list(itertools.islice(rows, max(1, max_tokens // length))):
                    numbers = np.array([number for number, *_ in batch])
                    ids = np.stack([seen for _, seen, _ in batch])
                    at = np.stack([places for _, _, places in batch])
                    targets = np.stack([encoded[chunk[number]].ids for number in numbers])[at]
                    np.add.at(totals, numbers.repeat(at.sum(axis=1)), model.log_probabilities(ids, at, targets))
                    progress.update(len(targets))
                nats.update(zip(chunk, totals.tolist(), strict=True))
    return SentenceScores(
        nats=nats,
        cut=sum(each.is_cut for each in encoded.values()),
        unknown=sum(each.is_unknown for each in encoded.values()),
        tokens=tokens,
    )


def _rows(
    sentences: Sequence[EncodedSentence],
    mask: Optional[int],
    masks_rest_of_word: bool,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the rows that a model reads: number of the sentence, ids, and places to predict, bool (T,).

    A causal model reads each sentence once; a masked LM reads a row per token.
    """
    for number, sentence in enumerate(sentences):
        if mask is None:
            yield number, sentence.ids, sentence.is_scored
            continue
        for place in np.flatnonzero(sentence.is_scored):
            end = place + 1
            if masks_rest_of_word:
                while sentence.is_scored[end] and not sentence.begins_word[end]:
                    end += 1
            masked = sentence.ids.copy()
            masked[place:end] = mask
            at = np.zeros(len(masked), dtype=bool)
            at[place] = True
            yield number, masked, at
