"""Answers without a model, on a text where each rule's answer can be told by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_squad import article, write_squad

from lazyformer_fairseq.data.squad import read_squad
from lazyformer_fairseq.finetuning.squad_heuristics import RULES, Asked, Text, baselines, longest_common_span

CONTEXT = (
    "The old town had few people. In March 1848 the bridge over the river was built by Anna Meyer. It cost $5,300."
)


def asked(question):
    words = {word: 3.0 for word in ("bridge", "built", "anna", "meyer", "1848", "march", "cost", "town", "old")}
    common = dict.fromkeys(("the", "in", "was", "by", "it", "over", "had"), 0.1)
    return Asked(Text.of(CONTEXT), question, {**words, **common}, 2.5)


@pytest.mark.parametrize(
    ("rule", "question", "number", "answer"),
    [
        ("first words", "Who?", 3, "The old town"),
        ("first sentence", "Who?", 1, "The old town had few people."),
        ("sentence that shares most with the question", "What did it cost?", 1, "It cost $5,300."),
        ("words after the longest common span", "When was built by?", 2, "Anna Meyer"),
        ("words before the longest common span", "Who had few people?", 2, "old town"),
        ("words beside the densest match", "Who was it that built the bridge?", 1, "river"),
        ("date, number or name near the densest match", "When was the bridge built?", 1, "March 1848"),
        ("date, number or name near the densest match", "Who built the bridge?", 1, "Anna Meyer"),
        ("date, number or name near the densest match", "How much did it cost?", 1, "$5,300"),
    ],
)
def test_rules(rule, question, number, answer):
    assert RULES[rule][0](asked(question), number) == answer


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_the_longest_common_span_against_all_spans(one, other):
    runs = {tuple(one[i:j]) for i in range(len(one)) for j in range(i + 1, len(one) + 1)}
    found = [(j - i, -i) for i in range(len(other)) for j in range(i + 1, len(other) + 1) if tuple(other[i:j]) in runs]
    length, place = max(found, default=(0, 0))
    assert longest_common_span(one, other) == (-place, length)


@pytest.mark.parametrize("context", ["x", "?!", "a. b! c"])
def test_every_rule_answers_whatever_the_text(context, tmp_path):
    file = read_squad(write_squad(tmp_path / "dev.json", article("One", (context, [("? When", context[0])]))))
    assert baselines(file).keys() == baselines(file, file).keys() or len(baselines(file, file)) == len(RULES)


def test_the_number_of_words_is_learnt_and_the_best_comes_first(tmp_path):
    questions = [("Which town?", "The old town had"), ("What town?", "The old town had")]
    file = read_squad(write_squad(tmp_path / "dev.json", article("One", (CONTEXT, questions), ("Other.", []))))
    found = baselines(file, file)
    assert next(iter(found.items())) == ("first 4 words", {"exact_match": 1.0, "f1": 1.0})
    assert [*found.values()] == sorted(found.values(), key=lambda marks: -marks["f1"])
