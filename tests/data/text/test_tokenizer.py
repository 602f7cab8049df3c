"""Text to ids, their places and back; how a tokenizer is trained; its folder, its dictionary, models of one's own."""

import hashlib
import io
import json
import random
import re
import string
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import sentencepiece
import torch
from helpers import count_words, train_tokenizer
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from odd_texts import texts

from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.data.text.interface import cut_input
from lazyformer_fairseq.data.text.normalisation import UNK, TextSettings
from lazyformer_fairseq.data.text.tokenizer import DICTIONARY_FILE, LONGEST_TRAINING_WORD, Tokenizer, train_model
from lazyformer_fairseq.errors import UserError

SENTENCES = [
    "The house of the old king is red, isn't it?",
    "A cat sat on the mat; it was “good” (so they said)...",
    "See <url> or write to <email> -- the kings' houses cost $5,300 each.",
    string.printable,  # every ASCII character gets a piece
]
ALL_CHARACTERS = TextSettings(character_coverage=1.0)
PLAIN = TextSettings(lower_case=False, normalise_punctuation=False, moses_tokenise=False)
SYMBOLS = ["<url>", "<email>", "<file>", "<mask>"]
ASCII_TEXT = st.text(string.ascii_letters + string.digits + string.punctuation + " ", max_size=60)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
MIXED_TEXT = st.lists(st.one_of(st.sampled_from(SYMBOLS), ANY_TEXT), max_size=6).map("".join)


def train(folder, sentences=SENTENCES * 20, vocab_size=160, settings=ALL_CHARACTERS) -> Tokenizer:
    return train_tokenizer(folder, sentences, vocab_size, settings)


def symbols(tokenizer, ids):
    return [tokenizer.dictionary[index] for index in ids]


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained") / "tokenizer")


@pytest.fixture
def copy(tokenizer, tmp_path):
    for _ in range(2):  # the same again: nothing to do
        tokenizer.save(tmp_path / "copy")
    return tmp_path / "copy"


def test_half_a_character_is_refused_in_words(data_folder):
    tokenizer = Tokenizer.load(data_folder / "tokenizer")
    for encode in (tokenizer.encode, tokenizer.encode_with_offsets):
        with pytest.raises(UserError, match=r"unpaired surrogate at character 3 of a text, in 'a .ud800 b'"):
            encode("a \ud800 b")


def test_text_comes_back_readable_spelt_in_bytes_if_asked_for(tokenizer, tmp_path):
    ids = tokenizer.encode("The <mask> of the King isn't “red”, is it?")
    assert tokenizer.decode(ids) == 'the <mask> of the king isn\'t "red," is it?'
    assert tokenizer.decode([0, *ids, 2, 1, 1]) == tokenizer.decode(torch.tensor(ids)) == tokenizer.decode(ids)
    ids = tokenizer.encode("a<mask>b, <URL>'s 猫 <unk>")
    assert tokenizer.words(ids) == "a <mask> b , <url> 's <unk> <unk>"
    assert [symbol for symbol in symbols(tokenizer, ids) if symbol in SYMBOLS] == ["<mask>", "<url>"]
    assert ids.count(UNK) == 2
    a, b = tokenizer.encode("the old house"), tokenizer.encode("a cat")
    assert tokenizer.build_input("the old house") == [0, *a, 2]
    assert tokenizer.build_input("the old house", "a cat") == [0, *a, 2, 2, *b, 2]
    with pytest.raises(UserError, match="inputs of 4 tokens"):
        cut_input(np.array(tokenizer.build_input("a", "b")), 4, 2)
    spelling = train(tmp_path / "bytes", vocab_size=420, settings=TextSettings(byte_fallback=True))
    ids = spelling.encode("the 猫 <mask>")
    assert UNK not in ids and spelling.decode(ids) == "the 猫 <mask>"


@given(MIXED_TEXT | ASCII_TEXT)
def test_words_survive_with_no_stray_piece_and_no_id_beyond_the_dictionary(tokenizer, text):
    assume("▁" not in text)  # sentencepiece's own sign for a space
    ids = tokenizer.encode(text)
    for piece, following in pairwise([*symbols(tokenizer, ids), "</s>"]):
        assert piece != "▁" or (following not in SYMBOLS and following != "</s>" and not following.startswith("▁"))
    assert all(0 <= index < len(tokenizer.dictionary) for index in ids)
    words = tokenizer.normalise(text)
    assert tokenizer.encode_normalised(words) == ids
    assert tokenizer.words(ids) == words or not text.isascii() or "\x7f" in text  # which no text has: unknown


