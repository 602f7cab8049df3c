"""Tokenizers that came with another model: equal to transformers' own; those that cannot be adopted are refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from other_tokenizers import byte_level_parts, word_piece_vocabulary, write_bert_files, write_roberta_files

from lazyformer_fairseq.data.datasets.masked_blocks import Masking
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.data.text.interface import DICTIONARY_FILE, SETTINGS_FILE, cut_input
from lazyformer_fairseq.data.text.library_tokenizer import PIECES_FILE, adopt_tokenizer
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
FAMILIES = ("bert", "cased bert", "roberta", "prefixed roberta")


def wordpiece(lower_case: bool = True, **options):
    """transformers' own BERT."""
    return transformers.BertTokenizerFast(vocab=word_piece_vocabulary(lower_case), do_lower_case=lower_case, **options)


def byte_level(**options):
    """transformers' own RoBERTa."""
    vocabulary, merges = byte_level_parts()
    return transformers.RobertaTokenizerFast(vocab=vocabulary, merges=merges, **options)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """For each family our tokenizer, adopted from what transformers wrote, and transformers' own."""
    folder = tmp_path_factory.mktemp("others")
    cased, prefixed = wordpiece(False, tokenize_chinese_chars=False), byte_level(add_prefix_space=True)
    result = {}
    for family, tokenizer in zip(FAMILIES, (wordpiece(), cased, byte_level(), prefixed), strict=True):
        tokenizer.save_pretrained(folder / family)
        result[family] = adopt_tokenizer(folder / family, folder / f"ours, {family}"), tokenizer
    return result


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(text=texts, second=texts)
@example(text="Anna's  garden. ", second="a")
@example(text="[MASK] <mask> [CLS]", second="")
def test_ids_inputs_and_offsets_are_those_of_transformers(pairs, family, text, second):
    ours, theirs = pairs[family]
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
    # As the corpus encodes them: each distinct word once. A symbol of the model in the text is plain text there.
    words = ours.normalise(text)
    assert "\n" not in words
    ids, lengths = ours.encode_words(words.split(" ") if words else [])
    assert lengths.sum() == len(ids)
    assert ids.tolist() == ours.encode_normalised(words)
    assert not {*ids.tolist()} & {*ours.special} - {ours.special.unk}
    if not any(symbol in text for symbol in ("[MASK]", "<mask>", "[UNK]", "<unk>")):
        assert ids.tolist() == theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("family", FAMILIES)
