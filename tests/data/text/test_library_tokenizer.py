"""Tokenizers that came with another model: compared with transformers' own, and with the library on whole texts."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from fairseq.data import Dictionary
from hypothesis import example, given, settings
from hypothesis import strategies as st
from other_tokenizers import (
    byte_level_parts,
    word_piece_vocabulary,
    write_bert_files,
    write_roberta_files,
)

from lazyformer_fairseq.data.text import library_tokenizer as library_tokenizer
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.data.text.interface import DICTIONARY_FILE, SETTINGS_FILE, cut_input
from lazyformer_fairseq.data.text.library_tokenizer import PIECES_FILE, LibraryTokenizer, adopt_tokenizer
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError

transformers = pytest.importorskip("transformers", reason="needs the extra huggingface")

# What BERT's normalisation and GPT-2's words treat apart: cases, accents, Chinese, controls, marks, many spaces.
ALPHABET = "aAbB sSzZ  '.,!-0é\u0301Éß中文\t\n\u00a0\u2028\x00\x85\u200dİΣς<>[]/_#😀"
texts = st.one_of(
    st.text(ALPHABET),
    st.text(),
    st.lists(st.sampled_from(["Anna", "sees", "the", "garden's", " ", ".", "é", "zz"])).map("".join),
).filter(lambda text: not any(symbol in text for symbol in ("<s>", "</s>")))  # which is text for ours alone
KINDS = ("bert", "cased bert", "roberta", "prefixed roberta")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """For each kind our tokenizer, adopted from what transformers wrote, and transformers' own."""
    folder = tmp_path_factory.mktemp("others")
    vocabulary, merges = byte_level_parts()
    theirs = {
        "bert": transformers.BertTokenizerFast(vocab=word_piece_vocabulary()),
        "cased bert": transformers.BertTokenizerFast(
            vocab=word_piece_vocabulary(False), do_lower_case=False, tokenize_chinese_chars=False
        ),
        "roberta": transformers.RobertaTokenizerFast(vocab=vocabulary, merges=merges),
        "prefixed roberta": transformers.RobertaTokenizerFast(vocab=vocabulary, merges=merges, add_prefix_space=True),
    }
    result = {}
    for kind, tokenizer in theirs.items():
        tokenizer.save_pretrained(folder / kind)
        result[kind] = adopt_tokenizer(folder / kind, folder / f"ours, {kind}"), tokenizer
    return result


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(text=texts, second=texts)
@example(text="Anna's  garden. ", second="a")
@example(text="[MASK] <mask> [CLS]", second="")
def test_ids_inputs_and_offsets_are_those_of_transformers(pairs, kind, text, second):
    ours, theirs = pairs[kind]
    wanted = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
    if not {"[MASK]", "<mask>", "[CLS]"} & set(text.split()):
        assert ours.encode(text) == wanted["input_ids"]
        assert ours.build_input(text) == theirs(text)["input_ids"]
        if second:  # theirs takes an empty one for none
            assert ours.build_input(text, second) == theirs(text, second)["input_ids"]
        ids, offsets = ours.encode_with_offsets(text)
        assert ids == ours.encode(text)
        assert all(0 <= start <= end <= len(text) for start, end in offsets)
        assert offsets == [tuple(pair) for pair in wanted["offset_mapping"]]
    assert_words_one_by_one_give_what_the_whole_text_gives(ours, theirs, text)


