"""From logits of windows to answers: text of the context, as it stands there."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lazyformer_fairseq.data.squad.spans import Spans, best_spans
from lazyformer_fairseq.data.squad.windows import Windows

USUAL_ANSWERS = 20  # kept to a question, as run_squad.py does


class FoundAnswer(NamedTuple):
    """One answer.

    Attributes:
        text: characters `start` to `end` of the context.
        start, end: the first character, and one past the last.
        score: the sum of the logits of its start and its end.
        probability: among the answers that were kept to the question.
    """

    text: str
    start: int
    end: int
    score: float
    probability: float


class SpanCollector:
    """Takes logits of windows in any order; then each question has the best spans of all its windows.

    A question is always answered: with no score for "no answer", as version 1.1 has none.

    Args:
        windows: of all questions.
        contexts: the texts.
        longest: tokens of an answer.
        n_best: answers to a question.
    """

    def __init__(self, windows: Windows, contexts: Sequence[str], longest: int = 30, n_best: int = USUAL_ANSWERS):
        self.windows = windows
        self.contexts = contexts
        self.longest = longest
        self.n_best = n_best
        self._found: dict[int, list[FoundAnswer]] = {}

    def add(self, index: np.ndarray, starts_BT: np.ndarray, ends_BT: np.ndarray) -> None:
        """Takes the logits of the windows `index` (B,); inputs may be padded on the right."""
        for window, spans in zip(index.tolist(), self.spans(index, starts_BT, ends_BT), strict=True):
            self._found.setdefault(int(self.windows.question[window]), []).extend(spans)

    def spans(self, index: np.ndarray, starts_BT: np.ndarray, ends_BT: np.ndarray) -> list[list[FoundAnswer]]:
        """The best spans of each of the windows `index` (B,), the best first, without probabilities (nan)."""
        if not len(self.windows.offsets):  # control characters alone, say: there is nothing to point at
            return [[] for _ in index]
        is_start, is_end = allowed(self.windows, index, starts_BT.shape[1])
        best = best_spans(starts_BT, ends_BT, is_start, is_end, self.longest, self.n_best)
        firsts, lasts = characters(self.windows, index, best)
        paragraphs = self.windows.paragraph[self.windows.question[index]].tolist()
        return [
            [
                FoundAnswer(self.contexts[paragraph][start:end], start, end, score, float("nan"))
                for start, end, score in zip(*row, strict=True)
                if score > -np.inf
            ]
            for paragraph, *row in zip(paragraphs, firsts.tolist(), lasts.tolist(), best.scores.tolist(), strict=True)
        ]

    def answers(self) -> list[list[FoundAnswer]]:
        """For each question its best answers, the best first; none where its context has no token of text.

        A text that stands in several places counts once, at the best.
        """
        return [self._answers(self._found.get(number, [])) for number in range(len(self.windows.paragraph))]

    def _answers(self, found: list[FoundAnswer]) -> list[FoundAnswer]:
        of_text: dict[str, FoundAnswer] = {}
        for answer in sorted(found, key=lambda answer: (-answer.score, answer.start, answer.end)):
            of_text.setdefault(answer.text, answer)
        best = list(of_text.values())[: self.n_best]
        scores = np.array([answer.score for answer in best])
        weights = np.exp(scores - scores.max()) if best else scores
        shares = (weights / weights.sum()).tolist()
        return [answer._replace(probability=share) for answer, share in zip(best, shares, strict=True)]


def allowed(windows: Windows, index: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """At which tokens of each window answers may start, and end, bool (B, length): in the context, at text.

    Tokens that stand for no character, as a space that is a token by itself, are neither.
    """
    tokens = np.arange(length)[None, :] - windows.place[index, None]  # of the window's part of the context
    is_inside = (tokens >= 0) & (tokens < windows.count[index, None])
    spans = windows.offsets[np.where(is_inside, windows.first_offset[index, None] + tokens, 0)]
    is_end = is_inside & (spans[..., 0] < spans[..., 1])
    in_context = windows.first[index, None] + tokens
    own = windows.own[index]
    return is_end & (in_context >= own[:, :1]) & (in_context < own[:, 1:]), is_end


def characters(windows: Windows, index: np.ndarray, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """The first character of each span, and one past the last, (B, n) both; of spans that are none, anything.

    Of all of its tokens: where a quote and a comma have changed places, the last token is not the one that ends last.
    """
    tokens = np.arange(1 + (spans.ends - spans.starts).max(initial=0))
    shift = (windows.first_offset - windows.place)[index, None, None]
    places = shift + np.minimum(spans.starts[..., None] + tokens, spans.ends[..., None])
    of_tokens = windows.offsets[np.clip(places, 0, len(windows.offsets) - 1)]
    is_text = of_tokens[..., 0] < of_tokens[..., 1]
    starts = np.where(is_text, of_tokens[..., 0], np.iinfo(np.int32).max).min(-1)
    return starts, np.where(is_text, of_tokens[..., 1], 0).max(-1)
