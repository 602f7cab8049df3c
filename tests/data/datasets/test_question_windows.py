"""Windows over contexts, the best spans of their logits, and the answers that these are."""

import collections
import json

import numpy as np
import pytest
from helpers import train_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from other_tokenizers import ODD, SIZES, trained_on_odd
from toy_squad import article, write_squad

from lazyformer_fairseq.data.datasets import question_windows
from lazyformer_fairseq.data.datasets.question_windows import (
    SpanCollector,
    Windows,
    WindowSettings,
    best_spans,
    make_windows,
)
from lazyformer_fairseq.data.squad import SquadFile, exact_match, read_squad
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


@pytest.mark.parametrize("settings", [WindowSettings(), WindowSettings(max_length=24, stride=5, max_question_length=6)])
def test_windows_of_short_and_long_contexts_and_questions(tokenizer, file, settings):
    windows = make_windows(tokenizer, file, settings)
    longest = settings.max_question_length
    ids, spans = tokenizer.encode_with_offsets(CONTEXT)
    assert len(windows) == len(QUESTIONS) if settings == WindowSettings() else windows.sizes.max() == 24
    assert windows.cut_questions == sum(len(tokenizer.encode(question)) > longest for question, _ in QUESTIONS)
    assert bool(windows.cut_questions) == (longest == 6)
    for number, (question, answer) in enumerate(QUESTIONS):
        shown = collections.Counter()
        rows = np.flatnonzero(windows.question == number)
        head = [tokenizer.special.bos, *tokenizer.encode(question)[:longest], *[tokenizer.special.eos] * 2]
        wanted = question_windows.tokens_of(np.array(spans), CONTEXT.index(answer), CONTEXT.index(answer) + len(answer))
        for row in rows:
            first, count = windows.first_offset[row], windows.count[row]
            assert windows.inputs[row].tolist() == [*head, *ids[first : first + count], tokenizer.special.eos]
            shown.update(range(first, first + count))
            is_whole = first <= wanted[0] and wanted[1] < first + count
            found = (windows.targets[row] + first - len(head)).tolist()
            assert found == list(wanted) if is_whole else windows.targets[row].tolist() == [0, 0]
        assert shown.keys() == set(range(len(ids)))
        assert windows.targets[rows].any()


@given(st.integers(0, 80), st.integers(1, 20), st.integers(1, 25))
def test_windows_start_and_have_tokens_of_their_own_as_run_squad_lets_them(length, room, stride):
    wanted, start = [], 0
    while True:
        shown = min(length - start, room)
        wanted.append((start, start + shown))
        if start + shown == length:
            break
        start += min(shown, stride)
    windows = question_windows.windows_over(length, room, stride)
    assert windows == wanted
    own = question_windows.own_tokens(windows)
    for token in range(length):
        scores = {
            window: min(token - start, end - 1 - token) + 0.01 * (end - start)
            for window, (start, end) in enumerate(windows)
            if start <= token < end
        }
        best = max(scores, key=scores.get)  # the first of equal ones
        starts = [start for start, _ in windows]
        found = [window for window, (first, last) in enumerate(own) if first <= token - starts[window] < last]
        assert found == [best]


def test_white_space_at_the_ends_of_spans_goes_and_sizes_that_do_not_fit_are_refused():
    spans = [(0, 3), (3, 5), (5, 5), (5, 7), (0, 0)]
    assert question_windows.without_spaces(spans, " ab  c ").tolist() == [[1, 3], [5, 5], [5, 5], [5, 6], [0, 0]]
    for sizes in ((0, 1, 1), (384, 0, 64), (384, 128, 0), (20, 5, 16)):
        with pytest.raises(UserError, match="must be at least 1 token|too short for a context"):
            WindowSettings(*sizes)


def one_by_one(starts, ends, is_start, is_end, longest, n_best):
    """(score, start, end) of a window's spans, the best first."""
    found = [
        (starts[first] + ends[last], first, last)
        for first in range(len(starts))
        for last in range(first, min(first + longest, len(ends)))
        if is_start[first] and is_end[last]
    ]
    return sorted(found, key=lambda span: (-span[0], *span[1:]))[:n_best]


@given(
    *(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 12), st.integers(1, 30)),
    st.sampled_from([0.0, 0.3, 1.0]),
)
def test_all_spans_are_compared(seed, tokens, longest, n_best, share):
    rng = np.random.default_rng(seed)
    starts, ends = 100 * rng.permutation(2 * tokens).reshape(2, tokens).astype(np.float32)
    ends += np.arange(tokens) / 64  # so that no two sums are equal
    is_start, is_end = rng.random((2, tokens)) < share
    found = best_spans(np.where(is_start, starts, -np.inf), np.where(is_end, ends, -np.inf), longest, n_best)
    wanted = one_by_one(starts, ends, is_start, is_end, longest, n_best)
    assert [score for *_, score in found] == [float(score) for score, *_ in wanted]
    assert len({(start, end) for start, end, _ in found}) == len(found)


