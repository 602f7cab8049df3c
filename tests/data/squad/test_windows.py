"""Windows over contexts: which tokens they show, where answers start and end in them, and whose tokens they are."""

import collections

import numpy as np
import pytest
from helpers import train_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from toy_squad import article, write_squad

from lazyformer_fairseq.data.squad.official import read_squad
from lazyformer_fairseq.data.squad.windows import (
    WindowSettings,
    make_windows,
    own_tokens,
    starts_of_windows,
    tokens_of,
    without_spaces,
)
from lazyformer_fairseq.data.text.normalisation import TextSettings
from lazyformer_fairseq.errors import UserError

CONTEXT = "Anna said: \"Ben sees 1 000 houses,  and the old   king's garden (in Paris).\" Mr. Jones isn't there…"
QUESTIONS = [("What does Ben see?", "1 000 houses"), ("Where?", "in Paris"), ("Who says it?", "Anna")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    return train_tokenizer(folder, [CONTEXT, *(text for text, _ in QUESTIONS)] * 5, 90, TextSettings())


@pytest.fixture
def file(tmp_path):
    return read_squad(write_squad(tmp_path / "train-v1.1.json", article("One", (CONTEXT, QUESTIONS))))


def test_one_window_is_the_pair_as_the_tokenizer_builds_it(tokenizer, file):
    windows = make_windows(tokenizer, file)
    assert len(windows) == len(QUESTIONS)
    for number, (question, answer) in enumerate(QUESTIONS):
        assert windows.inputs[number].tolist() == tokenizer.build_input(question, CONTEXT)
        start, end = windows.targets[number] - windows.place[number] + windows.first_offset[number]
        assert CONTEXT[windows.offsets[start, 0] : windows.offsets[end, 1]] == answer
    assert windows.question.tolist() == [0, 1, 2]


def test_long_contexts_and_questions(tokenizer, file):
    settings = WindowSettings(longest=24, stride=5, longest_question=6)
    windows = make_windows(tokenizer, file, settings)
    ids, spans = tokenizer.encode_with_offsets(CONTEXT)
    assert windows.sizes.max() == 24
    assert windows.cut_questions == sum(len(tokenizer.encode(question)) > 6 for question, _ in QUESTIONS) > 0
    for number, (question, answer) in enumerate(QUESTIONS):
        shown = collections.Counter()
        rows = np.flatnonzero(windows.question == number)
        head = [tokenizer.special.bos, *tokenizer.encode(question)[:6], *[tokenizer.special.eos] * 2]
        wanted = tokens_of(np.array(spans), CONTEXT.index(answer), CONTEXT.index(answer) + len(answer))
        for row in rows:
            first, count = windows.first[row], windows.count[row]
            assert windows.inputs[row].tolist() == [*head, *ids[first : first + count], tokenizer.special.eos]
            shown.update(range(first, first + count))
            is_whole = first <= wanted[0] and wanted[1] < first + count
            found = (windows.targets[row] + first - len(head)).tolist()
            assert found == list(wanted) if is_whole else windows.targets[row].tolist() == [0, 0]
        assert shown.keys() == set(range(len(ids)))
        assert windows.targets[rows].any()


def test_separators_of_other_models(tokenizer, file, monkeypatch):
    monkeypatch.setattr(tokenizer, "separators", 1)
    windows = make_windows(tokenizer, file)
    assert windows.inputs[0].tolist() == tokenizer.build_input(QUESTIONS[0][0], CONTEXT)


def test_contexts_without_tokens_or_answers(tokenizer, tmp_path):
    path = write_squad(
        tmp_path / "x.json", {"paragraphs": [{"context": "\x01", "qas": [{"id": "1", "question": "?"}]}]}
    )
    windows = make_windows(tokenizer, read_squad(path, needs_answers=False))
    assert windows.targets is None
    assert windows.count.tolist() == [0]


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 25))
def test_windows_start_as_run_squad_lets_them(length, room, stride):
    wanted, start = [], 0
    while True:
        shown = min(length - start, room)
        wanted.append(start)
        if start + shown == length:
            break
        start += min(shown, stride)
    assert starts_of_windows(length, room, stride).tolist() == wanted


@given(st.integers(1, 80), st.integers(1, 20), st.integers(1, 25))
def test_each_token_is_the_window_s_that_run_squad_says(length, room, stride):
    firsts = starts_of_windows(length, room, stride)
    counts = np.minimum(length - firsts, room)
    own = own_tokens(firsts, counts)
    for token in range(length):
        best, best_score = None, None
        for window, (start, count) in enumerate(zip(firsts.tolist(), counts.tolist(), strict=True)):
            if start <= token < start + count:
                score = min(token - start, start + count - 1 - token) + 0.01 * count
                if best_score is None or score > best_score:
                    best, best_score = window, score
        assert [window for window, (first, last) in enumerate(own) if first <= token < last] == [best]


def test_white_space_at_the_ends_of_spans_goes():
    spans = [(0, 3), (3, 5), (5, 5), (5, 7), (0, 0)]
    assert without_spaces(spans, " ab  c ").tolist() == [[1, 3], [5, 5], [5, 5], [5, 6], [0, 0]]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (384, 0, 64), (384, 128, 0), (20, 5, 16)])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(UserError, match="must be 1 token at least|no room for a context"):
        WindowSettings(*sizes)
