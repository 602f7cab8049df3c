"""GLUE's and SQuAD's official files as they are read; GLUE's tasks, SQuAD's marks."""

import json
import re
import string
from collections import Counter

import pytest
from fairseq.dataclass.initialize import hydra_init
from helpers import ROOT
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from toy_squad import article, write_squad

from lazyformer_fairseq.data import squad
from lazyformer_fairseq.data.glue import TASKS, find_task
from lazyformer_fairseq.data.labelled_files import Example, read_split
from lazyformer_fairseq.data.squad import Answer, Paragraph, Question, SquadFile, read_squad
from lazyformer_fairseq.errors import UserError

FINE_TUNED = [task for task in TASKS.values() if "train" in task.splits]


def test_tasks_are_found_by_name_and_folder():
    assert find_task("sts-b").name == "STS-B"
    assert find_task("diagnostic").name == "AX" and TASKS["AX"].head_name == TASKS["MNLI"].head_name
    with pytest.raises(UserError, match=r"'STS' is not a GLUE task.*CoLA.*STS-B"):
        find_task("STS")


@pytest.mark.filterwarnings(r"ignore:\s*'\S+' is validated against ConfigStore schema")
def test_each_task_has_a_yaml_that_selects_by_its_metric():
    """What all have of Table 5, tests/test_hydra_configs.py holds."""
    assert len(FINE_TUNED) == 9
    for task in FINE_TUNED:
        name = task.name.lower()
        hydra_init(name)
        with initialize_config_dir(str(ROOT / "configs" / "finetuning"), version_base="1.1"):
            cfg = compose(name)
        assert cfg.task.glue_task == task.name
        assert cfg.checkpoint.best_checkpoint_metric == task.selecting_metric
        assert cfg.checkpoint.maximize_best_checkpoint_metric
        assert cfg.dataset.valid_subset.split(",") == [split for split in task.splits if split.startswith("valid")]
        assert (cfg.optimization.max_epoch, task.epochs, cfg.optimization.lr) == (10, 10, [2e-5])


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_every_row_of_the_official_files(real_data, task):
    folder = real_data / "glue" / task.folder
    there = [name for name, split in task.splits.items() if (folder / split.file).is_file()]
    if not there:
        pytest.skip(f"{folder}: not among the real data")
    for name in there:
        file = read_split(task, folder, name)
        assert len(file.examples) == task.splits[name].rows
        assert not file.oddities()
        assert all(text.strip() for example in file.examples for text in example.texts)
        if task.labels and task.splits[name].label is not None:
            assert {example.target for example in file.examples} == set(range(task.num_classes))


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


line_texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\n"))


@given(texts=st.lists(st.tuples(line_texts.filter(str.strip), line_texts.filter(str.strip)), min_size=1))
def test_any_text_without_tab_and_newline_comes_back(tmp_path_factory, texts):
    rows = "".join(f"7\t{first}\t{second}\tentailment\n" for first, second in texts)
    folder = write(tmp_path_factory.mktemp("RTE"), "train.tsv", "index\tsentence1\tsentence2\tlabel\n" + rows)
    file = read_split(TASKS["RTE"], folder, "train")
    assert [example.texts for example in file.examples] == texts
    assert [example.line for example in file.examples] == list(range(2, 2 + len(texts)))


@given(
    header=st.sampled_from([b"", b"index\tsentence\n", b"id\tquestion1\tquestion2\tis_duplicate\n"]),
    junk=st.binary() | st.lists(st.sampled_from([b"\t", b"\n", b"0", b"1", b"a", b'"', b"\r"])).map(b"".join),
)
@pytest.mark.parametrize(("task", "split"), [("CoLA", "train"), ("CoLA", "test"), ("QQP", "train")])
def test_junk_gives_rows_or_a_user_error(tmp_path_factory, task, split, header, junk):
    folder = write(tmp_path_factory.mktemp("junk"), TASKS[task].splits[split].file, header + junk)
    try:
        file = read_split(TASKS[task], folder, split)
    except UserError as error:
        assert str(folder) in str(error)
    else:
        assert file.examples


