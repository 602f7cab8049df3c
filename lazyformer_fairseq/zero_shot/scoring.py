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
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lazyformer_fairseq.progress import Progress


@dataclass(frozen=True)
class EncodedSentence:
    """The input of a model.

    Attributes:
        ids: ids (T,), special tokens included, cut to what the model reads.
        scored: places of the sentence's own tokens, in rising order, (S,).
        begins_word: whether each of these tokens begins a word, bool (S,).
        is_cut: whether the sentence is longer than the model reads.
        unknown: number of tokens that the vocabulary lacks.
    """

    ids: np.ndarray
    scored: np.ndarray
    begins_word: np.ndarray
    is_cut: bool = False
    unknown: int = 0


@dataclass(frozen=True)
class SentenceScores:
    """The scores of sentences.

    Attributes:
        nats: log-likelihood or pseudo-log-likelihood of each sentence.
        cut: number of sentences that were longer than the model reads.
        unknown: number of sentences with a token that the vocabulary lacks.
        tokens: number of tokens that were scored.
    """

    nats: dict[str, float] = field(default_factory=dict)
    cut: int = 0
    unknown: int = 0
    tokens: int = 0


class SentenceScorer(ABC):
    """A language model that gives each sentence a score.

    Attributes:
        method: the name of the score, for reports.
    """

    method: str

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """Return the tensors that the scores depend on, by name."""

    @abstractmethod
    def encode(self, sentence: str) -> EncodedSentence:
        """Return a sentence as the model reads it."""

    @abstractmethod
    def scores_of(self, sentences: Sequence[EncodedSentence], max_tokens: int) -> np.ndarray:
        """Return the scores, float64 (B,), of sentences of equal length, `max_tokens` tokens at a time."""

    def score(self, sentences: Sequence[str], name: str, max_tokens: int = 16384) -> SentenceScores:
        """Score sentences, with a progress bar.

        Args:
            sentences: raw text, each once.
            name: of the model, for the bar.
            max_tokens: tokens of a batch; one sentence at least.
        """
        encoded = {sentence: self.encode(sentence) for sentence in sentences}
        by_length = sorted(encoded, key=lambda sentence: len(encoded[sentence].ids))
        tokens = sum(len(each.scored) for each in encoded.values())
        found: dict[str, float] = {}
        with Progress(total=tokens, desc=name, unit=" tokens", unit_scale=True) as progress:
            for _, group in itertools.groupby(by_length, key=lambda sentence: len(encoded[sentence].ids)):
                while chunk := list(itertools.islice(group, 256)):
                    inputs = [encoded[sentence] for sentence in chunk]
                    found.update(zip(chunk, self.scores_of(inputs, max_tokens).tolist(), strict=True))
                    progress.update(sum(len(each.scored) for each in inputs))
        return SentenceScores(
            nats=found,
            cut=sum(each.is_cut for each in encoded.values()),
            unknown=sum(each.unknown > 0 for each in encoded.values()),
            tokens=tokens,
        )


class MaskedScorer(SentenceScorer):
    """A masked LM.

    Args:
        mask: id of the mask.
        masks_rest_of_word: also mask the tokens of the same word on the right of the scored one.
    """

    def __init__(self, mask: int, masks_rest_of_word: bool = False):
        self.mask = mask
        self.masks_rest_of_word = masks_rest_of_word
        self.method = "pseudo-log-likelihood"
        if masks_rest_of_word:
            self.method = "pseudo-log-likelihood, the rest of the word masked too"

    @abstractmethod
    def log_probabilities(self, ids_BT: np.ndarray, places: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return log P of a target at a place in each row of masked ids, (B,)."""

    def scores_of(self, sentences: Sequence[EncodedSentence], max_tokens: int) -> np.ndarray:
        """Return pseudo-log-likelihoods; each scored token of each sentence is a row of a batch."""
        totals = np.zeros(len(sentences))
        rows = self._rows(sentences)
        per_batch = max(1, max_tokens // len(sentences[0].ids))
        while batch := list(itertools.islice(rows, per_batch)):
            numbers, masked, places, targets = zip(*batch, strict=True)
            found = self.log_probabilities(np.stack(masked), np.array(places), np.array(targets))
            np.add.at(totals, list(numbers), found)
        return totals

    def _rows(self, sentences: Sequence[EncodedSentence]) -> Iterator[tuple[int, np.ndarray, int, int]]:
        """Yield each sentence's number, its masked ids, the place that is scored, and the token that belongs there."""
        for number, sentence in enumerate(sentences):
            for index, place in enumerate(sentence.scored):
                hidden = [place]
                if self.masks_rest_of_word:
                    rest = itertools.takewhile(
                        lambda other: not sentence.begins_word[other],  # noqa: B023 - used before the next round
                        range(index + 1, len(sentence.scored)),
                    )
                    hidden.extend(sentence.scored[other] for other in rest)
                masked = sentence.ids.copy()
                masked[hidden] = self.mask
                yield number, masked, place, sentence.ids[place]


class CausalScorer(SentenceScorer):
    """A causal LM."""

    method = "log-likelihood"

    @abstractmethod
    def token_log_probabilities(self, ids_BT: np.ndarray) -> np.ndarray:
        """Return log P of each token but the first, given those before it, (B, T - 1)."""

    def scores_of(self, sentences: Sequence[EncodedSentence], max_tokens: int) -> np.ndarray:
        """Return log-likelihoods of the sentences' own tokens."""
        per_batch = max(1, max_tokens // len(sentences[0].ids))
        totals = []
        for start in range(0, len(sentences), per_batch):
            batch = sentences[start : start + per_batch]
            found = self.token_log_probabilities(np.stack([sentence.ids for sentence in batch]))
            totals.extend(found[row, sentence.scored - 1].sum() for row, sentence in enumerate(batch))
        return np.array(totals, dtype=np.float64)


def log_softmax_at(logits_BV: Tensor, targets: np.ndarray) -> np.ndarray:
    """Return the logarithms of the targets' probabilities, float64 (B,)."""
    wanted = torch.from_numpy(targets).to(logits_BV.device)
    return -F.cross_entropy(logits_BV.float(), wanted, reduction="none").double().cpu().numpy()