ORDINARY = [
    *SENTENCES[:3],
    "Mr. “X” said: ‘no’… ",
    "The <MASK> of «it»—<Url> ( x )",
    "they're \"here\", 5 % Mr. J.R. O'Neil,\t",
    "``so'' 5\u00a0cm 1\u00a0000\u00a0000 nº\u00a07,\u00a0«\u00a0a\u00a0»  \x01é",
]


def test_what_stands_there_is_what_the_piece_spells(tmp_path):
    tokenizer = train(tmp_path / "tokenizer", SENTENCES[:3] * 20)
    text = 'The <MASK> of “it” , "house" 5\u00a0300 (…)'
    ids, spans = tokenizer.encode_with_offsets(text)
    names = [symbol.replace("\u2581", "") for symbol in symbols(tokenizer, ids)]
    there = [text[slice(*span)] for name, span in zip(names, spans, strict=True) if name]
    assert there[:7] == ["The", "<MASK>", "of", "“", "it", "”", ","]
    assert "".join(there[7:]) == '"house"5\u00a0300(…)'


@settings(max_examples=120)
@given(st.lists(texts | st.sampled_from(ORDINARY) | st.text(max_size=20), max_size=4).map("".join))
@example("\u2581 \u2581x \u2581<mask>")
@example('İ ΟΔΟΣ ſ \x00\x1f DOTMULTI ".",".. "')
def test_every_text_has_its_ids_and_spans_within_it(tokenizer, text):
    ids, spans = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text) and len(spans) == len(ids)
    assert all(0 <= start <= end <= len(text) for start, end in spans)


def train_sentencepiece(sentences, **options) -> bytes:
    """A model that sentencepiece trains in its usual way."""
    model = io.BytesIO()
    options = {"hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **options)
    return model.getvalue()


@pytest.mark.parametrize("algorithm", ["unigram", "bpe"])
@pytest.mark.parametrize("byte_fallback", [False, True])
def test_places_through_a_model_with_a_normalisation_of_its_own(tmp_path, algorithm, byte_fallback):
    size = 400 if byte_fallback else 120
    model = train_sentencepiece(SENTENCES[:3] * 20, vocab_size=size, model_type=algorithm, byte_fallback=byte_fallback)
    (tmp_path / "its.model").write_bytes(model)
    tokenizer = Tokenizer.from_model(tmp_path / "its.model", tmp_path / "tokenizer", PLAIN)
    text = "ﬁne\u3000house… 三 a"
    ids, spans = tokenizer.encode_with_offsets(text)
    # Of divisions that are equally likely, SentencePiece takes another one here than in the word alone.
    assert algorithm == "unigram" or ids == tokenizer.encode(text)
    assert (0, 1) in spans  # of the ligature, of which f and i are made
    assert all(text[start:end] in "house" for start, end in spans if 4 <= start < 9)
    assert [text[slice(*span)] for span in spans].count("三") == (3 if byte_fallback else 1)


def pieces_of(model):
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(index) for index in range(processor.get_piece_size())]


def test_bpe_on_counted_words_is_bpe_on_the_sentences():
    words = "the house houses mouse old older of king".split()
    text = [" ".join(random.Random(n).choices(words, k=9)) + f" {n} ." for n in range(200)]
    pieces = pieces_of(train_model(count_words(text), 80, ALL_CHARACTERS))
    # sentencepiece's usual way, without <s> <pad> </s> <url> <email> <file> <mask>
    usual = dict(model_type="bpe", normalization_rule_name="identity", vocab_size=80 - 7, hard_vocab_limit=True)
    usual |= dict(unk_id=0, bos_id=-1, eos_id=-1, pad_id=-1, character_coverage=1.0)
    assert pieces == pieces_of(train_sentencepiece(text, **usual))
    more = [("<url>", 10_000), ("a<mask>b", 10_000), ("<UNK>", 10_000)]
    pieces = pieces_of(train_model([*count_words(text), *more], 80, ALL_CHARACTERS))
    assert not any("<" in piece or "mask" in piece for piece in pieces[1:])


def test_counts_beyond_32_bits_and_very_long_words():
    counts = [("ab", 2**33), ("cd", 2**32 + 1), ("ef", 2**31)]
    assert pieces_of(train_model(counts, 19, ALL_CHARACTERS))[1:5] == ["ab", "▁ab", "cd", "▁cd"]
    counts = [("x" * (1 << 21), 1), ("猫" * (LONGEST_TRAINING_WORD + 1), 1), (string.ascii_lowercase, 3)]
    assert {"xx", "猫猫"} <= set(pieces_of(train_model(counts, 60, ALL_CHARACTERS)))


