"""SQuAD's official files, version 1.1, and its official marks.

    {"version": "1.1", "data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [
        {"id": ..., "question": ..., "answers": [{"text": ..., "answer_start": ...}]}]}]}]}

``answer_start`` counts characters (Unicode code points) of the context (Rajpurkar et al., 2016, arXiv 1606.05250). The
reader names article, paragraph and question of whatever is wrong.

Exact match and F1 are the official evaluation's (section 6.1). Both compare texts without case, punctuation of ASCII,
English articles and superfluous spaces. Other punctuation, such as a curly quote or a long dash, stays.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Union

import numpy as np

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.json_files import read_json

SPLITS: Mapping[str, str] = {"train": "train-v1.1.json", "valid": "dev-v1.1.json"}
# None: a part of the official file often has no version.
VERSIONS = (
    "1.1",
    "v1.1",
    None,
)
SHOWN = 5  # mistakes in a message


@dataclass(frozen=True)
class Answer:
    """A span of a context: its text, and the character where it starts."""

    text: str
    start: int

    @property
    def end(self) -> int:
        """One past the last character."""
        return self.start + len(self.text)


@dataclass(frozen=True)
class Question:
    """One question; people have answered those of the dev file three times and more, others once."""

    id: str
    text: str
    answers: tuple[Answer, ...]

    @property
    def answer_texts(self) -> tuple[str, ...]:
        """Texts of all answers."""
        return tuple(answer.text for answer in self.answers)


@dataclass(frozen=True)
class Paragraph:
    """A context and the questions on it."""

    title: str
    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class SquadFile:
    """The contents of a file, in its order.

    Attributes:
        left_out: the mistakes of questions that were left out.
    """

    path: Path
    paragraphs: list[Paragraph]
    left_out: list[str] = field(default_factory=list)

    @cached_property
    def questions(self) -> list[Question]:
        """Questions of all paragraphs."""
        return [question for paragraph in self.paragraphs for question in paragraph.questions]

    @cached_property
    def contexts(self) -> list[str]:
        """Contexts of all paragraphs."""
        return [paragraph.context for paragraph in self.paragraphs]

    @cached_property
    def paragraph_of(self) -> np.ndarray:
        """The number of each question's paragraph, int64 (questions,)."""
        counts = [len(paragraph.questions) for paragraph in self.paragraphs]
        return np.repeat(np.arange(len(counts)), counts)


def read_squad(path: Union[str, Path], skip_mistakes: bool = False, needs_answers: bool = True) -> SquadFile:
    """Read a file of the official layout, version 1.1.

    Args:
        path: path of the file.
        skip_mistakes: leave out the questions that are wrong; :attr:`SquadFile.left_out` says why.
        needs_answers: whether a question without answers is a mistake; without, answers are read where there are some.

    Raises:
        UserError: no such file, no JSON, another layout or version; no question; unless they are skipped, questions
            that are wrong: the first ones by name, and how many.
    """
    path = Path(path)
    content = read_json(path, "give the official file, as train-v1.1.json")
    _check_layout(path, content)
    file = SquadFile(
        path,
        list(_paragraphs(content["data"], needs_answers, mistakes := [])),
        mistakes,
    )
    if file.left_out and not skip_mistakes:
        number = len(file.left_out)
        lines = "\n".join(f"  {mistake}" for mistake in file.left_out[:SHOWN])
        more = ""
        if number > SHOWN:
            more = f"\n  and {number - SHOWN:,} more"
        raise UserError(
            f"{path}: {number:,} mistake{'s' * (number != 1)}; mend the file, or have what is wrong left out "
            f"(--skip-mistakes):\n{lines}{more}"
        )
    if not file.questions:
        raise UserError(f"{path}: holds no question; download it again")
    return file


def _check_layout(path: Path, content: Mapping[str, Any]) -> None:
    """Raise a UserError for another version, or another layout than the official one."""
    version = content.get("version")
    if version not in VERSIONS:
        advice = "take that one"
        if "2.0" in str(version):
            advice = "its questions without an answer are not for this task"
        raise UserError(f"{path}: is SQuAD's version {str(version)[:20]!r}, but this reads 1.1; {advice}")
    if not isinstance(content.get("data"), list):
        found = ", ".join(map(repr, list(content)[:5])) or "nothing"
        raise UserError(
            f"{path}: not in SQuAD's official layout, an object with a list 'data' of articles (found {found}); "
            "download train-v1.1.json and dev-v1.1.json as SQuAD's authors publish them"
        )


