"""The log-likelihood of sentences under masked, causal and count models, in nats.

A masked LM does not define the likelihood of a sentence. The pseudo-log-likelihood (Salazar et al., 2020, "Masked
Language Model Scoring", section 2) is the sum over tokens of log P(token | all other tokens), computed by masking one
token at a time. It overestimates multi-token words, because the rest of a word reveals the masked token. The variant by
Kauf and Ivanova (2023, "A Better Way to Do Masked Language Model Scoring", PLL-word-l2r) therefore also masks the
following tokens of the same word.

All sentences in a batch have the same length. There is no padding, so a sentence's score does not depend on the other
sentences in the batch.
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
    """A sentence, tokenized for a model.

    Attributes:
        ids: token ids (T,) including special tokens, truncated to the model's maximum length.
        is_scored: True for the sentence's own tokens and False for special tokens, bool (T,).
        begins_word: True for tokens at the beginning of a word, bool (T,).
        is_cut: whether the sentence exceeds the model's maximum length.
        is_unknown: whether any token is not in the vocabulary.
    """

    ids: np.ndarray
    is_scored: np.ndarray
    begins_word: np.ndarray
    is_cut: bool = False
    is_unknown: bool = False


@dataclass(frozen=True)
class LanguageModel:
    """A language model's interface for scoring.

    Attributes:
        encode: a function that tokenizes a sentence for the model.
        log_probabilities: a function that takes token ids (B, T), the positions to predict as bool (B, T), and the
            target ids at these positions (M,), row by row. It returns the targets' log-probabilities, float64 (M,).
            Causal models predict a position from the ids before it.
        weights: the tensors that the scores depend on, by name.
        mask: the id of a masked LM's mask token; None for a causal model.
        name: the name of the scoring method, for reports.
    """

    encode: Callable[[str], EncodedSentence]
    log_probabilities: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    weights: Mapping[str, Tensor]
    mask: Optional[int] = None
    name: str = "log-likelihood"


@dataclass(frozen=True)
class SentenceScores:
    """The scores of a set of sentences.

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
        sentences: distinct raw texts.
        description: the label of the progress bar.
        max_tokens: maximum number of tokens per batch; a batch has at least one row.
        masks_rest_of_word: whether to also mask the tokens of the same word that follow the scored token.
    """
    encoded = {sentence: model.encode(sentence) for sentence in sentences}

    def length_of(sentence: str) -> int:
        return len(encoded[sentence].ids)

    by_length = sorted(encoded, key=length_of)
    tokens = sum(int(each.is_scored.sum()) for each in encoded.values())
    nats: dict[str, float] = {}
    with Progress(total=tokens, desc=description, unit=" tokens", unit_scale=True) as progress:
        for length, group in itertools.groupby(by_length, key=length_of):
            while chunk := list(itertools.islice(group, SENTENCES_AT_ONCE)):
                totals = np.zeros(len(chunk))
                rows = _rows([encoded[sentence] for sentence in chunk], model.mask, masks_rest_of_word)
                while batch := list(itertools.islice(rows, max(1, max_tokens // length))):
                    numbers = np.array([number for number, *_ in batch])
                    ids = np.stack([seen for _, seen, _ in batch])
                    at = np.stack([places for _, _, places in batch])
                    unmasked = np.stack([encoded[chunk[number]].ids for number in numbers])
                    targets = unmasked[at]
                    sentence_of_target = numbers.repeat(at.sum(axis=1))
                    np.add.at(totals, sentence_of_target, model.log_probabilities(ids, at, targets))
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
    """Yield input rows: the sentence's index, its ids, and the positions to predict, bool (T,).

    There is one row per sentence for causal models, and one row per token for masked LMs.
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