def test_same_text_same_bytes(tmp_path):
    sentences = [f"word{n % 97}x{n % 31} stands near house number {n * n}" for n in range(600)]
    train(tmp_path / "once", iter(sentences))
    train(tmp_path / "again", iter(sentences[::-1]))
    assert contents(tmp_path / "once") == contents(tmp_path / "again")


def test_what_cannot_be_trained_and_what_would_be_overwritten(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"vocabulary of 9000: too large.*at most") as caught:
        train(tmp_path / "t", vocab_size=9000)
    largest = int(str(caught.value).split("at most ")[1].split(",")[0])
    assert len(train(tmp_path / "t", vocab_size=largest).dictionary) == largest
    for vocab_size, message in ((largest + 1, "large"), (-1, "small"), (8, "small"), (20, "small")):
        with pytest.raises(UserError, match=f"vocabulary of {vocab_size}: too {message}") as caught:
            train(tmp_path / "u", vocab_size=vocab_size)
    train(tmp_path / "smallest", vocab_size=int(str(caught.value).split("at least ")[1]))
    for sentences in ([], ["", "  "], ["<mask> <url>"]):
        with pytest.raises(UserError, match="no text"):
            train(tmp_path / "u", sentences)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").write_text("precious")
    for write in (tokenizer.save, train):
        with pytest.raises(UserError, match="already exists"):
            write(tmp_path / "mine")
    assert contents(tmp_path / "mine") == {"mine.txt": b"precious"}


def test_a_copy_is_the_same_tokenizer_with_a_dictionary_of_fairseqs(tokenizer, copy, tmp_path):
    from fairseq.data import Dictionary

    loaded = Tokenizer.load(copy)
    assert (loaded.settings, loaded.dictionary) == (tokenizer.settings, tokenizer.dictionary)
    assert loaded.encode(SENTENCES[2]) == tokenizer.encode(SENTENCES[2])
    theirs = Dictionary()
    theirs.add_from_file(str(copy / DICTIONARY_FILE))
    names = theirs.symbols
    assert names == tokenizer.symbols == tokenizer.dictionary.symbols and len(set(names)) == 160
    assert [*names[:4], *names[-4:]] == ["<s>", "<pad>", "</s>", "<unk>", *SYMBOLS] and tokenizer.mask_index == 159
    theirs.save(str(tmp_path / "dict.txt"))
    assert (tmp_path / "dict.txt").read_bytes() == (copy / DICTIONARY_FILE).read_bytes()
    assert (theirs.bos(), theirs.pad(), theirs.eos(), theirs.unk()) == (0, 1, 2, UNK)


def describe(of_text=(), name="dict.txt", change=bytes, **changes):
    """Rewrites the file and tokenizer.json, with the true hashes of what lies there then."""

    def rewrite(folder):
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        description = json.loads((folder / "tokenizer.json").read_text()) | changes
        for file in ("dict.txt", "sentencepiece.model"):
            description["sha256"][file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        description["settings"] |= dict(of_text)
        (folder / "tokenizer.json").write_text(json.dumps(description))

    return rewrite


def truncate(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-20])


def write(text):
    return lambda folder: (folder / "tokenizer.json").write_text(text)


