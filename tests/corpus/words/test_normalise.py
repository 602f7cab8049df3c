"""The step that turns sentences into words."""

import pickle

import pytest
from datatrove.data import Document
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.corpus.step import TaskNotes
from lazyformer_fairseq.corpus.words.normalise import NormaliseWords, with_plain_symbols
from lazyformer_fairseq.data.text.normalisation import RESERVED_SYMBOLS, TextNormaliser, TextSettings


def words_of(text: str, settings: TextSettings = TextSettings(), format: str = "text") -> str:  # noqa: B008 (frozen)
    document = Document(text=text, id="a:1", metadata={"format": format})
    assert NormaliseWords(settings).process(document) is None
    return document.text


def test_sentences_become_lines_of_words():
    text = "“Well,” said Mr. Brown.\n\n \nIt’s at <url>, see <FILE> or <email>."
    assert words_of(text) == '" well , " said mr. brown .\nit \'s at <url> , see <file> or <email> .'


@pytest.mark.parametrize("tokenise", [True, False])
def test_symbols_of_the_model_are_made_plain(tokenise):
    settings = TextSettings(moses_tokenise=tokenise)
    words = words_of("A <mask> and <MASK>, <unk> <s> <pad> is <url>.", settings)
    assert not {*words.split()} & {*RESERVED_SYMBOLS}
    assert words.startswith("a < mask > and < mask >")
    assert "<url>" in words


def test_the_unknown_words_of_wikitext_stay():
    assert words_of("The <unk> of <mask> .", format="wikitext") == "the <unk> of < mask > ."


@given(st.lists(st.sampled_from([*RESERVED_SYMBOLS, *"<>/ aS", "mask", "unk", "<url>", "MASK"])).map("".join))
def test_no_symbol_is_left(text):
    normalise = TextNormaliser(TextSettings())
    assert not {*normalise(with_plain_symbols(text)).split(" ")} & {*RESERVED_SYMBOLS}
    assert "".join(with_plain_symbols(text).split()) == "".join(text.split())


@pytest.mark.parametrize("text", ["", " \n\u00a0\n"])
def test_a_document_without_words_is_dropped(text):
    notes = TaskNotes()
    step = NormaliseWords(TextSettings())
    step.notes = notes
    kept = list(step.run([Document(text=text, id="a:1"), Document(text="Yes.", id="a:2")]))
    assert [document.text for document in kept] == ["yes ."]
    assert notes.dropped == {"no word": ["a:1"]}
    assert step.stats["documents in"].total == 2
    assert step.stats["dropped: no word"].total == step.stats["documents out"].total == 1


def test_a_used_step_can_be_sent_to_a_worker():
    step = NormaliseWords(TextSettings())
    step.process(Document(text="Used.", id="a:1"))
    document = Document(text="It's here.", id="a:2")
    assert pickle.loads(pickle.dumps(step)).process(document) is None
    assert document.text == "it 's here ."
