"""SQuAD's official files, version 1.1, and its official metrics.

    {"version": "1.1", "data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [
        {"id": ..., "question": ..., "answers": [{"text": ..., "answer_start": ...}]}]}]}]}

``answer_start`` is a character offset (in Unicode code points) into the context (Rajpurkar et al., 2016, arXiv
1606.05250). The reader reports the article, paragraph and question of each mistake in a file.

Exact match and F1 follow the official evaluation script (section 6.1). Both ignore case, ASCII punctuation, English
articles and extra whitespace, but not other punctuation, such as curly quotes or em dashes.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Optional, Union

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.checked import Count
from lazyformer_fairseq.storage.json_files import read_as

SPLITS: Mapping[str, str] = {"train": "train-v1.1.json", "valid": "dev-v1.1.json"}
VERSIONS = ("1.1", "v1.1")
SHOWN = 5  # maximum number of mistakes listed in a message


@dataclass(frozen=True)
class Answer:
    """An answer span: its text and its character offset in the context."""

    text: str
    answer_start: Count

    @property
    def end(self) -> int:
        """Character offset of the end, exclusive."""
        return self.answer_start + len(self.text)


@dataclass(frozen=True)
class Question:
    """A question with its answers, of which there are at least three in the dev file and one in the training file."""

    id: str
    question: str
    answers: tuple[Answer, ...] = ()
    is_impossible: bool = False

    @property
    def answer_texts(self) -> tuple[str, ...]:
        """The texts of all answers."""
        return tuple(answer.text for answer in self.answers)


@dataclass(frozen=True)
class Paragraph:
    """A context and the questions about it."""

    context: str
    qas: tuple[Question, ...]


@dataclass(frozen=True)
class Article:
    """The paragraphs of a Wikipedia article."""

    paragraphs: list[Paragraph]
    title: str = ""


@dataclass(frozen=True)
class OfficialFile:
    """The layout of an official file."""

    data: list[Article]
    version: Optional[str] = None


@dataclass(frozen=True)
class SquadFile:
    """The contents of an official file, in file order.

    Attributes:
        path: path of the file.
        paragraphs: paragraphs of all articles, with their valid questions.
        left_out: mistakes that caused questions to be skipped.
    """

    path: Path
    paragraphs: list[Paragraph]
    left_out: list[str] = field(default_factory=list)

    @cached_property
    def questions(self) -> list[Question]:
        """The questions of all paragraphs."""
        return [question for paragraph in self.paragraphs for question in paragraph.qas]

    @cached_property
    def contexts(self) -> list[str]:
        """The contexts of all paragraphs."""
        return [paragraph.context for paragraph in self.paragraphs]

    @cached_property
    def paragraph_of(self) -> np.ndarray:
        """Paragraph index of each question, int64 (questions,)."""
        counts = [len(paragraph.qas) for paragraph in self.paragraphs]
        return np.repeat(np.arange(len(counts)), counts)


def read_squad(path: Union[str, Path], skip_mistakes: bool = False, needs_answers: bool = True) -> SquadFile:
    """Read a file in the official format, version 1.1.

    Args:
        path: path of the file.
        skip_mistakes: whether to skip questions with mistakes; :attr:`SquadFile.left_out` lists the reasons.
        needs_answers: whether a question without answers is a mistake; if False, answers are optional.

    Raises:
        UserError: the file does not exist, is not JSON, has an unsupported format or version, or has no questions; or
            questions have mistakes and are not skipped, in which case the message counts them and lists a few.
    """
    path = Path(path)
    official = read_as(OfficialFile, path, "use an unmodified official file, such as train-v1.1.json")
    # An excerpt of the official file often has no version.
    if official.version is not None and official.version not in VERSIONS:
        advice = "use a file of that version"
        if "2.0" in official.version:
            advice = "unanswerable questions are not supported"
        raise UserError(
            f"{path} is from SQuAD version {official.version[:20]!r}, but version 1.1 is required; {advice}"
        )
    place_of_id: dict[str, str] = {}
    mistakes: list[str] = []

    def right_questions(paragraph: Paragraph, place: str) -> tuple[Question, ...]:
        right = []
        for number, question in enumerate(paragraph.qas, start=1):
            where = f"{place}, question {number} (id {question.id})"
            mistake = mistake_of(question, paragraph.context, needs_answers)
            if question.id in place_of_id:
                mistake = f"it has the same id as {place_of_id[question.id]}"
            if mistake:
                mistakes.append(f"{where}: {mistake}")
            else:
                place_of_id[question.id] = where
                right.append(question)
        return tuple(right)

    paragraphs = []
    for number, article in enumerate(official.data, start=1):
        title = ""
        if article.title:
            title = f" ({article.title})"
        for at, paragraph in enumerate(article.paragraphs, start=1):
            place = f"article {number}{title}, paragraph {at}"
            if paragraph.context.strip():
                paragraphs.append(replace(paragraph, qas=right_questions(paragraph, place)))
            else:
                mistakes.append(f"{place}: the context is empty")

    if mistakes and not skip_mistakes:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes):,} mistakes"
        lines = "\n".join(f"  {mistake}" for mistake in mistakes[:SHOWN])
        if len(mistakes) > SHOWN:
            lines += f"\n  and {len(mistakes) - SHOWN:,} more"
        raise UserError(f"{path}: {count}; correct the file, or skip these questions (--skip-mistakes):\n{lines}")
    file = SquadFile(path, paragraphs, mistakes)
    if not file.questions:
        raise UserError(f"{path} has no questions; download the file again")
    return file


def mistake_of(question: Question, context: str, needs_answers: bool) -> str:
    """Return a description of the mistake in a question, or an empty string if it is valid."""
    if not question.question.strip():
        return "the text of the question is empty"
    if question.is_impossible:
        return "is_impossible is set, but unanswerable questions exist only in version 2.0"
    if needs_answers and not question.answers:
        return "it has no answer"
    for answer in question.answers:
        if not answer.text.strip():
            return "an answer is empty"
        found = context[answer.answer_start : answer.end]
        if found != answer.text:
            hint = "the context does not contain it"
            if answer.text in context:
                hint = f"it is at {context.find(answer.text)}"
            return (
                f"answer {answer.text[:40]!r} is not at character {answer.answer_start}, where {found[:40]!r} is "
                f"found; {hint}"
            )
    return ""


ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lowercase a text, then remove punctuation, articles and extra whitespace, in this order."""
    text = text.lower().translate(PUNCTUATION)
    text = ARTICLES.sub(" ", text)
    return " ".join(text.split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the prediction equals one of the answers after normalization, else 0.0."""
    return float(normalise(prediction) in map(normalise, answers))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the maximum bag-of-words F1 between the prediction and the answers, or 0.0 if no words are shared.

    Consequently, two texts that consist only of articles match exactly but have an F1 of 0.0, as in the official
    evaluation of version 1.1.
    """
    found = Counter(normalise(prediction).split())
    best = 0.0
    for answer in answers:
        wanted = Counter(normalise(answer).split())
        shared = (found & wanted).total()
        if shared:
            best = max(best, 2 * shared / (found.total() + wanted.total()))
    return best


METRICS: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": exact_match,
    "f1": f1,
}


def score(file: SquadFile, predictions: Mapping[str, str]) -> dict[str, float]:
    """Return the mean of each metric over a file's questions, from 0.0 to 1.0.

    Args:
        file: questions with their answers.
        predictions: predicted texts by question id; a question without a prediction scores 0.0.
    """
    pairs = [(predictions.get(question.id), question.answer_texts) for question in file.questions]
    scores = {}
    for name, metric in METRICS.items():
        total = sum(metric(text, answers) for text, answers in pairs if text is not None)
        scores[name] = total / len(pairs)
    return scores
