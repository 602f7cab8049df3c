"""Exact match and F1: hard cases of the official definition, worked out by hand, and what holds of all texts."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.data.squad.metrics import exact_match, f1, normalise, score
from lazyformer_fairseq.data.squad.official import Answer, Paragraph, Question, SquadFile


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat,\tthe DOG\n", "cat dog"),
        ("an A-team", "ateam"),  # punctuation goes first, so no article is left inside
        ("a.the", "athe"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("“The” end", "“ ” end"),  # curly quotes stay, and the article between them goes
        ("1990–1995", "1990–1995"),  # so does a long dash
        ("rock 'n' roll", "rock n roll"),
        ("£5.3", "£53"),
        ("the", ""),
        ("!?", ""),
        ("the_end", "theend"),
        ("a\u00a0b", "b"),
        ("İ", "i̇"),
    ],
)
def test_normalised(text, expected):
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "overlap"),
    [
        ("Saint Bernadette", ["saint bernadette"], 1, 1),
        ("Bernadette", ["Saint Bernadette Soubirous"], 0, 2 * 1 * (1 / 3) / (1 + 1 / 3)),
        ("the Virgin Mary in 1858", ["1858", "Virgin Mary"], 0, 2 * (2 / 4) / (2 / 4 + 1)),
        ("a copper statue", ["statue of copper", "copper statue!"], 1, 1),
        ("New York New York", ["New York"], 0, 2 * (2 / 4) / (2 / 4 + 1)),  # a word counts as often as both have it
        ("York", ["London"], 0, 0),
        ("the", ["a"], 1, 0),  # equal when nothing is left; but no word is shared
        ("", ["London"], 0, 0),
        ("“London”", ["London"], 0, 0),
    ],
)
def test_marks(prediction, answers, exact, overlap):
    assert exact_match(prediction, answers) == exact
    assert f1(prediction, answers) == pytest.approx(overlap)


def by_letters(text: str) -> list[str]:
    """The definition read another way: character by character, then word by word."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    words = re.split(r"\s+", re.sub(r"(?<!\w)(?:the|an|a)(?!\w)", " ", kept))
    return [word for word in words if word]


texts = st.text(st.sampled_from("athen THE.,-'“–é 1\u00a0\n"), max_size=24) | st.text(max_size=12)


@given(texts, st.lists(texts, min_size=1, max_size=3))
def test_all_texts_against_another_reading(prediction, answers):
    found = by_letters(prediction)
    assert normalise(prediction).split() == found
    assert exact_match(prediction, answers) == float(any(found == by_letters(answer) for answer in answers))
    best = 0.0
    for answer in answers:
        rest = by_letters(answer)
        total = len(found) + len(rest)
        shared = 0
        for word in found:
            if word in rest:
                rest.remove(word)
                shared += 1
        best = max(best, 2 * shared / total if shared else 0.0)
    assert f1(prediction, answers) == pytest.approx(best)


def test_a_file_is_scored_over_all_its_questions(tmp_path):
    questions = tuple(
        Question(name, "?", (Answer(text, 0),)) for name, text in (("x", "one two"), ("y", "three"), ("z", "4"))
    )
    file = SquadFile(tmp_path, [Paragraph("", "one two three 4", questions)])
    marks = score(file, {"x": "two", "y": "Three.", "other": "4"})
    assert marks == {"exact_match": pytest.approx(1 / 3), "f1": pytest.approx((2 / 3 + 1) / 3)}
