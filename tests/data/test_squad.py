"""SQuAD's official files as they are read, and its official marks."""

import json
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_squad import article, write_squad

from lazyformer_fairseq.data import squad
from lazyformer_fairseq.data.squad import Answer, Paragraph, Question, SquadFile, read_squad
from lazyformer_fairseq.errors import UserError


def test_what_a_file_holds(tmp_path):
    path = write_squad(
        tmp_path / "train-v1.1.json",
        article("One", ("Anna sees Ben.", [("Who sees?", "Anna"), ("Whom?", "Ben")]), ("No question here.", [])),
        article("Two", ("Éa: 1858 😀 now", [("When?", "now")])),
    )
    file = read_squad(path)
    assert [question.id for question in file.questions] == ["One-0-0", "One-0-1", "Two-0-0"]
    assert file.contexts == ["Anna sees Ben.", "No question here.", "Éa: 1858 😀 now"]
    assert file.paragraph_of.tolist() == [0, 0, 2]
    answer = file.questions[2].answers[0]
    assert (answer.start, answer.end) == (11, 14)
    assert file.contexts[2][answer.start : answer.end] == "now"


def file_with(tmp_path, change):
    content = {"version": "1.1", "data": [article("One", ("Anna sees Ben.", [("Who?", "Anna"), ("Whom?", "Ben")]))]}
    change(content, content["data"][0]["paragraphs"][0], content["data"][0]["paragraphs"][0]["qas"][1])
    path = tmp_path / "dev-v1.1.json"
    path.write_text(json.dumps(content))
    return path


PLACE = r"article 1 \(One\), paragraph 1, question 2 \(id One-0-1\): "


# (file, paragraph, question) -> what is done to them.
MISTAKES = [
    (lambda file, part, asked: asked["answers"][0].update(answer_start=9), "'Ben' is not at character 9, .* at 10"),
    (lambda file, part, asked: asked["answers"][0].update(text="Eva"), "the context does not hold it"),
    (lambda file, part, asked: asked["answers"][0].update(answer_start="10"), "answer_start '10', no character's"),
    (lambda file, part, asked: asked["answers"][0].update(answer_start=-4), "answer_start '-4', no character's"),
    (lambda file, part, asked: asked["answers"][0].update(text=" "), "an answer is empty"),
    (lambda file, part, asked: asked.update(answers=[]), "has no answer"),
    (lambda file, part, asked: asked.update(answers={"text": ["Ben"], "answer_start": [10]}), "are no list; Hugg"),
    (lambda file, part, asked: asked.update(question=" "), "its question is empty"),
    (lambda file, part, asked: asked.update(is_impossible=True, answers=[]), "is_impossible: a question of ver"),
]
OTHERS = [
    (lambda file, part, asked: asked.update(id="One-0-0"), r"question 2 \(id One-0-0\): its id is that of a.*n 1"),
    (lambda file, part, asked: asked.pop("id"), "question 2: has no id"),
    (lambda file, part, asked: part.pop("context"), "paragraph 1: has no context"),
    (lambda file, part, asked: part.pop("qas"), "paragraph 1: has no list 'qas'"),
    (lambda file, part, asked: file["data"].append([]), "article 2: has no list 'paragraphs'"),
    (lambda file, part, asked: part["qas"].append(3), "question 3: is no object"),
    (lambda file, part, asked: file.update(version="v2.0"), "version 'v2.0', but this reads 1.1"),
    (lambda file, part, asked: file.update(data={"question": []}), "not in SQuAD's official layout"),
    (lambda file, part, asked: file.update(data=[]), "holds no question"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES)
def test_mistakes_of_a_question_are_named_and_can_be_left_out(tmp_path, change, message):
    path = file_with(tmp_path, change)
    with pytest.raises(UserError, match=f"{path}: 1 mistake; .*\n  {PLACE}.*{message}"):
        read_squad(path)
    file = read_squad(path, skip_mistakes=True)
    assert [question.id for question in file.questions] == ["One-0-0"]
    assert len(file.left_out) == 1


@pytest.mark.parametrize(("change", "message"), OTHERS)
def test_other_mistakes_and_layouts(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        read_squad(file_with(tmp_path, change))


def test_many_mistakes_are_counted_and_what_is_no_json_is_refused(tmp_path):
    questions = [*[(" ", "Anna")] * 8, ("Who?", "Anna")]
    path = write_squad(tmp_path / "train.json", article("One", ("Anna sees Ben.", questions)))
    with pytest.raises(UserError, match="8 mistakes(.*\n){6}  and 3 more"):
        read_squad(path)
    assert len(read_squad(path, skip_mistakes=True).left_out) == 8  # all are listed on demand
    path.write_text("[")
    with pytest.raises(UserError, match=r"train.json: cannot be read as JSON .*; give the official file"):
        read_squad(path)


def test_the_official_part_is_without_mistakes(real_data):
    path = real_data / "squad" / "train-v1.1.part.json"
    file = read_squad(path)
    assert (len(file.questions), len({paragraph.title for paragraph in file.paragraphs})) == (11_877, 44)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat,\tthe DOG\n", "cat dog"),
        ("an A-team", "ateam"),  # punctuation goes first, so no article is left inside
        ("a.the theatre U.S.A.", "athe theatre usa"),
        ("“The” end", "“ ” end"),  # curly quotes stay, and the article between them goes
        ("1990–1995 £5.3", "1990–1995 £53"),  # so does a long dash
        ("rock 'n' roll the_end", "rock n roll theend"),
        ("the", ""),
        ("!?", ""),
        ("a\u00a0b", "b"),
        ("İ", "i̇"),
    ],
)
def test_normalised(text, expected):
    assert squad.normalise(text) == expected


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
    assert squad.exact_match(prediction, answers) == exact
    assert squad.f1(prediction, answers) == pytest.approx(overlap)


def by_letters(text: str) -> list[str]:
    """The definition read another way: character by character, then word by word."""
    kept = "".join(character for character in text.lower() if character not in string.punctuation)
    words = re.split(r"\s+", re.sub(r"(?<!\w)(?:the|an|a)(?!\w)", " ", kept))
    return [word for word in words if word]


texts = st.text(st.sampled_from("athen THE.,-'“–é 1\u00a0\n"), max_size=24) | st.text(max_size=12)


@given(texts, st.lists(texts, min_size=1, max_size=3))
def test_all_texts_against_another_reading(prediction, answers):
    found = by_letters(prediction)
    assert squad.normalise(prediction).split() == found
    assert squad.exact_match(prediction, answers) == float(any(found == by_letters(answer) for answer in answers))
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
    assert squad.f1(prediction, answers) == pytest.approx(best)


def test_a_file_is_scored_over_all_its_questions(tmp_path):
    questions = tuple(
        Question(name, "?", (Answer(text, 0),)) for name, text in (("x", "one two"), ("y", "three"), ("z", "4"))
    )
    file = SquadFile(tmp_path, [Paragraph("", "one two three 4", questions)])
    marks = squad.score(file, {"x": "two", "y": "Three.", "other": "4"})
    assert marks == {"exact_match": pytest.approx(1 / 3), "f1": pytest.approx((2 / 3 + 1) / 3)}