def _paragraphs(articles: list[Any], needs_answers: bool, mistakes: list[str]) -> Iterator[Paragraph]:
    """Walk the articles, keeps what is right, and lists what is not, a line each, among the mistakes."""
    place_of_id: dict[str, str] = {}

    def listed(parent: Any, name: str, place: str) -> Iterator[tuple[int, Any]]:
        if (value := _field(parent, name, list)) is None:
            mistakes.append(f"{place}: has no list {name!r}")
        return enumerate(value or [], start=1)

    def questions(paragraph: Any, context: str, place: str) -> Iterator[Question]:
        """Questions of all paragraphs."""
        for number, values in listed(paragraph, "qas", place):
            identity = _field(values, "id", str)
            where = f"{place}, question {number}" + (f" (id {identity})" if identity is not None else "")
            try:
                question = _question(values, context, needs_answers)
                if first := place_of_id.get(question.id):
                    raise _MistakeError(f"its id is that of {first} too")
            except _MistakeError as mistake:
                mistakes.append(f"{where}: {mistake}")
                continue
            place_of_id[question.id] = where
            yield question

    for number, article in enumerate(articles, start=1):
        title = _field(article, "title", str) or ""
        place = f"article {number}" + (f" ({title})" if title else "")
        for at, paragraph in listed(article, "paragraphs", place):
            where = f"{place}, paragraph {at}"
            context = _field(paragraph, "context", str) or ""
            if context.strip():
                yield Paragraph(title, context, tuple(questions(paragraph, context, where)))
            else:
                mistakes.append(f"{where}: has no context")


def _field(values: Any, name: str, kind: type) -> Any:
    """Return a field of an object; None where it is no object, or the field of another type."""
    value = None
    if isinstance(values, dict):
        value = values.get(name)
    if isinstance(value, kind):
        return value
    return None


class _MistakeError(ValueError):
    """A mistake in one question."""


def _question(values: Any, context: str, needs_answers: bool) -> Question:
    """Raise a _MistakeError."""
    if not isinstance(values, dict):
        raise _MistakeError("is no object")
    identity = _field(values, "id", str)
    text = _field(values, "question", str)
    answers = values.get("answers", [])
    if not identity:
        raise _MistakeError("has no id")
    if not text or not text.strip():
        raise _MistakeError("its question is empty")
    if values.get("is_impossible"):
        raise _MistakeError("is_impossible: a question of version 2.0 that the context does not answer")
    if not isinstance(answers, list):
        raise _MistakeError("its answers are no list; Hugging Face's layout? Take the official file")
    if needs_answers and not answers:
        raise _MistakeError("has no answer")
    return Question(identity, text, tuple(_answer(answer, context) for answer in answers))


def _answer(values: Any, context: str) -> Answer:
    """Raise a _MistakeError."""
    text = _field(values, "text", str)
    start = None
    if isinstance(values, dict):
        start = values.get("answer_start")
    if not text or not text.strip():
        raise _MistakeError("an answer is empty")
    if type(start) is not int or start < 0:
        raise _MistakeError(f"answer {text[:40]!r} has answer_start {str(start)[:20]!r}, no character's number")
    found = context[start : start + len(text)]
    if found != text:
        elsewhere = context.find(text)
        hint = "the context does not hold it"
        if elsewhere >= 0:
            hint = f"it stands at {elsewhere}"
        raise _MistakeError(f"answer {text[:40]!r} is not at character {start}, where {found[:40]!r} is; {hint}")
    return Answer(text, start)


ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower-case a text, then remove punctuation, then articles, then superfluous spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 where the prediction is one of the answers, normalised; else 0.0."""
    wanted = normalise(prediction)
    return float(any(wanted == normalise(answer) for answer in answers))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the best F1 of the prediction's words with those of an answer, as bags; 0.0 where none is shared.

    So two texts of articles alone match exactly and have F1 of 0.0, as in the official evaluation of version 1.1.
    """
    found = Counter(normalise(prediction).split())
    return max(
        (_f1(found, Counter(normalise(answer).split())) for answer in answers),
        default=0.0,
    )


def _f1(found: Counter, wanted: Counter) -> float:
    shared = (found & wanted).total()
    if shared:
        return 2 * shared / (found.total() + wanted.total())
    return 0.0


METRICS: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "exact_match": exact_match,
    "f1": f1,
}


def score(file: SquadFile, predictions: Mapping[str, str]) -> dict[str, float]:
    """Return the mean of each metric over a file's questions, 0.0 to 1.0; without a prediction a question has 0.0.

    Args:
        file: questions and their answers.
        predictions: a text for each question's id.
    """
    pairs = [(predictions.get(question.id), question.answer_texts) for question in file.questions]
    return {
        name: sum(metric(text, answers) for text, answers in pairs if text is not None) / len(pairs)
        for name, metric in METRICS.items()
    }