swapped = partial(re.sub, rb"(.*\n)(.*\n)", rb"\2\1", count=1)  # the first two lines
PICKLE = b"\x80\x04cos\nsystem\n"
DAMAGE = [
    (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json: cannot be read"),
    (lambda folder: (folder / "dict.txt").unlink(), r"dict\.txt: cannot be read"),
    *((truncate(name), f"{name}: this file does not match") for name in ("sentencepiece.model", "dict.txt")),
    (describe(name="sentencepiece.model", change=lambda _: PICKLE), r"sentencepiece\.model: not a sentencepiece model"),
    (describe(change=swapped), r"dict\.txt: the symbols do not match"),
    (describe(format_version=2), r"tokenizer\.json: format version 2"),
    (describe(settings={"lower_case": True}), r"byte_fallback.* is missing"),
    *((write(text), r"tokenizer\.json") for text in ("", "{", "[1]", "{}", '{"format_version": 1}')),
    (write('{"format_version": 1, "sha256": {}}'), r"tokenizer\.json: field 'settings' is missing"),
    (describe({"stemming": True}), r"tokenizer\.json: .*unknown key 'stemming'"),
    (describe({"lower_case": "yes"}), r"tokenizer\.json: .*'lower_case' is 'yes'"),
    (describe({"language": "tlh"}), r"tokenizer\.json: .*language = 'tlh'"),
    (describe({"special_tokens": ["<mask>"]}), r"tokenizer\.json: .*special_tokens contains '<mask>'"),
    (describe({"special_tokens": "<url>"}), r"tokenizer\.json: .*'special_tokens' is '<url>'"),
    (describe({"character_coverage": 1.5}), r"tokenizer\.json: .*character_coverage = 1.5"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_a_damaged_folder_is_refused_and_the_file_named(copy, damage, message):
    damage(copy)
    with pytest.raises(UserError, match=message):
        Tokenizer.load(copy)


def own_model(folder, **options):
    text = ["The house of the old king is red.", "A cat sat on the mat; it was good."] * 20
    (folder / "own.model").write_bytes(train_sentencepiece(text, **{"vocab_size": 40, **options}))
    return folder / "own.model"


AS_T5 = dict(unk_id=2, pad_id=0, eos_id=1, bos_id=-1, unk_piece="[UNK]", control_symbols="<cls>")


@pytest.mark.parametrize("options", [{}, dict(model_type="bpe", vocab_size=60, hard_vocab_limit=True), AS_T5])
def test_a_model_of_ones_own(tmp_path, options):
    model = sentencepiece.SentencePieceProcessor(str(own_model(tmp_path, **options)))
    tokenizer = Tokenizer.from_model(tmp_path / "own.model", tmp_path / "own", PLAIN)
    text = "The cat <url> sat on the red house."
    pieces = [*model.encode("The cat", out_type=str), "<url>", *model.encode("sat on the red house.", out_type=str)]
    assert symbols(tokenizer, tokenizer.encode(text)) == pieces
    assert tokenizer.decode([0, *tokenizer.encode(text), 2]) == text
    assert tokenizer.encode("猫").count(tokenizer.dictionary.unk()) == 1
    ids, lengths = tokenizer.encode_words(text.split())
    assert ids.tolist() == tokenizer.encode(text) and len(lengths) == 8
    names = tokenizer.dictionary.symbols
    assert len(names) == len(set(names)) and names[-1] == "<mask>" and "[UNK]" not in names and "<cls>" not in names
    Tokenizer.load(tmp_path / "own").save(tmp_path / "copy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_by_whitespace": False, "model_type": "bpe", "vocab_size": 80}, "own.model: the piece .* contains a"),
        ({"add_dummy_prefix": False}, "own.model: words have different pieces at the beginning of a text"),
        ({"user_defined_symbols": "<mask>"}, "'<mask>' would occur twice"),
    ],
)
def test_a_model_of_ones_own_that_cannot_be_used(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        Tokenizer.from_model(own_model(tmp_path, **options), tmp_path / "own", PLAIN)
    (tmp_path / "no.model").write_text("no model")
    for name, message in (("no.model", "not a sentencepiece model"), ("missing", "cannot be read")):
        with pytest.raises(UserError, match=f"{name}: {message}"):
            Tokenizer.from_model(tmp_path / name, tmp_path / "own", PLAIN)
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize(
    "content",
    ["the 5\nof 4\n", "a b 3\r\nc 1\r\n", "ü 1\n▁a 0\n#fairseq -1", " 7\n"],
)
def test_read_as_fairseq_does(content, tmp_path):
    from fairseq.data import Dictionary

    path = tmp_path / "dict.txt"
    path.write_bytes(content.encode())
    ours, theirs = load_dictionary(path), Dictionary.load(str(path))
    assert ours == theirs and ours.count == theirs.count


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "dict.txt: not a dictionary, because it contains no symbols"),
        (b"the 5\nof\n", "dict.txt, line 2: the line is malformed; a dictionary has lines of the form 'symbol count'"),
        (b"the 5\nof 4\nthe 3\n", "dict.txt, line 3: the symbol 'the' is repeated; a dictionary has"),
        (b"the 5\n\xff\xfe 3\n", "dict.txt: not UTF-8 text"),
        (b"the " + b"9" * 5000 + b"\n", "dict.txt, line 1"),
    ],
)
def test_odd_lines_and_what_cannot_be_read_are_named(content, words, tmp_path):
    path = tmp_path / "dict.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_dictionary(path)
    for other, message in (("none.txt", "No such file.*; use the output folder"), ("", "cannot be read")):
        with pytest.raises(UserError, match=message):
            load_dictionary(tmp_path / other)