def test_symbols_of_the_model(pairs, family):
    """A mask is one id and the ends of inputs are text; the dictionary's special ids are the model's."""
    ours, theirs = pairs[family]
    mask = theirs.mask_token
    text = f"Anna sees {mask} near {mask}."
    assert ours.mask_word == mask and hash(load_tokenizer(ours.folder).settings) == hash(ours.settings)
    assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text).count(ours.mask_index) == 2
    for symbol in (theirs.cls_token, theirs.sep_token, theirs.pad_token):
        found = ours.encode(f"Anna {symbol} sees")
        assert not {*found} & {ours.special.bos, ours.special.eos, ours.special.pad}
    roles = ("cls", "pad", "sep", "unk", "mask")
    assert ours.special == tuple(getattr(theirs, f"{role}_token_id") for role in roles)
    assert ours.symbols == theirs.convert_ids_to_tokens(range(len(theirs)))
    for dictionary in (ours.dictionary, load_dictionary(ours.folder / DICTIONARY_FILE)):
        assert dictionary.symbols == ours.symbols
        found = (dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk())
        assert found == ours.special[:4]
    text = "anna sees the garden near the river."
    assert ours.decode(ours.build_input(text)) == text
    from fairseq.data import Dictionary

    if "roberta" in family:
        assert Dictionary.load(str(ours.folder / DICTIONARY_FILE)).symbols == ours.symbols
    else:  # fairseq would read ids as other symbols where the special ones do not stand as in its own
        with pytest.raises(ValueError, match="Incorrect dictionary format"):
            Dictionary.load(str(ours.folder / DICTIONARY_FILE))
    ids = np.concatenate([ours.build_input(text) for text in ("Anna sees Ben.", "The old garden.")])
    # BERT divides at marks; a byte-level word is what follows a space.
    assert ours.starts_of_words(ids).sum() == {"bert": 8, "cased bert": 8, "roberta": 6}.get(family, 6)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_words_of_another_models_vocabulary_are_masked_whole(pairs, family):
    ours, _ = pairs[family]
    special, begins = ours.special, ours.begins_word
    how = {"mask_index": special.mask, "pad_index": special.pad, "special": tuple(special), "probability": 0.3}
    masking = Masking(len(ours.symbols), begins_word=begins, keep=0, random=0, **how)
    ids = np.array(ours.build_input("Ottoanna sees bridgemirror, near annas.", "Ben walksto the letter."))
    word, seen = ours.starts_of_words(ids).cumsum(), set()
    for epoch in range(50):
        masked = masking.apply(ids, 1, epoch, 0)[0] == special.mask
        is_text = ~np.isin(ids, special)
        seen |= (chosen := {*word[masked]})
        assert np.array_equal(masked, np.isin(word, [*chosen]) & is_text) and 0 < masked.sum() < is_text.sum()
    assert seen == {*word[is_text]} and np.bincount(word[is_text]).max() > 2


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_read_what_is_written_for_them(pairs, family, tmp_path):
    ours, theirs = pairs[family]
    ours.write_for_transformers(tmp_path, token_types=family.endswith("bert"))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for texts_of in (["Anna sees the river."], ["Anna's garden", "is É old."]):
        assert again(*texts_of)["input_ids"] == theirs(*texts_of)["input_ids"]
    assert (again.mask_token_id, again.pad_token_id) == (theirs.mask_token_id, theirs.pad_token_id)
    assert (ours.separators, ours.second_type) == ((1, 1) if family.endswith("bert") else (2, 0))
    if family == "bert":
        assert again("a", "b")["token_type_ids"] == theirs("a", "b")["token_type_ids"]


@pytest.mark.parametrize(
    ("options", "lower_case"),
    [({}, True), ({}, False), ({"strip_accents": False}, True), ({"tokenize_chinese_chars": False}, True)],
)
def test_the_config_decides_how_a_text_is_normalised(tmp_path, options, lower_case):
    source = write_bert_files(tmp_path / "bert", lower_case, **options)
    ours, theirs = adopt_tokenizer(source, tmp_path / "ours"), wordpiece(lower_case, **options)
    for text in ("Anna's É garden", "中文 a", "ANNA [MASK] zz"):
        assert ours.build_input(text, "Ben") == theirs(text, "Ben")["input_ids"]


def test_a_byte_level_tokenizer_without_added_tokens(tmp_path):
    ours, theirs = adopt_tokenizer(write_roberta_files(tmp_path / "roberta"), tmp_path / "ours"), byte_level()
    for text in ("Anna's É garden", " 中文 a", "ANNA  zz"):
        assert ours.build_input(text, "Ben") == theirs(text, "Ben")["input_ids"]
    assert ours.encode("Anna <mask>.") == [*ours.encode("Anna"), ours.mask_index, *ours.encode(".")]  # its space too


