"""From logits to text: the best span of all windows, cut from the original context, for three kinds of tokenizers."""

import json

import numpy as np
import pytest
from helpers import train_tokenizer
from other_tokenizers import byte_level_parts, word_piece_vocabulary
from toy_squad import article, write_squad

from lazyformer_fairseq.data.squad.answers import SpanCollector
from lazyformer_fairseq.data.squad.gold import answer_by_heart
from lazyformer_fairseq.data.squad.official import SquadFile, read_squad
from lazyformer_fairseq.data.squad.windows import WindowSettings, make_windows
from lazyformer_fairseq.data.text.library_tokenizer import adopt_tokenizer
from lazyformer_fairseq.data.text.normalisation import TextSettings

# Moses splits and normalises these, moves a quote, lower-cases; a letter with an accent of its own; no-break spaces.
ODD = (
    "He said “Well…” — the \"U.S.,\" isn't  A\u0301gnes' 1\u00a0000\u00a0000, (5%) Müller-Straße 12;\t«İstanbul» "
    "😀 end."
)
ANSWERS = ["Well", "“Well…”", "U.S.", "A\u0301gnes", "1\u00a0000\u00a0000", "5%", "Müller-Straße 12", "İstanbul"]
ANSWERS += ["😀", "end"]


def train(kind, texts, folder, size):
    """A tokenizer of ours, WordPiece or byte-level BPE, trained on texts."""
    if kind == "ours":
        return train_tokenizer(folder / "tokenizer", texts, size, TextSettings(character_coverage=1.0))
    (folder / "theirs").mkdir(parents=True)
    if kind == "word piece":
        vocabulary = word_piece_vocabulary(size=size, texts=texts)
        lines = sorted(vocabulary, key=vocabulary.get)
        (folder / "theirs" / "vocab.txt").write_text("".join(f"{piece}\n" for piece in lines), encoding="utf-8")
    else:
        vocabulary, merges = byte_level_parts(size, texts)
        (folder / "theirs" / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "theirs" / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in merges), encoding="utf-8")
    return adopt_tokenizer(folder / "theirs", folder / "tokenizer")


