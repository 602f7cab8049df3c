"""Each piece of a raw text knows where in the text it stands, through Moses' rules and the model's own."""

import pytest
import sentencepiece
from helpers import train_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from odd_texts import texts

from lazyformer_fairseq.data.text.normalisation import TextNormaliser, TextSettings, places_of
from lazyformer_fairseq.data.text.tokenizer import UNK, Tokenizer

SENTENCES = [
    "The house of the old king is red, isn't it?",
    "A cat sat on the mat; it was “good” (so they said)...",
    "See <url> or write to <email> -- the kings' houses cost $5,300 each.",
]
ORDINARY = [
    *SENTENCES,
    "Mr. “X” said: ‘no’… ",
    "The <MASK> of «it»—<Url> ( x )",
    "they're \"here\", 5 % Mr. J.R. O'Neil,\t",
    "``so'' 5\u00a0cm 1\u00a0000\u00a0000 nº\u00a07,\u00a0«\u00a0a\u00a0»  \x01é",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    return train_tokenizer(folder, SENTENCES * 20, 160, TextSettings(character_coverage=1.0))


def spelt(tokenizer: Tokenizer, text: str) -> list[tuple[str, str]]:
    """For each piece what it spells, and what stands in the text where it is said to be."""
    ids, spans = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    names = [tokenizer.symbols[index].replace("\u2581", "") for index in ids]
    return [
        (name, text[start:end])
        for index, name, (start, end) in zip(ids, names, spans, strict=True)
        if index != UNK  # which spells nothing
    ]


@pytest.mark.parametrize("text", ORDINARY)
def test_what_stands_there_is_what_the_piece_spells(tokenizer, text):
    for name, there in spelt(tokenizer, text):
        made = tokenizer.normalise(there).replace(" ", "")
        assert made == name or (made, name) in (("", "."), ("''", '"'))  # "." for the space in 1 000


def test_spans_in_detail(tokenizer):
    text = 'The <MASK> of “it”,  "house", 5\u00a0300 «…»'  # Moses writes a quote behind the marks
    there = [there for name, there in spelt(tokenizer, text) if name]
    assert there[:7] == ["The", "<MASK>", "of", "“", "it", ",", "”"]
    assert "".join(there[7:]) == '"house,"5\u00a0300…«»'


@settings(max_examples=120)
@given(st.lists(texts | st.sampled_from(ORDINARY) | st.text(max_size=20), max_size=4).map("".join))
@example("\u2581 \u2581x \u2581<mask>")
@example('İ ΟΔΟΣ ſ \x00\x1f DOTMULTI ".",".. "')
def test_every_text_has_its_ids_and_spans_within_it(tokenizer, text):
    ids, spans = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    assert len(spans) == len(ids)


@settings(max_examples=80)
@given(texts)
def test_letters_stand_where_they_stood(text):
    """No rule moves a letter, adds or drops one; so the letters of text and words agree one by one."""
    words = TextNormaliser(TextSettings(lower_case=False))(text)
    if "DOTMULTI" in text:
        return  # sacremoses's own sign for stops, which it deletes
    letters = [place for place, letter in enumerate(text) if letter.isalnum()]
    found = [place for place, letter in zip(places_of(words, text), words, strict=True) if letter.isalnum()]
    assert found == [(place, place + 1) for place in letters]


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("byte_fallback", [False, True])
def test_a_model_with_a_normalisation_of_its_own(tmp_path, kind, byte_fallback):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20),
        model_prefix=str(tmp_path / "its"),
        vocab_size=400 if byte_fallback else 120,
        hard_vocab_limit=False,
        model_type=kind,
        byte_fallback=byte_fallback,
        minloglevel=2,
    )
    plain = TextSettings(lower_case=False, normalise_punctuation=False, moses_tokenise=False)
    tokenizer = Tokenizer.from_model(tmp_path / "its.model", tmp_path / "tokenizer", plain)
    text = "ﬁne\u3000house… 三 a"
    ids, spans = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    found = dict(zip(spans, ids, strict=True))
    assert (0, 1) in found  # of the ligature, of which f and i are made
    assert {text[start:end] for start, end in spans if 4 <= start < 9} <= {
        "house"[a:b] for a in range(5) for b in range(6)
    }
    of_unknown = [span for span, index in zip(spans, ids, strict=True) if text[slice(*span)] == "三"]
    assert len(of_unknown) == (3 if byte_fallback else 1)