def test_equal_spans_half_precision_and_infinite_logits():
    zeros = np.zeros(5, np.float32)
    assert best_spans(zeros, zeros, longest=3, n_best=1) == [(0, 0, 0.0)], "the first and shortest"
    starts = np.array([1, -np.inf, 5], np.float32)
    ends = np.array([1, -np.inf, 2], np.float32)
    assert best_spans(starts, ends, longest=3, n_best=2) == [(2, 2, 7.0), (0, 2, 3.0)]


# Of ODD.
ANSWERS = ["Well", "“Well…”", "U.S.", "A\u0301gnes", "1\u00a0000\u00a0000", "5%", "Müller-Straße 12", "İstanbul", "😀"]


def answered(file, windows, logits, **options):
    """The answers of all windows' logits."""
    collector = SpanCollector(windows, file, **options)
    collector.add(np.arange(len(windows)), *logits)
    return collector.answers()


@pytest.mark.parametrize("algorithm", SIZES)
def test_odd_answers_come_back_as_they_stand_there_and_a_context_without_a_token_has_none(algorithm, tmp_path):
    tokenizer = trained_on_odd(algorithm, tmp_path)
    questions = [(f"Which {number}?", answer) for number, answer in enumerate(ANSWERS)]
    file = read_squad(write_squad(tmp_path / "dev-v1.1.json", article("Odd", (ODD, questions))))
    for longest in (384, 40):
        windows = make_windows(tokenizer, file, WindowSettings(longest, 8, 8))
        assert (len(windows) > len(ANSWERS)) == (longest == 40)
        assert lost_by_heart(file, windows) == []
    content = {"data": [{"paragraphs": [{"context": "\x00", "qas": [{"id": "1", "question": "\x00?"}]}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(content))
    file = read_squad(tmp_path / "dev.json", needs_answers=False)
    windows = make_windows(tokenizer, file)
    (answers,) = answered(file, windows, np.zeros((2, 1, int(windows.sizes[0])), np.float32))
    assert [answer.text for answer in answers] == (["\x00"] if algorithm == "byte-level BPE" else [])


@pytest.fixture
def toy(tmp_path):
    """One question, in several windows."""
    context = "Anna sees Ben . Cara sees Dan . Anna sees Eva ."
    tokenizer = train_tokenizer(tmp_path / "tokenizer", [context, "Who?"], 40, TextSettings(character_coverage=1.0))
    file = read_squad(write_squad(tmp_path / "dev-v1.1.json", article("One", (context, [("Who?", "Cara")]))))
    return file, make_windows(tokenizer, file, WindowSettings(14, 4, 3))


def test_windows_come_in_any_order_and_padding_changes_nothing(toy):
    file, windows = toy
    assert len(windows) > 2
    logits = np.random.default_rng(1).normal(size=(2, len(windows), 14)).astype(np.float32)
    parts = SpanCollector(windows, file, longest=4, n_best=5)
    for window in reversed(range(len(windows))):
        padded = np.pad(logits[:, window : window + 1], ((0, 0), (0, 0), (0, 9)), constant_values=50.0)
        parts.add(np.array([window]), *padded)
    assert answered(file, windows, logits, longest=4, n_best=5) == parts.answers()


def test_answers_are_texts_of_the_context_each_once_and_shares_add_up(toy):
    file, windows = toy
    logits = np.random.default_rng(2).normal(size=(2, len(windows), 14))
    (answers,) = answered(file, windows, logits, longest=4, n_best=50)
    assert all(file.contexts[0][answer.start : answer.end] == answer.text for answer in answers)
    texts = [answer.text for answer in answers]
    assert len({*texts}) == len(texts) > 20
    assert sum(answer.probability for answer in answers) == pytest.approx(1)
    shares = np.exp([answer.score for answer in answers])
    np.testing.assert_allclose([answer.probability for answer in answers], shares / shares.sum(), rtol=1e-6)
    assert shares.tolist() == sorted(shares.tolist(), reverse=True)
    # Nothing outside the context is an answer, however likely <s>, the question, the separators or the padding are.
    logits = np.full((2, len(windows), 20), -5.0, np.float32)
    for window in range(len(windows)):
        inside = slice(windows.place[window], windows.place[window] + windows.count[window])
        logits[:, window, : inside.start] = logits[:, window, inside.stop :] = 100.0
    assert [answer.score for answer in answered(file, windows, logits, n_best=3)[0]] == [-10.0] * 3


def lost_by_heart(file: SquadFile, windows: Windows, longest: int = 30) -> list[str]:
    """Questions whose answers do not come back where a model knows each by heart (docs/finetuning.md).

    Logits are 1 at the start and the end of an answer and 0 elsewhere; `longest` tokens an answer, as in prediction.
    """
    collector = SpanCollector(windows, file, longest, n_best=1)
    for first in range(0, len(windows), 64):
        index = np.arange(first, min(first + 64, len(windows)))
        logits = np.zeros((2, len(index), int(windows.sizes[index].max())), np.float32)
        for each, targets in zip(logits, windows.targets[index].T, strict=True):
            each[np.arange(len(index)), targets] = 1.0
        collector.add(index, *logits)
    pairs = zip(file.questions, collector.answers(), strict=True)
    return [each.id for each, found in pairs if not found or not exact_match(found[0].text, [each.answers[0].text])]