def test_rows_without_a_symbol_have_a_name_and_added_tokens_keep_their_ids(tmp_path):
    source = write_bert_files(tmp_path / "bert")
    size = len(word_piece_vocabulary())
    (source / "config.json").write_text(json.dumps({"vocab_size": size + 3, "pad_token_id": 0}))
    ours = adopt_tokenizer(source, tmp_path / "ours")
    assert len(ours.dictionary) == len(ours.symbols) == size + 3
    assert load_dictionary(tmp_path / "ours" / DICTIONARY_FILE).symbols == ours.symbols
    assert len(adopt_tokenizer(source, tmp_path / "wider", rows=size + 8).symbols) == size + 8
    with pytest.raises(UserError, match=rf"ids go up to {size - 1}, but the model's embedding has {size - 1} rows"):
        adopt_tokenizer(source, tmp_path / "narrower", rows=size - 1)
    for rows in (size * 2 + 2**16 + 1, 2**24, 2**60, 0, -1):  # a few bytes in a config would fill the memory with names
        (source / "config.json").write_text(json.dumps({"vocab_size": rows}))
        with pytest.raises(UserError, match=f"the embedding has {rows} rows; {size} symbols require 1 to"):
            adopt_tokenizer(source, tmp_path / "narrower")
    (source / "config.json").write_text(json.dumps({"vocab_size": size + 3, "pad_token_id": 0}))
    assert not (tmp_path / "narrower").exists()
    values = json.loads((source / "tokenizer.json").read_text())
    values["added_tokens"] = [
        {"id": size + 1, "content": "[B]"},
        {"id": size, "content": "[A]"},
    ]
    (source / "tokenizer.json").write_text(json.dumps(values))
    ours = adopt_tokenizer(source, tmp_path / "with more")
    assert ours.encode("[A] [B]") == [size, size + 1]
    assert ours.symbols[size : size + 2] == ["[A]", "[B]"]


@given(st.integers(1, 15), st.integers(1, 15), st.integers(5, 30), st.sampled_from([1, 2]))
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
        (SETTINGS_FILE, b'"separators": 1', b'"separators": 9', r"tokenizer\.json: field 'separators' is 9"),
        (SETTINGS_FILE, b'"mask": "[MASK]"', b'"mask": "[PAD]"', "must be a different symbol for each of"),
        (
            SETTINGS_FILE,
            b'"library": "tokenizers"',
            b'"library": "other"',
            "format version 2 is not supported, only 1",
        ),
        (SETTINGS_FILE, b'"rows": ', b'"rows": 9', "the symbols do not match"),
    ):
        with pytest.raises(UserError, match=reason):
            load_tokenizer(changed(name, old, new))


def test_a_folder_as_transformers_writes_it_is_named(pairs, tmp_path):
    _, theirs = pairs["bert"]
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(UserError, match="in Hugging Face's format"):
        load_tokenizer(tmp_path / "theirs")


