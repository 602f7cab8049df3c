"""The log-likelihood of sentences, by masked, causal and count models, in nats.

A masked LM has no likelihood of a sentence. Its pseudo-log-likelihood (Salazar et al., 2020, "Masked Language Model
Scoring", section 2) is the sum over its tokens of log P(token | all others), each token masked in turn. Words of
several tokens come out too likely that way, because the rest of the word gives a token away; the variant of Kauf and
Ivanova (2023, "A Better Way to Do Masked Language Model Scoring", PLL-word-l2r) therefore also masks the tokens of the
same word on its right.

Every model reads batches of sentences of one length. So there is no padding, and a score does not depend on the
sentences beside it.
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
    """The input of a model.

    Attributes:
        ids: ids (T,), special tokens included, cut to what the model reads.
        is_scored: whether a token is one of the sentence's own, bool (T,).
        begins_word: whether a token begins a word, bool (T,).
        is_cut: whether the sentence is longer than the model reads.
        is_unknown: whether the vocabulary lacks one of its tokens.
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
        encode: returns a sentence as the model reads it.
        log_probabilities: takes ids (B, T), the places to predict, bool (B, T), and the ids that belong there (M,), row
            by row; returns log P of each, float64 (M,). A causal model predicts from the ids before.
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
        nats: log-likelihood or pseudo-log-likelihood of each sentence.
        cut: number of sentences that were longer than the model reads.
        unknown: number of sentences with a token that the vocabulary lacks.
        tokens: number of tokens that were scored.
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
        sentences: raw text, each once.
        description: the label of the bar.
        max_tokens: tokens of a batch; one row at least.
        masks_rest_of_word: also mask the tokens of the same word on the right of the scored one.
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
    """Yield the rows that a model reads: the number of the sentence, the ids, and the places to predict, bool (T,).

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
