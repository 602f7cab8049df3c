"""``lazyformer evaluate``: from models and pairs to the report, what a rerun keeps, and what is refused."""

import json
import shutil

import pytest
from helpers import ROOT, build_toy_corpus
from in_process import invoke, refusal

from lazyformer_fairseq.storage.json_files import read_json
from lazyformer_fairseq.zero_shot.results import Answers

ENCODER = ROOT / "tests/fixtures/checkpoints/encoder"
EXPORTED = ROOT / "tests/fixtures/checkpoints/exported"


@pytest.fixture
def pairs(tmp_path):
    """Two paradigms of one phenomenon and one of another."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    for name, term, bad in (("a1", "order", "Ben river."), ("a2", "order", "river the."), ("b", "form", "Annas.")):
        rows = [
            {"sentence_good": f"{who} sees the river.", "sentence_bad": f"{who} {bad}", "linguistics_term": term}
            for who in ("Anna", "Ben", "Otto")
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_from_models_to_the_report(pairs, tmp_path):
    """A checkpoint, the same model as an export, and counts of a corpus stand side by side."""
    corpus = tmp_path / "corpus"
    build_toy_corpus(corpus, vocab_size=160)
    out = tmp_path / "out"
    words = ["evaluate", f"one={ENCODER}", f"same={ENCODER / 'checkpoint_last.pt'}", "--ngram", corpus, "--order", 2]
    shown = invoke(*words, "--data", pairs, "--output", out, "--device", "cpu")
    assert shown.startswith("one prefers the good sentence in "), "the verdict comes first"
    assert "0.0 points above one (±0.0)" in shown, "equal models do not differ"
    assert "| mean over paradigms |" in shown and "2-gram" in shown
    assert "This is not all of BLiMP" in shown
    assert {path.name for path in out.iterdir()} == {
        "one.json",
        "same.json",
        "2-gram.json",
        "report.md",
        "phenomena.png",
    }
    page = (out / "report.md").read_text()
    assert "| a1" in page and "![phenomena](phenomena.png)" in page
    one = read_json(out / "one.json")
    assert one["margins"] == read_json(out / "same.json")["margins"]
    assert {name: len(margins) for name, margins in one["margins"].items()} == {"a1": 3, "a2": 3, "b": 3}


def test_a_rerun_keeps_what_is_there(pairs, tmp_path, monkeypatch):
    """Answers are read back; a new model is scored alone; another model by the same name is refused."""
    words = ("--data", pairs, "--output", tmp_path / "out", "--benchmark", "pairs", "--device", "cpu")
    first = invoke("evaluate", f"one={ENCODER}", *words)
    monkeypatch.setattr("lazyformer_fairseq.zero_shot.results.answer", int)  # fails where it is called
    assert invoke("evaluate", f"one={ENCODER}", *words) == first
    assert "one.json contains answers from a different model" in refusal("evaluate", f"one={EXPORTED}", *words)
    assert "another model is also called one" in refusal("evaluate", f"one={ENCODER}", f"one={EXPORTED}", *words)
    kept = tmp_path / "out" / "one.json"
    kept.write_text(kept.read_text().replace('"cut": 0', '"cut": 1'))
    assert "one.json is damaged" in refusal("evaluate", f"one={ENCODER}", *words)


def test_what_is_refused(pairs, tmp_path):
    """No model at all, a missing folder, and a checkpoint without its tokenizer."""
    assert "pass a MODEL or --ngram" in refusal("evaluate", "--data", pairs)
    assert "nowhere: no such file or folder" in refusal("evaluate", ENCODER, "--data", tmp_path / "nowhere")
    alone = tmp_path / "alone.pt"
    shutil.copy(ENCODER / "checkpoint_last.pt", alone)
    message = refusal("evaluate", alone, "--data", pairs, "--output", tmp_path / "out")
    assert "tokenizer: no such folder" in message


def test_equal_scores_are_wrong_and_paradigms_weigh_the_same():
    """By hand: 1 of 2 and 3 of 4 right are a mean of 62.5%, with the standard errors of two shares."""
    margins = {"a": [0.0, 1.0], "b": [1.0, 2.0, 3.0, -1.0]}
    answers = Answers("m", "s", "i", margins, cut=0, unknown=0, sentences=12, tokens=1, seconds=1.0, machine={})
    other = Answers("o", "s", "j", {**margins, "a": [1.0, 1.0]}, 0, 0, 12, 1, 1.0, {})
    assert answers.mean_accuracy(["a", "b"]) == 0.625
    assert answers.standard_error(["a", "b"]) == pytest.approx((0.25 / 2 + 0.1875 / 4) ** 0.5 / 2)
    assert other.difference(answers, ["a", "b"]) == (0.25, pytest.approx((0.25 / 2) ** 0.5 / 2))
