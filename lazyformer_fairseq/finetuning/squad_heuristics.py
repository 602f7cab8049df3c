"""What answers without a model are worth: the figures that a trained model has to beat.

Each baseline picks a span of the context by a rule. A rule with a number in it takes the one with the best F1 on
questions to learn from. No rule reads an answer of the questions that it is measured on.

The rules look for the question's words in the context, rare ones first, as the sliding window of Richardson et al.
(2013) does, which SQuAD's authors have as a baseline too (Rajpurkar et al., 2016, section 5.1).
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Optional

import numpy as np
from tqdm import tqdm

from lazyformer_fairseq.data.squad import SquadFile, f1, score

WORD = re.compile(r"\w+(?:['’]\w+)?")
SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s")
COMMON = 0.1  # a word in more contexts than this is no beginning or end of an answer
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10)  # words of an answer that are tried
LEARNT_FROM = 1000  # questions

# What stands in a question, and what its answer looks like.
KINDS: Sequence[tuple[re.Pattern, re.Pattern]] = (
    (re.compile(r"\b(when|what year|which year)\b", re.I), re.compile(r"\b(?:[A-Z]\w+ )?(?:\d{1,2},? )?\d{4}s?\b")),
    (
        re.compile(r"\bhow (many|much|old|long|far|large|high|big|tall)\b|\bpercent", re.I),
        re.compile(r"[$£€]?\d(?:[\d,.]*\d)?%?(?: (?:million|billion|percent|years|miles|km|people))?"),
    ),
    (
        re.compile(r"\b(who|whom|whose|where|which|name)\b", re.I),
        re.compile(r"\b[A-Z]\w+(?: (?:of |the |de )?[A-Z]\w+)*"),
    ),
)


@dataclass(frozen=True)
class Text:
    """A context cut into words.

    Attributes:
        places: the first character of each word, and one past the last.
    """

    text: str
    words: list[str]
    places: list[tuple[int, int]]

    @classmethod
    def of(cls, text: str) -> "Text":
        found = list(WORD.finditer(text))
        return cls(text, [match[0].lower() for match in found], [match.span() for match in found])

    def span(self, first: int, number: int) -> str:
        """Up to `number` words from the word `first` on."""
        if not self.words:
            return self.text.strip()
        first = min(max(first, 0), len(self.words) - 1)
        last = min(first + number, len(self.words)) - 1
        return self.text[self.places[first][0] : self.places[last][1]]

    @cached_property
    def sentences(self) -> list[tuple[int, int]]:
        """Characters of each sentence."""
        ends = [match.end() for match in SENTENCE_END.finditer(self.text)]
        edges = [0, *(end for end in ends if end < len(self.text)), len(self.text)]
        return list(itertools.pairwise(edges))


@dataclass(frozen=True)
class Asked:
    """One question to a context.

    Attributes:
        weights: how rare a word is among the contexts; 0.0 for words of all.
        rarest: the weight of words of :data:`COMMON` contexts.
    """

    text: Text
    question: str
    weights: Mapping[str, float]
    rarest: float

    @cached_property
    def words(self) -> list[str]:
        return [match[0].lower() for match in WORD.finditer(self.question)]

    @cached_property
    def is_asked(self) -> np.ndarray:
        """Which words of the context the question holds, bool (W,)."""
        asked = set(self.words)
        return np.array([word in asked for word in self.text.words], bool)

    @cached_property
    def weight(self) -> np.ndarray:
        """Of each word of the context, (W,)."""
        return np.array([self.weights.get(word, self.rarest) for word in self.text.words])

    @cached_property
    def nearness(self) -> np.ndarray:
        """How much of the question, rare words above all, stands near each word of the context, (W,)."""
        matches = np.flatnonzero(self.is_asked)
        distance = np.abs(np.arange(len(self.text.words))[:, None] - matches)
        return (self.weight[matches] / (1.0 + distance)).sum(1)


Rule = Callable[[Asked, int], str]


def first_words(asked: Asked, number: int) -> str:
    """The first words of the context."""
    return asked.text.span(0, number)


def first_sentence(asked: Asked, number: int) -> str:
    start, end = asked.text.sentences[0]
    return asked.text.text[start:end].strip()


def best_sentence(asked: Asked, number: int) -> str:
    """The sentence that shares most with the question."""
    shared = set(asked.words)

    def value(place: tuple[int, int]) -> float:
        words = {match[0].lower() for match in WORD.finditer(asked.text.text, *place)}
        return sum(asked.weights.get(word, asked.rarest) for word in words & shared)

    start, end = max(asked.text.sentences, key=value)
    return asked.text.text[start:end].strip()


def after_common_span(asked: Asked, number: int) -> str:
    """The words behind the longest run of words that question and context share."""
    start, length = longest_common_span(asked.words, asked.text.words)
    return asked.text.span(start + length, number)


def before_common_span(asked: Asked, number: int) -> str:
    """The words before the longest run of words that question and context share."""
    start, _ = longest_common_span(asked.words, asked.text.words)
    return asked.text.span(start - number, min(number, max(start, 1)))


def beside_densest_match(asked: Asked, number: int) -> str:
    """Words that the question does not hold, where most of it stands near; no common word at either end."""
    number = min(number, len(asked.text.words))
    if not number or not asked.is_asked.any():
        return first_words(asked, number)
    common = asked.weight < math.log(1 / COMMON)
    is_edge = ~(asked.is_asked | common)
    inside = np.convolve(asked.is_asked, np.ones(number), "valid") == 0
    allowed = inside & is_edge[: len(inside)] & is_edge[number - 1 :]
    means = np.convolve(asked.nearness, np.ones(number) / number, "valid")
    return asked.text.span(int(np.where(allowed, means, -1.0).argmax()), number)


def kind_near_match(asked: Asked, number: int) -> str:
    """A date, a number or a name, as the question's words ask for, where most of the question stands near."""
    for in_question, in_context in KINDS:
        if in_question.search(asked.question) and asked.text.words:
            found = [match.span() for match in in_context.finditer(asked.text.text)]
            held = set(asked.words)
            new = [
                place for place in found if not held.issuperset(WORD.findall(asked.text.text[slice(*place)].lower()))
            ]
            if new:
                start, end = max(new, key=lambda place: _nearness_at(asked, place))
                return asked.text.text[start:end]
    return beside_densest_match(asked, number)