def assert_words_one_by_one_give_what_the_whole_text_gives(ours, theirs, text):
    """As the corpus encodes them: each distinct word once. A symbol of the model in the text is plain text there."""
    words = ours.normalise(text)
    assert "\n" not in words
    ids, lengths = ours.encode_words(words.split(" ") if words else [])
    assert lengths.sum() == len(ids)
    assert ids.tolist() == ours.encode_normalised(words)
    assert not {*ids.tolist()} & {*ours.special} - {ours.special.unk}
    if not any(symbol in text for symbol in ("[MASK]", "<mask>", "[UNK]", "<unk>")):
        assert ids.tolist() == theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_one_id_and_the_ends_of_inputs_are_text(pairs, kind):
    ours, theirs = pairs[kind]
    mask = theirs.mask_token
    text = f"Anna sees {mask} near {mask}."
    assert ours.mask_word == mask
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text).count(ours.mask_index) == 2
    for symbol in (theirs.cls_token, theirs.sep_token, theirs.pad_token):
        found = ours.encode(f"Anna {symbol} sees")
        assert not {*found} & {ours.special.bos, ours.special.eos, ours.special.pad}


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_and_dictionary(pairs, kind):
    ours, theirs = pairs[kind]
    assert ours.special == (
        theirs.cls_token_id,
        theirs.pad_token_id,
        theirs.sep_token_id,
        theirs.unk_token_id,
        theirs.mask_token_id,
    )
    assert ours.symbols == theirs.convert_ids_to_tokens(range(len(theirs)))
    for dictionary in (ours.dictionary, load_dictionary(ours.folder / DICTIONARY_FILE)):
        assert dictionary.symbols == ours.symbols
        found = (dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk())
        assert found == ours.special[:4]


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_text(pairs, kind):
    ours, _ = pairs[kind]
    text = "anna sees the garden near the river."
    assert ours.decode(ours.build_input(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_read_what_is_written_for_them(pairs, kind, tmp_path):
    ours, theirs = pairs[kind]
    ours.write_for_transformers(tmp_path, token_types="bert" in kind and kind != "roberta")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for texts_of in (["Anna sees the river."], ["Anna's garden", "is É old."]):
        assert again(*texts_of)["input_ids"] == theirs(*texts_of)["input_ids"]
    assert again.mask_token_id == theirs.mask_token_id
    assert again.pad_token_id == theirs.pad_token_id
    if kind == "bert":
        assert again("a", "b")["token_type_ids"] == theirs("a", "b")["token_type_ids"]
        assert (ours.separators, ours.second_type) == (1, 1)
    if kind == "roberta":
        assert (ours.separators, ours.second_type) == (2, 0)


@pytest.mark.parametrize(
    ("options", "lower_case"),
    [({}, True), ({}, False), ({"strip_accents": False}, True), ({"tokenize_chinese_chars": False}, True)],
)
def test_a_vocab_txt_is_read_as_its_config_says(tmp_path, options, lower_case):
    source = write_bert_files(tmp_path / "bert", lower_case, **options)
    ours = adopt_tokenizer(source, tmp_path / "ours")
    theirs = transformers.BertTokenizerFast(
        vocab=word_piece_vocabulary(lower_case), do_lower_case=lower_case, **options
    )
    for text in ("Anna's É garden", "中文 a", "ANNA [MASK] zz"):
        assert ours.build_input(text, "Ben") == theirs(text, "Ben")["input_ids"]


def test_case_of_a_vocab_txt_alone_is_that_of_its_pieces(tmp_path):
    for lower_case in (True, False):
        source = write_bert_files(tmp_path / f"{lower_case}", lower_case)
        (source / "tokenizer_config.json").unlink()
        ours = adopt_tokenizer(source, tmp_path / f"ours {lower_case}")
        assert (ours.normalise("Anna É") == "anna e") == lower_case


def test_vocab_json_and_merges(tmp_path):
    ours = adopt_tokenizer(write_roberta_files(tmp_path / "roberta"), tmp_path / "ours")
    vocabulary, merges = byte_level_parts()
    theirs = transformers.RobertaTokenizerFast(vocab=vocabulary, merges=merges)
    for text in ("Anna's É garden", " 中文 a", "ANNA  zz"):
        assert ours.build_input(text, "Ben") == theirs(text, "Ben")["input_ids"]
    assert ours.encode("Anna <mask>.") == [*ours.encode("Anna"), ours.mask_index, *ours.encode(".")]  # its space too


def test_rows_without_a_symbol_have_a_name(tmp_path):
    source = write_bert_files(tmp_path / "bert")
    size = len(word_piece_vocabulary())
    (source / "config.json").write_text(json.dumps({"vocab_size": size + 3, "pad_token_id": 0}))
    ours = adopt_tokenizer(source, tmp_path / "ours")
    assert len(ours.dictionary) == len(ours.symbols) == size + 3
    assert load_dictionary(tmp_path / "ours" / DICTIONARY_FILE).symbols == ours.symbols
    assert len(adopt_tokenizer(source, tmp_path / "wider", rows=size + 8).symbols) == size + 8
    with pytest.raises(UserError, match=rf"ids up to {size - 1}, but the model's embedding has {size - 1} rows"):
        adopt_tokenizer(source, tmp_path / "narrower", rows=size - 1)
    assert not (tmp_path / "narrower").exists()


def test_added_tokens_keep_their_ids(tmp_path):
    source = write_bert_files(tmp_path / "bert")
    size = len(word_piece_vocabulary())
    (source / "added_tokens.json").write_text(json.dumps({"[B]": size + 1, "[A]": size}))
    ours = adopt_tokenizer(source, tmp_path / "ours")
    assert ours.encode("[A] [B]") == [size, size + 1]
    assert ours.symbols[size:] == ["[A]", "[B]"]


def test_fairseq_reads_the_dictionary_or_refuses_it(pairs):
    """It would read ids as other symbols where the special ones do not stand as in its own."""
    roberta, bert = (pairs[kind][0] for kind in ("roberta", "bert"))
    assert Dictionary.load(str(roberta.folder / DICTIONARY_FILE)).symbols == roberta.symbols
    with pytest.raises(ValueError, match="Incorrect dictionary format"):
        Dictionary.load(str(bert.folder / DICTIONARY_FILE))


def test_old_ways_of_ours_stay(pairs, data_folder, tmp_path):
    for tokenizer in (pairs["bert"][0], load_tokenizer(data_folder / "tokenizer")):
        tokenizer.save(tmp_path / type(tokenizer).__name__)
        again = load_tokenizer(tmp_path / type(tokenizer).__name__)
        assert type(again) is type(tokenizer)
        assert again.build_input("Anna", "Ben") == tokenizer.build_input("Anna", "Ben")
        of_text = pickle.loads(pickle.dumps(again.settings))  # workers of the corpus get them
        assert hash(of_text) == hash(tokenizer.settings)


@given(
    first=st.integers(1, 15), second=st.integers(1, 15), longest=st.integers(5, 30), separators=st.sampled_from([1, 2])
)
def test_a_pair_is_cut_at_the_longer_text(first, second, longest, separators):
    bos, eos = 7, 8
    kept = [[1] * first, [2] * second]
    while sum(map(len, kept)) > longest - 2 - separators:
        max(reversed(kept), key=len).pop()
    ids = np.array([bos, *[1] * first, *[eos] * separators, *[2] * second, eos])
    assert cut_input(ids, longest, eos).tolist() == [bos, *kept[0], *[eos] * separators, *kept[1], eos]


def test_damaged_folders_are_refused(pairs, tmp_path):
    def changed(name: str, old: bytes, new: bytes) -> Path:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(pairs["bert"][0].folder, folder)
        content = (folder / name).read_bytes()
        assert old in content
        (folder / name).write_bytes(content.replace(old, new))
        return folder

    for name, old, new, reason in (
        (PIECES_FILE, b"anna", b"anne", "sha256 differs"),
        (DICTIONARY_FILE, b"anna", b"anne", "sha256 differs"),
        (SETTINGS_FILE, b'"format_version": 2', b'"format_version": 3', "format version 3"),
        (SETTINGS_FILE, b'"separators": 1', b'"separators": 9', "damaged"),
        (SETTINGS_FILE, b'"mask": "[MASK]"', b'"mask": "[PAD]"', "damaged"),
        (SETTINGS_FILE, b'"kind": "tokenizers"', b'"kind": "other"', "format version 2, but this program reads 1"),
        (SETTINGS_FILE, b'"rows": ', b'"rows": 9', "its symbols are not those"),
    ):
        with pytest.raises(UserError, match=reason):
            load_tokenizer(changed(name, old, new))


def test_a_folder_as_transformers_writes_it_is_named(pairs, tmp_path):
    pairs["bert"][1].save_pretrained(tmp_path / "theirs")
    with pytest.raises(UserError, match="as Hugging Face writes it"):
        load_tokenizer(tmp_path / "theirs")


def test_without_the_library_the_extra_is_named(pairs, monkeypatch):
    monkeypatch.setattr(
        library_tokenizer,
        "refuse_without_extra",
        lambda extra, what: (_ for _ in ()).throw(UserError(f"{what}: {extra}")),
    )
    with pytest.raises(UserError, match="another model: huggingface"):
        LibraryTokenizer.load(pairs["bert"][0].folder)


@pytest.mark.parametrize(("kind", "words"), [("bert", 8), ("roberta", 6)])
def test_words_of_inputs_are_counted(pairs, kind, words):
    """BERT divides at marks; a byte-level word is what follows a space."""
    ours, _ = pairs[kind]
    ids = np.concatenate([ours.build_input(text) for text in ("Anna sees Ben.", "The old garden.")])
    assert ours.starts_of_words(ids).sum() == words
