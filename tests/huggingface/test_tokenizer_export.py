"""The exported tokenizer gives our ids on every text, offsets into that text, and our way back to text."""

import json
import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import sentencepiece
import transformers
from helpers import train_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from odd_texts import TELLING, lines_of, texts
from other_tokenizers import word_piece_vocabulary

from lazyformer_fairseq.data.text.dictionary_file import Dictionary
from lazyformer_fairseq.data.text.fast_tokenizer import normaliser
from lazyformer_fairseq.data.text.interface import cut_input
from lazyformer_fairseq.data.text.library_tokenizer import adopt_tokenizer
from lazyformer_fairseq.data.text.moses import BREAK, KNOWN_LANGUAGES, REWRITTEN
from lazyformer_fairseq.data.text.normalisation import BOS, EOS, MASK, PAD, UNK, UNKNOWN, TextNormaliser, TextSettings
from lazyformer_fairseq.data.text.tokenizer import Tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.huggingface.tokenizer import write_causal_tokenizer, write_tokenizer

SENTENCES = [
    "The house of the old king is red, isn't it?",
    "A cat sat on the mat; it was “good” (so they said)...",
    "See <url> or write to <email> -- the kings' houses cost $5,300 each. \u2581 é ß 三",
]
SYMBOLS = ["<url>", "<EMAIL>", "<File>", "<mask>", "<unk>", "<s>", "</s>", "<pad>", "\u2581", "\u2581 ", "\U0010ff00"]
odd_texts = st.lists(texts | st.sampled_from(SYMBOLS) | st.sampled_from(SENTENCES), max_size=5).map("".join)
any_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
PLAIN = TextSettings(lower_case=False, normalise_punctuation=False, moses_tokenise=False)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    return train_tokenizer(folder, SENTENCES * 20, 160, TextSettings(character_coverage=1.0))


# Of language models


@cache
def causal_tokenizer(symbols: tuple[str, ...]):
    """Return the dictionary of these symbols and its exported tokenizer."""
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    with TemporaryDirectory() as folder:
        assert write_causal_tokenizer(dictionary, Path(folder))
        return dictionary, transformers.AutoTokenizer.from_pretrained(folder)


@given(any_texts)
def test_bytes_of_enwik8_come_back(text):
    dictionary, tokenizer = causal_tokenizer(tuple(map(str, reversed(range(256)))))
    ids = tokenizer(text)["input_ids"]
    if not any(symbol in text for symbol in ("<s>", "<pad>", "</s>", "<unk>")):
        assert ids == [EOS, *(dictionary.index(str(byte)) for byte in text.encode())]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@given(st.text("abc "))
def test_letters_of_text8_come_back(text):
    dictionary, tokenizer = causal_tokenizer(tuple("_bca"))
    ids = tokenizer(text)["input_ids"]
    assert ids == [EOS, *(dictionary.index(letter) for letter in text.replace(" ", "_"))]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@given(st.lists(st.sampled_from(["the", "10", "@-@", "<unk>", "none", "\n", "a_"])))
def test_words_of_lines_are_cut_as_the_data_were(words):
    dictionary, tokenizer = causal_tokenizer(("the", "10", "@-@", "a_", "="))
    ids = tokenizer(" ".join(words))["input_ids"]
    assert ids == [EOS, *(dictionary.index(word.replace("\n", "</s>")) for word in words)]
    read = " ".join(word if word in dictionary or word == "\n" else "<unk>" for word in words)
    assert tokenizer.decode(ids[1:]) == read.replace(" \n", "\n").replace("\n ", "\n")


def test_colours_of_images_have_no_tokenizer(tmp_path):
    dictionary = Dictionary()
    dictionary.add_symbol("#102030")
    assert not write_causal_tokenizer(dictionary, tmp_path)
    assert not [*tmp_path.iterdir()]


class Fast:
    """The exported tokenizer; its own repr, which hypothesis would print, is as long as a book."""

    def __init__(self, ours: Tokenizer):
        self.library = ours.fast

    def pieces(self, text: str) -> list[tuple[int, str, str]]:
        """Id, name, and the text between the offsets of each piece."""
        found = self.library.encode(text, add_special_tokens=False)
        spans = [text[start:end] for start, end in found.offsets]
        return list(zip(found.ids, found.tokens, spans, strict=True))

    def ids(self, text: str) -> list[int]:
        return self.library.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def fast(ours):
    return Fast(ours)