KINDS = ["ours", "word piece", "byte-level BPE"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest", [384, 40])
def test_odd_answers_come_back_as_they_stand_there(kind, longest, tmp_path):
    tokenizer = train(kind, (ODD,) * 3, tmp_path, {"ours": 80, "word piece": 120, "byte-level BPE": 330}[kind])
    questions = [(f"Which {number}?", answer) for number, answer in enumerate(ANSWERS)]
    file = read_squad(write_squad(tmp_path / "dev-v1.1.json", article("Odd", (ODD, questions))))
    windows = make_windows(tokenizer, file, WindowSettings(longest, 8, 8))
    assert (len(windows) > len(ANSWERS)) == (longest == 40)
    found = answer_by_heart(file, windows)
    assert {lost.wanted: (lost.found, lost.cause) for lost in found.lost} == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_without_a_token_has_no_answer(kind, tmp_path):
    tokenizer = train(kind, (ODD,) * 3, tmp_path, {"ours": 80, "word piece": 120, "byte-level BPE": 330}[kind])
    content = {"data": [{"paragraphs": [{"context": "\x00", "qas": [{"id": "1", "question": "\x00?"}]}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(content))
    file = read_squad(tmp_path / "dev.json", needs_answers=False)
    windows = make_windows(tokenizer, file)
    collector = SpanCollector(windows, file.contexts)
    collector.add(np.arange(1), *np.zeros((2, 1, int(windows.sizes[0])), np.float32))
    assert [answer.text for answer in collector.answers()[0]] == (["\x00"] if kind == "byte-level BPE" else [])


def test_an_answer_inside_a_piece_is_lost_and_told(tmp_path):
    context = "Anna has fourteen cats."
    tokenizer = train("ours", (context,) * 5, tmp_path, 40)
    file = read_squad(write_squad(tmp_path / "dev-v1.1.json", article("One", (context, [("How many?", "four")]))))
    found = answer_by_heart(file, make_windows(tokenizer, file))
    assert (found.share, found.causes) == (0.0, {"begins or ends inside a piece": 1})
    assert found.lost[0].found == "fourteen"
    file = read_squad(write_squad(tmp_path / "dev-v1.1.json", article("One", (context, [("Who?", context)]))))
    found = answer_by_heart(file, make_windows(tokenizer, file), longest=2)
    assert found.causes == {"longer than 2 tokens": 1}


@pytest.fixture(scope="module")
def sample(real_data) -> SquadFile:
    """Every tenth paragraph of 44 articles."""
    file = read_squad(real_data / "squad" / "train-v1.1.part.json")
    return SquadFile(file.path, file.paragraphs[::10])


@pytest.mark.parametrize("kind", KINDS)
def test_real_answers_come_back(kind, sample, tmp_path):
    tokenizer = train(kind, tuple(sample.contexts[::2]), tmp_path, 2000)
    found = answer_by_heart(sample, make_windows(tokenizer, sample), longest=384)
    assert found.share > 0.99, found.causes
    assert found.causes.keys() <= {"begins or ends inside a piece"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_real_answers_come_back(kind, real_data, tmp_path):
    file = read_squad(real_data / "squad" / "train-v1.1.part.json")
    tokenizer = train(kind, tuple(file.contexts[::3]), tmp_path, 8000)
    windows = make_windows(tokenizer, file)
    assert answer_by_heart(file, windows, longest=384).share > 0.99
    assert answer_by_heart(file, windows).share > 0.98


@pytest.fixture
def toy(tmp_path):
    """One question, in several windows."""
    context = "Anna sees Ben . Cara sees Dan . Anna sees Eva ."
    tokenizer = train("ours", (context, "Who?"), tmp_path, 40)
    file = read_squad(write_squad(tmp_path / "dev-v1.1.json", article("One", (context, [("Who?", "Cara")]))))
    return file, make_windows(tokenizer, file, WindowSettings(14, 4, 3))


def test_windows_come_in_any_order_and_padding_changes_nothing(toy):
    file, windows = toy
    rng = np.random.default_rng(1)
    assert len(windows) > 2
    logits = rng.normal(size=(2, len(windows), 14)).astype(np.float32)
    whole, parts = (SpanCollector(windows, file.contexts, longest=4, n_best=5) for _ in range(2))
    whole.add(np.arange(len(windows)), *logits)
    for window in reversed(range(len(windows))):
        padded = np.pad(logits[:, window : window + 1], ((0, 0), (0, 0), (0, 9)), constant_values=50.0)
        parts.add(np.array([window]), *padded)
    assert whole.answers() == parts.answers()


def test_answers_are_texts_of_the_context_each_once_and_shares_add_up(toy):
    file, windows = toy
    collector = SpanCollector(windows, file.contexts, longest=4, n_best=50)
    collector.add(np.arange(len(windows)), *np.random.default_rng(2).normal(size=(2, len(windows), 14)))
    (answers,) = collector.answers()
    assert all(file.contexts[0][answer.start : answer.end] == answer.text for answer in answers)
    texts = [answer.text for answer in answers]
    assert len({*texts}) == len(texts) == 50 or len(texts) > 20
    assert sum(answer.probability for answer in answers) == pytest.approx(1)
    shares = np.exp([answer.score for answer in answers])
    np.testing.assert_allclose([answer.probability for answer in answers], shares / shares.sum(), rtol=1e-6)
    assert shares.tolist() == sorted(shares.tolist(), reverse=True)


def test_nothing_outside_the_context_is_an_answer(toy):
    """However likely <s>, the question, the separators or the padding are."""
    file, windows = toy
    logits = np.full((2, len(windows), 20), -5.0, np.float32)
    for window in range(len(windows)):
        inside = slice(windows.place[window], windows.place[window] + windows.count[window])
        logits[:, window, : inside.start] = logits[:, window, inside.stop :] = 100.0
    collector = SpanCollector(windows, file.contexts, n_best=3)
    collector.add(np.arange(len(windows)), *logits)
    assert [answer.score for answer in collector.answers()[0]] == [-10.0] * 3