def test_columns_are_found_by_name_quotation_marks_are_text_and_windows_line_ends_are_not(tmp_path):
    write(tmp_path, "dev.tsv", '\ufeffsentence\tlabel\r\n"unpaired\t1\r\nwith \u2028 and \x0c\t0\r\n')
    assert read_split(TASKS["SST-2"], tmp_path, "valid").examples == [
        Example(('"unpaired',), 1, 2),
        Example(("with \u2028 and \x0c",), 0, 3),
    ]
    write(tmp_path, "train.tsv", "label\tindex\tsentence2\tsentence1\nentailment\t0\tb\ta\n")
    assert read_split(TASKS["RTE"], tmp_path, "train").examples == [Example(("a", "b"), 0, 2)]


def test_columns_of_mnli(tmp_path):
    """Its files differ in their columns before and after the texts; no official one is among the real data."""
    before = "index\tpromptID\tpairID\tgenre\tsentence1_parse\tsentence2_parse\tsentence1\tsentence2"
    row = "0\t1\t1n\tfiction\t(A)\t(B)\tA b.\tC d."
    write(tmp_path, "train.tsv", f"{before}\tlabel1\tgold_label\n{row}\tneutral\tneutral\n")
    write(tmp_path, "dev_mismatched.tsv", f"{before}\tlabel1\tlabel2\tgold_label\n{row}\tneutral\t-\tentailment\n")
    write(tmp_path, "test_matched.tsv", f"{before}\n{row}\n")
    targets = [read_split(TASKS["MNLI"], tmp_path, split).examples for split in ("train", "valid1", "test")]
    assert targets == [[Example(("A b.", "C d."), target, 2)] for target in (2, 1, None)]


def test_short_rows_and_empty_sentences_of_qqp_are_counted_and_the_latter_stay(tmp_path):
    rows = "0\t1\t2\ta\tb\t1\n1\t3\t4\tcut off\n2\t5\t6\tc\t\t0\n"
    write(tmp_path, "train.tsv", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n" + rows)
    file = read_split(TASKS["QQP"], tmp_path, "train")
    assert [example.line for example in file.examples] == [2, 4]
    assert (file.short_lines, file.empty_lines) == ([3], [4])
    assert f"{tmp_path / 'train.tsv'}: 1 row with too few fields, skipped (line 3)" in file.oddities()
    write(tmp_path, "test.tsv", "index\tsentence1\tsentence2\n0\ta\tb\n1\t\tb\n")  # where a row needs an answer
    file = read_split(TASKS["RTE"], tmp_path, "test")
    assert (len(file.examples), file.empty_lines) == (2, [3])


HEADER = "index\tsentence1\tsentence2\tlabel\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (HEADER + "0\ta\tb\tentailment\n1\ta\tb\n", "line 3: found 3 fields, expected 4"),
        (HEADER + "0\ta\tb\tneutral\n", "line 2: label 'neutral' is not one of RTE's labels: entailment, not_entail"),
        (HEADER + "0\ta\tb\tc\tentailment\n", "line 2: found 5 fields, expected 4.* a tab in a sentence"),
        (HEADER + "0\ta\t \tentailment\n", "line 2: the sentence is empty"),
        (HEADER, " has no data rows"),
        ("", "is empty"),
        ("0\ta\tb\tentailment\n", "line 1: the header lacks 'sentence1', 'sentence2', 'label'; found '0', 'a'"),
        (HEADER.encode() + b"0\ta\xff\tb\tentailment\n", "line 2: not UTF-8 text .*at byte 3"),
    ],
)
def test_errors_name_file_line_and_value(tmp_path, content, message):
    write(tmp_path, "train.tsv", content)
    with pytest.raises(UserError, match=f"train.tsv.*{message}"):
        read_split(TASKS["RTE"], tmp_path, "train")


