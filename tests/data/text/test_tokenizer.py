"""Text to ids and back, and how a tokenizer is trained."""

import string
from itertools import pairwise

import pytest
import torch
from fairseq.data import Dictionary
from hypothesis import assume, given
from hypothesis import strategies as st
from toy_tokenizer import symbols, train

from lazyformer_fairseq.data.text.normalisation import TextNormaliser, TextSettings
from lazyformer_fairseq.data.text.tokenizer import BOS, DICTIONARY_FILE, EOS, PAD, UNK
from lazyformer_fairseq.errors import UserError

SYMBOLS = ["<url>", "<email>", "<file>", "<mask>"]
ASCII_TEXT = st.text(string.ascii_letters + string.digits + string.punctuation + " ", max_size=60)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
MIXED_TEXT = st.lists(st.one_of(st.sampled_from(SYMBOLS), ANY_TEXT), max_size=6).map("".join)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained") / "tokenizer")


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# Text to ids and back


def test_dictionary_order(tokenizer):
    names = tokenizer.dictionary.symbols
    assert names[:4] == ["<s>", "<pad>", "</s>", "<unk>"]
    assert names[-4:] == ["<url>", "<email>", "<file>", "<mask>"]
    assert len(names) == len(set(names)) == 160
    assert tokenizer.mask_index == 159


def test_dictionary_file_is_fairseqs(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "copy")
    theirs = Dictionary()
    theirs.add_from_file(str(tmp_path / "copy" / DICTIONARY_FILE))
    assert theirs.symbols == tokenizer.symbols == tokenizer.dictionary.symbols
    theirs.save(str(tmp_path / "dict.txt"))
    assert (tmp_path / "dict.txt").read_bytes() == (tmp_path / "copy" / DICTIONARY_FILE).read_bytes()
    assert (theirs.bos(), theirs.pad(), theirs.eos(), theirs.unk()) == (BOS, PAD, EOS, UNK)


def test_text_comes_back_readable(tokenizer):
    ids = tokenizer.encode("The <mask> of the King isn't “red”, is it?")
    assert tokenizer.decode(ids) == 'the <mask> of the king isn\'t "red," is it?'
    assert tokenizer.decode([0, *ids, 2, 1, 1]) == tokenizer.decode(ids)
    assert tokenizer.decode(torch.tensor(ids)) == tokenizer.decode(ids)


def test_unknown_character(tokenizer):
    ids = tokenizer.encode("the 猫 <unk>")
    assert ids.count(tokenizer.dictionary.unk()) == 2
    assert tokenizer.words(ids) == "the <unk> <unk>"


def test_byte_fallback_has_no_unknown(tmp_path):
    settings = TextSettings(byte_fallback=True, character_coverage=1.0)
    tokenizer = train(tmp_path / "bytes", vocab_size=420, settings=settings)
    ids = tokenizer.encode("the 猫 <mask>")
    assert tokenizer.dictionary.unk() not in ids
    assert tokenizer.decode(ids) == "the 猫 <mask>"


def test_symbols_stand_alone(tokenizer):
    ids = tokenizer.encode("a<mask>b, <URL>'s")
    assert tokenizer.words(ids) == "a <mask> b , <url> 's"
    assert [symbol for symbol in symbols(tokenizer, ids) if symbol in SYMBOLS] == ["<mask>", "<url>"]


@given(MIXED_TEXT)
def test_no_stray_piece_and_no_id_beyond_the_dictionary(tokenizer, text):
    assume("▁" not in text)  # sentencepiece's own sign for a space
    pieces = symbols(tokenizer, tokenizer.encode(text))
    for piece, following in pairwise([*pieces, "</s>"]):
        assert piece != "▁" or (following not in SYMBOLS and following != "</s>" and not following.startswith("▁"))
    assert all(0 <= index < len(tokenizer.dictionary) for index in tokenizer.encode(text))


@given(ASCII_TEXT)
def test_words_survive(tokenizer, text):
    words = tokenizer.normalise(text)
    assert tokenizer.words(tokenizer.encode(text)) == words
    assert tokenizer.encode_normalised(words) == tokenizer.encode(text)


@given(st.lists(MIXED_TEXT.map(str.strip).filter(bool), max_size=6), st.integers(1, 300))
def test_words_encoded_at_once(tokenizer, words, times):
    ids, lengths = tokenizer.encode_words(words * times)
    one_by_one = [tokenizer.encode_normalised(word) for word in words] * times
    assert ids.tolist() == [index for word_ids in one_by_one for index in word_ids]
    assert lengths.tolist() == [len(word_ids) for word_ids in one_by_one]


def test_sentences_are_the_same_words_alone_and_together():
    normalise = TextNormaliser(TextSettings())
    first, second = "Mr. Smith died in No. 5.", "The king left."
    assert normalise(f"{first} {second}") == f"{normalise(first)} {normalise(second)}"
    assert normalise(first) == "mr. smith died in no. 5 ."


def test_settings_can_be_turned_off():
    settings = TextSettings(lower_case=False, normalise_punctuation=False, moses_tokenise=False)
    assert TextNormaliser(settings)(" It’s  a <MASK>. ") == "It’s a <mask> ."
    assert TextNormaliser(settings).readable("It’s a <mask> .") == "It’s a <mask> ."


def test_build_input(tokenizer):
    a, b = tokenizer.encode("the old house"), tokenizer.encode("a cat")
    assert tokenizer.build_input("the old house") == [0, *a, 2]
    assert tokenizer.build_input("the old house", "a cat") == [0, *a, 2, 2, *b, 2]
    with pytest.raises(UserError, match="inputs of 4 tokens"):
        tokenizer.build_input("a", "b", max_length=4)


# Training


def test_same_text_same_bytes(tmp_path):
    sentences = [f"word{n % 97}x{n % 31} stands near house number {n * n}" for n in range(600)]
    train(tmp_path / "once", iter(sentences))
    train(tmp_path / "again", iter(sentences[::-1]))
    assert contents(tmp_path / "once") == contents(tmp_path / "again")


def test_largest_vocabulary_of_the_error_is_possible(tmp_path):
    with pytest.raises(UserError, match=r"vocabulary of 9000: too large.*at most") as caught:
        train(tmp_path / "t", vocab_size=9000)
    largest = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert len(train(tmp_path / "t", vocab_size=largest).dictionary) == largest
    with pytest.raises(UserError, match="too large"):
        train(tmp_path / "u", vocab_size=largest + 1)


@pytest.mark.parametrize("vocab_size", [-1, 8, 20])
def test_vocabulary_too_small(tmp_path, vocab_size):
    with pytest.raises(UserError, match=f"vocabulary of {vocab_size}: too small"):
        train(tmp_path / "t", vocab_size=vocab_size)


@pytest.mark.parametrize("sentences", [[], ["", "  "], ["<mask> <url>"]])
def test_empty_text(tmp_path, sentences):
    with pytest.raises(UserError, match="no text"):
        train(tmp_path / "t", sentences)


def test_no_file_of_another_is_overwritten(tokenizer, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        tokenizer.save(tmp_path)
    with pytest.raises(UserError, match="exists already"):
        train(tmp_path)
    assert contents(tmp_path) == {"mine.txt": b"precious"}