@pytest.fixture(scope="module")
def exported(ours, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    write_tokenizer(ours, folder, max_length=32)
    return transformers.AutoTokenizer.from_pretrained(folder)


exported_normaliser, our_normaliser = cache(normaliser), cache(TextNormaliser)


def words(of: TextSettings, text: str) -> str:
    """What the exported normaliser makes of a text, written as ours writes it."""
    normal = exported_normaliser(of).normalize_str(text).replace(BREAK, "")
    for symbol in (*of.special_tokens, MASK, UNKNOWN):
        normal = normal.replace(symbol, f" {symbol} ")
    return " ".join(filter(None, normal.split(" ")))


def from_sentencepiece(folder, text_settings=PLAIN, **options) -> Tokenizer:
    options = {"vocab_size": 120, "hard_vocab_limit": False, "minloglevel": 2, **options}
    lines = iter(SENTENCES * 20)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_prefix=str(folder / "its"), **options)
    return Tokenizer.from_model(folder / "its.model", folder / "tokenizer", text_settings)


# Ids and back


@settings(max_examples=150)
@given(odd_texts | any_texts)
@example("ends with \u2581")
@example("\u2581<mask>\u2581 \u2581x")
@example("<MASK>'s <mAsK>. <ma\u017fk> <ur\u2113>")
@example("ΟΔΟΣ ΟΔΟΣ'Α Σ İ ſ")
@example('He said ",".". "". " .')
@example("三三 x三, 三'三")
@example('He said "no", "the dogs \' house" (it\'s $ 5) and "so on')
def test_same_ids_and_same_text_back(ours, fast, text):
    ids = ours.encode(text)
    assert fast.ids(text) == ids or text in ("<s>", "</s>", "<pad>")
    assert fast.library.decode(ids, skip_special_tokens=False) == ours.decode(ids)


def assert_same_ids(ours: Tokenizer, *more: str) -> None:
    fast, texts = Fast(ours), [*TELLING, *SENTENCES, "a <s> b </s>", "Ωmega 𝄞 \u2581 <MASK>x", "<pad><s>", *more]
    assert [fast.ids(text) for text in texts] == [ours.encode(text) for text in texts]


def test_telling_texts_and_controls_in_a_text(ours, fast):
    assert_same_ids(ours)
    for text in ("a <s> b", "</s>", "<pad><pad>", "x</s>"):
        assert not {BOS, PAD, EOS} & set(fast.ids(f"a {text}"))
    assert fast.ids("<s>") == [BOS]  # the one exception: nothing else in the text


@settings(max_examples=30)
@given(odd_texts, st.sampled_from(sorted(KNOWN_LANGUAGES)), st.tuples(*[st.booleans()] * 3))
@example('."."x ..".. "«\u00a0… »', "de", (True, True, True))
@example("1\u00a02\u00a03\u00a04 5\u00a067", "cs", (True, True, True))
def test_words_of_any_setting(text, language, on):
    text_settings = TextSettings(on[0], on[1], on[2], language)
    assert words(text_settings, text) == our_normaliser(text_settings)(text) or text in ("<s>", "</s>", "<pad>")


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "identity", "vocab_size": 120},
        {"normalization_rule_name": "identity", "vocab_size": 400, "byte_fallback": True},
        {},  # a normalisation of its own, by default NFKC and some spaces
    ],
)
def test_models_of_sentencepiece(tmp_path, model_type, options):
    assert_same_ids(from_sentencepiece(tmp_path, model_type=model_type, **options), "ﬁve\u3000houses…", "ｋｉｎｇ ²")