CHANGES = {
    "Unigram .*SentencePiece": lambda values: values.update(model={"type": "Unigram", "vocab": [["a", 0.0]]}),
    "the model is WordLevel": lambda values: values["model"].update(type="WordLevel"),
    "no tokenizer model found": lambda values: values.update(model=3),
    "pre_tokenizer is Whitespace": lambda values: values.update(pre_tokenizer={"type": "Whitespace"}),
    "normalizer is Replace": lambda values: values.update(
        normalizer={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    ),
    "the model: unknown key 'code'": lambda values: values["model"].update(code="import os"),
    "the model: field 'vocab' is .1., but must be an object": lambda values: values["model"].update(vocab=[1]),
    "field 'vocab.anna' is 4.5, but must be a valid integer": lambda values: values["model"]["vocab"].update(anna=4.5),
    "field 'vocab.anna' is -1, but must be gre": lambda values: values["model"]["vocab"].update(anna=-1),
    "field 'vocab.anna' is 9999": lambda values: values["model"]["vocab"].update(anna=99999999999),
    "share an id": lambda values: values["model"]["vocab"].update({"two words": 0}),
    "line break": lambda values: values["model"]["vocab"].update({"a\nb": 400}),
    "field 'max_input_chars_per_word' is True": lambda values: values["model"].update(max_input_chars_per_word=True),
    "is '@@', but must be '##'": lambda values: values["model"].update(continuing_subword_prefix="@@"),
    "the added_tokens: found {}, but it must be a valid array": lambda values: values.update(added_tokens={}),
    "the added_tokens: field '.*' is 'a', but must be an object": lambda values: values["added_tokens"].append("a"),
    "has ids": lambda values: values["added_tokens"].append({"id": 4, "content": "anna"}),
    "adds .* to a text": lambda values: values.update(
        post_processor={"type": "BertProcessing", "sep": ["anna", 3], "cls": ["[CLS]", 4]}
    ),
    "post_processor is Nothing": lambda values: values.update(post_processor={"type": "Nothing"}),
    "adds None and None to a text": lambda values: values.update(post_processor={"type": "BertProcessing"}),
    # A template is small, whatever it makes of a text: none is run.
    "formats .*'A', 'A'": lambda values: values.update(
        post_processor={"type": "Sequence", "processors": [template([CLS, TEXT, TEXT, SEP])] * 16}
    ),
    "formats .* and a pair as": lambda values: values.update(post_processor=template([CLS] * 1000)),
    "id of '.CLS.' differs": lambda values: values.update(post_processor=template([CLS], ids=[2] * 20_000)),
    "post_processor is Sequence": lambda values: values.update(
        post_processor={"type": "Sequence", "processors": [{"type": "Sequence", "processors": []}]}
    ),
    "adds no symbols to a text": lambda values: values.update(post_processor={"type": "ByteLevel"}),
    "the post_processor: field 'single' is missing": lambda values: values.update(
        post_processor={"type": "TemplateProcessing"}
    ),
}
CLS = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
SEP = {"SpecialToken": {"id": "[SEP]", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def template(single: list, ids: tuple[int, ...] = (4,)) -> dict:
    symbols = {
        "[CLS]": {"id": "[CLS]", "ids": list(ids), "tokens": ["[CLS]"] * len(ids)},
        "[SEP]": {"id": "[SEP]", "ids": [5], "tokens": ["[SEP]"]},
    }
    return {"type": "TemplateProcessing", "single": single, "pair": [TEXT], "special_tokens": symbols}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_is_not_understood_is_refused(tmp_path, reason):
    source = tmp_path / "changed"
    wordpiece().save_pretrained(source)
    values = json.loads((source / "tokenizer.json").read_text())
    CHANGES[reason](values)
    (source / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"changed/tokenizer.json.*{reason}"):
        adopt_tokenizer(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_other_folders_are_refused(tmp_path):
    def refused(source: Path, message: str) -> None:
        with pytest.raises(UserError, match=message):
            adopt_tokenizer(source, tmp_path / "ours")
        assert not (tmp_path / "ours").exists()

    empty = tmp_path / "empty"
    refused(empty, "no such folder")
    empty.mkdir()
    refused(empty, r"contains no tokenizer.json; .*save_pretrained")
    (empty / "tokenizer.json").write_bytes(b"\xff")
    refused(empty, "cannot be read as JSON")
    source = write_bert_files(tmp_path / "bert", mask_token="[mask]")
    refused(source, r"no valid mask_token \('\[mask\]'\)")
    (source / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": "[UNK]"}}))
    refused(source, "are not all different")
    (source / "tokenizer_config.json").unlink()
    (source / "config.json").write_text(json.dumps({"pad_token_id": 3}))
    refused(source, "has id 0, but config.json has 3")
    # A symbol that reads like a word: texts with the word would end there.
    refused(write_bert_files(tmp_path / "word", sep_token="anna"), "'anna' would end there")


def test_a_description_without_a_special_symbol_is_refused(tmp_path):
    adopt_tokenizer(write_bert_files(tmp_path / "bert"), tmp_path / "ours")
    description = tmp_path / "ours" / SETTINGS_FILE
    values = json.loads(description.read_text())
    del values["special"]["bos"]
    description.write_text(json.dumps(values))
    with pytest.raises(UserError, match="there is no special symbol for 'bos'"):
        load_tokenizer(tmp_path / "ours")