def _nearness_at(asked: Asked, place: tuple[int, int]) -> float:
    inside = [n for n, (start, end) in enumerate(asked.text.places) if start < place[1] and end > place[0]]
    return float(asked.nearness[inside].mean()) if inside else 0.0


RULES: Mapping[str, tuple[Rule, Sequence[int]]] = {
    "first words": (first_words, LENGTHS),
    "first sentence": (first_sentence, (1,)),
    "sentence that shares most with the question": (best_sentence, (1,)),
    "words after the longest common span": (after_common_span, LENGTHS),
    "words before the longest common span": (before_common_span, LENGTHS),
    "words beside the densest match": (beside_densest_match, LENGTHS),
    "date, number or name near the densest match": (kind_near_match, LENGTHS),
}


def longest_common_span(one: Sequence[str], other: Sequence[str]) -> tuple[int, int]:
    """Where in `other` the longest run of words begins that `one` holds too, and its length; of equals the first."""
    best = (0, 0)
    lengths: dict[int, int] = {}
    places: dict[str, list[int]] = {}
    for at, word in enumerate(other):
        places.setdefault(word, []).append(at)
    for word in one:
        lengths = {at: lengths.get(at - 1, 0) + 1 for at in places.get(word, ())}
        for at, length in lengths.items():
            if (length, -(at - length + 1)) > (best[1], -best[0]):
                best = (at - length + 1, length)
    return best


def baselines(file: SquadFile, learn_from: Optional[SquadFile] = None) -> dict[str, dict[str, float]]:
    """Exact match and F1, 0.0 to 1.0, of each rule's answers to a file's questions; the best F1 first.

    Args:
        learn_from: whose answers choose the number of words; without, it is 3.
    """
    measured = {}
    asked, sample = _asked(file), _asked(learn_from, LEARNT_FROM) if learn_from else []
    answers = [question.answer_texts for question in learn_from.questions[:LEARNT_FROM]] if learn_from else []
    for name, (rule, numbers) in tqdm(RULES.items(), desc="baselines", delay=2, disable=None, leave=False):
        number = _best_number(rule, numbers, sample, answers)
        predictions = {question.id: rule(of, number) for question, of in zip(file.questions, asked, strict=True)}
        label = name.replace("words", f"{number} word" + "s" * (number > 1), 1) if len(numbers) > 1 else name
        measured[label] = score(file, predictions)
    return dict(sorted(measured.items(), key=lambda item: -item[1]["f1"]))


def _best_number(rule: Rule, numbers: Sequence[int], sample: list[Asked], answers: list[tuple[str, ...]]) -> int:
    if len(numbers) == 1 or not sample:
        return 3 if 3 in numbers else numbers[0]

    def total(number: int) -> float:
        return sum(f1(rule(of, number), wanted) for of, wanted in zip(sample, answers, strict=True))

    return max(numbers, key=total)


def _asked(file: SquadFile, limit: Optional[int] = None) -> list[Asked]:
    texts = [Text.of(context) for context in file.contexts]
    seen = Counter(word for text in texts for word in set(text.words))
    weights = {word: math.log(len(texts) / count) for word, count in seen.items()}
    pairs = list(zip(file.questions, file.paragraph_of.tolist(), strict=True))[:limit]
    return [Asked(texts[paragraph], question.text, weights, math.log(len(texts))) for question, paragraph in pairs]
