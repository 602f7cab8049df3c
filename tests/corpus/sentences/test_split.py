"""The step that divides documents into sentences."""

import pickle

import pytest
from datatrove.data import Document
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.sentences.ends import SplitSentences, join_short


def outcome(texts: list[str], **options) -> tuple[list[str], dict[str, int]]:
    """(texts that go on, statistics)."""
    step = SplitSentences(**options)
    documents = list(step.run(Document(text=text, id=f"file:{i}") for i, text in enumerate(texts, 1)))
    return [document.text for document in documents], {name: stat.total for name, stat in step.stats.stats.items()}


def test_one_sentence_a_line():
    texts, stats = outcome(["Dr. Hall slept all day. Then he woke up again.\nThis is another paragraph."])
    assert texts == ["Dr. Hall slept all day.\nThen he woke up again.\nThis is another paragraph."]
    assert stats["sentences"] == 3


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("It was very late. No. Nobody was there.", "It was very late. No. Nobody was there."),
        ("No! It was very late.\nYes.", "No! It was very late. Yes."),
        ("Chapter 4\nIt was a dark night.", "Chapter 4 It was a dark night."),
        ("It was a dark night.\nWhy?\nNobody could ever say.", "It was a dark night.\nWhy? Nobody could ever say."),
        ("Yes.", "Yes."),
        ("1 2 3 4\n5 6 7 8", "1 2 3 4\n5 6 7 8"),
    ],
)
def test_short_sentences_are_joined(text, joined):
    assert outcome([text])[0] == [joined]


def test_nothing_is_joined_across_documents():
    texts, stats = outcome(["Yes.", "It was a dark night.", "No."])
    assert texts == ["Yes.", "It was a dark night.", "No."]
    assert "short sentences joined" not in stats


def test_documents_without_a_sentence_are_dropped():
    texts, stats = outcome(["", " \n ", "It was a dark night."])
    assert texts == ["It was a dark night."]
    assert stats["dropped: no sentence"] == 2
    assert stats["documents in"] == stats["documents out"] + 2


def test_joining_can_be_switched_off():
    assert outcome(["No! It was late.\nYes."], min_words=0)[0] == ["No!\nIt was late.\nYes."]


@given(st.lists(st.lists(st.text("ab ", min_size=1).filter(str.strip).map(str.strip))), st.integers(0, 6))
def test_joining_keeps_every_word_in_order(paragraphs, min_words):
    sentences = join_short(paragraphs, min_words)
    words = [word for paragraph in paragraphs for sentence in paragraph for word in sentence.split()]
    assert " ".join(sentences).split() == words
    assert all(len(sentence.split()) >= min_words for sentence in sentences) or len(sentences) == 1


def test_step_travels_to_workers_after_use():
    step = SplitSentences(min_words=2)
    document = Document(text="He left. They stayed.", id="file:1")
    step.process(document)
    again = pickle.loads(pickle.dumps(step))
    assert "_split" not in vars(again)
    assert again.process(document) is None
    assert document.text == "He left.\nThey stayed."
