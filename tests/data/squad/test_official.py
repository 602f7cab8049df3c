"""The official files: what is read, and how what is wrong is named."""

import json

import pytest
from toy_squad import article, write_squad

from lazyformer_fairseq.data.squad.official import mistakes_of, read_squad
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file, part, asked: asked["answers"][0].update(answer_start=9), "'Ben' is not at character 9, .* at 10"),
        (lambda file, part, asked: asked["answers"][0].update(text="Eva"), "the context does not hold it"),
        (lambda file, part, asked: asked["answers"][0].update(answer_start="10"), "answer_start '10', no character's"),
        (lambda file, part, asked: asked["answers"][0].update(answer_start=-4), "answer_start '-4', no character's"),
        (lambda file, part, asked: asked["answers"][0].update(text=" "), "an answer is empty"),
        (lambda file, part, asked: asked.update(answers=[]), "has no answer"),
        (lambda file, part, asked: asked.update(answers={"text": ["Ben"], "answer_start": [10]}), "are no list; Hugg"),
        (lambda file, part, asked: asked.update(question=" "), "its question is empty"),
        (lambda file, part, asked: asked.update(is_impossible=True, answers=[]), "is_impossible: a question of ver"),
    ],
)
def test_mistakes_of_a_question_are_named_and_can_be_left_out(tmp_path, change, message):
    path = file_with(tmp_path, change)
    with pytest.raises(UserError, match=f"{path}: 1 mistake; .*\n  {PLACE}.*{message}"):
        read_squad(path)
    file = read_squad(path, skip_mistakes=True)
    assert [question.id for question in file.questions] == ["One-0-0"]
    assert file.left_out == mistakes_of(path)
    assert len(file.left_out) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda file, part, asked: asked.update(id="One-0-0"),
            r"question 2 \(id One-0-0\): its id is that of a.*n 1",
        ),
        (lambda file, part, asked: asked.pop("id"), "question 2: has no id"),
        (lambda file, part, asked: part.pop("context"), "paragraph 1: has no context"),
        (lambda file, part, asked: part.pop("qas"), "paragraph 1: has no list 'qas'"),
        (lambda file, part, asked: file["data"].append([]), "article 2: has no list 'paragraphs'"),
        (lambda file, part, asked: part["qas"].append(3), "question 3: is no object"),
        (lambda file, part, asked: file.update(version="v2.0"), "version 'v2.0', but this reads 1.1"),
        (lambda file, part, asked: file.update(data={"question": []}), "not in SQuAD's official layout"),
        (lambda file, part, asked: file.update(data=[]), "holds no question"),
    ],
)
def test_other_mistakes_and_layouts(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        read_squad(file_with(tmp_path, change))


def test_many_mistakes_are_counted_and_all_listed_on_demand(tmp_path):
    path = write_squad(tmp_path / "train.json", article("One", ("Anna sees Ben.", [(" ", "Anna")] * 8)))
    with pytest.raises(UserError, match="8 mistakes(.*\n){6}  and 3 more"):
        read_squad(path)
    assert len(mistakes_of(path)) == 8


def test_files_without_answers_are_read_for_prediction(tmp_path):
    path = file_with(tmp_path, lambda file, part, asked: asked.pop("answers"))
    assert len(read_squad(path, needs_answers=False).questions) == 2


def test_what_is_no_json_is_refused(tmp_path):
    (tmp_path / "dev-v1.1.json").write_text("[")
    with pytest.raises(UserError, match=r"dev-v1.1.json: cannot be read as JSON .*; give the official file"):
        read_squad(tmp_path / "dev-v1.1.json")


def test_the_official_part_is_without_mistakes(real_data):
    path = real_data / "squad" / "train-v1.1.part.json"
    file = read_squad(path)
    assert (len(file.questions), len({paragraph.title for paragraph in file.paragraphs})) == (11_877, 44)