def test_a_score_that_is_no_number_a_missing_file_and_a_split_that_is_none(tmp_path):
    for score in ("5.01", "-1", "nan", "", "high", "3.800"):
        write(tmp_path, "dev.tsv", f"sentence1\tsentence2\tscore\na\tb\t4.5\na\tb\t{score}\n")
        if score != "3.800":
            with pytest.raises(UserError, match=rf"dev.tsv, line 3: score '{score}' is not a number from 0 to 5"):
                read_split(TASKS["STS-B"], tmp_path, "valid")
    assert [example.target for example in read_split(TASKS["STS-B"], tmp_path, "valid").examples] == [4.5, 3.8]
    with pytest.raises(UserError, match=r"train.tsv: cannot be read \(No such file"):
        read_split(TASKS["RTE"], tmp_path, "train")
    with pytest.raises(UserError, match=r"RTE has no split 'valid1'; its splits are train, valid, test"):
        read_split(TASKS["RTE"], tmp_path, "valid1")


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
    assert (answer.answer_start, answer.end) == (11, 14)
    assert file.contexts[2][answer.answer_start : answer.end] == "now"


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
    (lambda file, part, asked: asked["answers"][0].update(text="Eva"), "the context does not contain it"),
    (lambda file, part, asked: asked["answers"][0].update(text=" "), "an answer is empty"),
    (lambda file, part, asked: asked.update(answers=[]), "has no answer"),
    (lambda file, part, asked: asked.update(question=" "), "the text of the question is empty"),
    (lambda file, part, asked: asked.update(is_impossible=True, answers=[]), "is_impossible is set, but "),
]
OTHERS = [
    (lambda file, part, asked: asked.update(id="One-0-0"), r"question 2 \(id One-0-0\): it has the same id as a.*n 1"),
    (
        lambda file, part, asked: asked["answers"][0].update(answer_start="10"),
        r"answers.0.answer_start' is '10', but must",
    ),
    (
        lambda file, part, asked: asked["answers"][0].update(answer_start=-4),
        r"answers.0.answer_start' is -4, but must be",
    ),
    (lambda file, part, asked: asked.update(answers={"text": ["Ben"], "answer_start": [10]}), "qas.1.answers' is {'t"),
    (lambda file, part, asked: asked.pop("id"), "field 'data.0.paragraphs.0.qas.1.id' is missing; use an unmodified"),
    (lambda file, part, asked: part.update(context=" "), "paragraph 1: the context is empty"),
    (lambda file, part, asked: part.pop("context"), "field 'data.0.paragraphs.0.context' is missing"),
    (lambda file, part, asked: part.pop("qas"), "field 'data.0.paragraphs.0.qas' is missing"),
    (lambda file, part, asked: file["data"].append([]), "field 'data.1' is .*, but must be"),
    (lambda file, part, asked: part["qas"].append(3), "field 'data.0.paragraphs.0.qas.2' is 3, but must be"),
    (lambda file, part, asked: file.update(version="v2.0"), "SQuAD version 'v2.0', but version 1.1"),
    (
        lambda file, part, asked: file.update(data={"question": []}),
        "field 'data' is {'question': ..}, but must be",
    ),
    (lambda file, part, asked: file.update(data=[]), "has no questions"),
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
    with pytest.raises(UserError, match=r"train.json: cannot be read as JSON .*; use an unmodified"):
        read_squad(path)


def test_the_official_part_is_without_mistakes(real_data):
    file = read_squad(real_data / "squad" / "train-v1.1.part.json")
    assert len(file.questions) == 11_877


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
    shared = [((Counter(found) & Counter(words)).total(), len(words)) for words in map(by_letters, answers)]
    best = max(2 * both / (len(found) + count) if both else 0 for both, count in shared)
    assert squad.f1(prediction, answers) == pytest.approx(best)


def test_a_file_is_scored_over_all_its_questions(tmp_path):
    answers = {"x": "one two", "y": "three", "z": "4"}
    questions = tuple(Question(name, "?", (Answer(text, 0),)) for name, text in answers.items())
    file = SquadFile(tmp_path, [Paragraph("one two three 4", questions)])
    marks = squad.score(file, {"x": "two", "y": "Three.", "other": "4"})
    assert marks == {"exact_match": pytest.approx(1 / 3), "f1": pytest.approx((2 / 3 + 1) / 3)}