@pytest.mark.parametrize(
    ("options", "told"),
    [({"model_type": "char"}, "type CHAR"), ({"user_defined_symbols": "king"}, "'king' is of type USER_DEFINED")],
)
def test_what_the_library_lacks_is_refused(tmp_path, options, told):
    ours = from_sentencepiece(tmp_path, **options)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=told):
        write_tokenizer(ours, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_an_unknown_rule_of_sacremoses_is_refused(ours, monkeypatch):
    monkeypatch.delitem(REWRITTEN, (r"(\d) %", r"\g<1>%"))
    with pytest.raises(UserError, match="the installed sacremoses has an unsupported rule"):
        _ = Tokenizer.load(ours.folder).fast


@pytest.mark.slow
def test_real_text(real_data, tmp_path):
    """100,000 lines and fields of all corpora."""
    lines = [field for line in lines_of(real_data) for field in line.split("\t") if field]
    lines = random.Random(1).sample(lines, 100_000)
    ours = train_tokenizer(tmp_path / "tokenizer", lines[::10], 8000, TextSettings())
    fast = Fast(ours)
    assert [line for line in lines if fast.ids(line) != ours.encode(line)] == []


# Offsets

ORDINARY = [
    "Mr. “X” said: ‘no’… ",
    "The <MASK> of «it»—<Url> ( x )",
    "5\u00a0cm, nº\u00a07,\u00a0«\u00a0a\u00a0» 20\u00a0ºC",
    "they're 5 % Mr. J.R. O'Neil,",
    "``so''",
]


@settings(max_examples=80)
@given(st.lists(st.sampled_from(SENTENCES[:2] + ORDINARY), max_size=4).map(" ".join))
def test_offsets_hold_the_text_of_each_piece(ours, fast, text):
    for index, name, span in fast.pieces(text):
        made = ours.normalise(span)
        quoted = (name, span) in (('\u2581"', "`"), ('\u2581"', "'"))  # the last of two
        assert index == UNK or name in ("\u2581", made, f"\u2581{made}") or quoted


# In transformers


def test_inputs_and_names_of_symbols(ours, exported):
    assert exported("The king.")["input_ids"] == ours.build_input("The king.")
    pair = exported("The king.", "A cat?")
    assert pair["input_ids"] == ours.build_input("The king.", "A cat?")
    assert set(pair) == {"input_ids", "attention_mask"}
    assert (len(exported), exported.model_max_length) == (len(ours.symbols), 32)
    batch = exported(["The king.", "a"], padding=True)
    assert (batch["input_ids"][1][-1], batch["attention_mask"][1][-1]) == (PAD, 0)
    assert (exported.mask_token, exported.mask_token_id, exported.pad_token_id) == (MASK, ours.mask_index, PAD)
    assert (exported.cls_token_id, exported.bos_token_id, exported.sep_token_id) == (BOS, BOS, EOS)
    tokens = exported.tokenize("The <mask> of <url>")
    assert MASK in tokens
    assert exported.convert_tokens_to_ids(tokens) == ours.encode("The <mask> of <url>")
    given_ids = exported("The <mask> sees <url>.")["input_ids"]
    assert exported.decode(given_ids, skip_special_tokens=True) == "the sees <url>."


@pytest.mark.parametrize("length", [8, 12, 16])  # of an odd number the library gives the second text the odd token
def test_truncation_of_the_longer_text(ours, exported, length):
    for first, second in [("a king " * 9, "a cat"), ("a cat", "a king " * 9), ("a king " * 9, "the cat " * 9)]:
        found = exported(first, second, truncation=True, max_length=length)["input_ids"]
        whole = np.array(ours.build_input(first, second))
        assert found == cut_input(whole, length, ours.special.eos).tolist()
    whole = np.array(ours.build_input("a king " * 30))
    assert exported("a king " * 30, truncation=True)["input_ids"] == cut_input(whole, 32, ours.special.eos).tolist()


def test_the_files_are_plain_and_saved_and_loaded_again_the_same(ours, tmp_path):
    write_tokenizer(ours, tmp_path, token_types=True)
    assert {file.name for file in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert "auto_map" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
    transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert set(tokenizer("a", "b")["token_type_ids"]) == {0}
    for text in [*SENTENCES, *TELLING]:
        assert tokenizer(text)["input_ids"] == ours.build_input(text)


def test_the_tokenizer_of_a_bert_goes_back_as_it_came(tmp_path):
    transformers.BertTokenizerFast(vocab=word_piece_vocabulary()).save_pretrained(tmp_path / "bert")
    adopted = adopt_tokenizer(tmp_path / "bert", tmp_path / "ours")
    (tmp_path / "out").mkdir()
    write_tokenizer(adopted, tmp_path / "out", max_length=9, token_types=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    pair = tokenizer("Anna sees", "the garden")
    assert pair["input_ids"] == adopted.build_input("Anna sees", "the garden")
    assert set(pair["token_type_ids"]) == {0, 1}
    assert tokenizer.model_max_length == 9
