"""Tokenizers of another model that cannot be adopted: refused in words, and nothing is written."""

import json
from pathlib import Path

import pytest
from other_tokenizers import word_piece_vocabulary, write_bert_files

from lazyformer_fairseq.data.text.library_tokenizer import adopt_tokenizer
from lazyformer_fairseq.errors import UserError

transformers = pytest.importorskip("transformers", reason="needs the extra huggingface")


def broken(tmp_path: Path, change) -> Path:
    """A folder with tokenizer.json, changed."""
    source = tmp_path / "changed"
    transformers.BertTokenizerFast(vocab=word_piece_vocabulary()).save_pretrained(source)
    values = json.loads((source / "tokenizer.json").read_text())
    change(values)
    (source / "tokenizer.json").write_text(json.dumps(values))
    return source


CHANGES = {
    "Unigram .*SentencePiece": lambda values: values.update(model={"type": "Unigram", "vocab": [["a", 0.0]]}),
    "its model is WordLevel": lambda values: values["model"].update(type="WordLevel"),
    "holds no model": lambda values: values.update(model=3),
    "pre_tokenizer is Whitespace": lambda values: values.update(pre_tokenizer={"type": "Whitespace"}),
    "normalizer is Replace": lambda values: values.update(
        normalizer={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    ),
    "a field 'code'": lambda values: values["model"].update(code="import os"),
    "vocab = ": lambda values: values["model"].update(vocab=[1]),
    "has the id 4.5": lambda values: values["model"]["vocab"].update(anna=4.5),
    "has the id -1": lambda values: values["model"]["vocab"].update(anna=-1),
    "has the id 9999": lambda values: values["model"]["vocab"].update(anna=99999999999),
    "share an id": lambda values: values["model"]["vocab"].update({"two words": 0}),
    "line break": lambda values: values["model"]["vocab"].update({"a\nb": 400}),
    "max_input_chars_per_word = True": lambda values: values["model"].update(max_input_chars_per_word=True),
    "begin with ##": lambda values: values["model"].update(continuing_subword_prefix="@@"),
    "added_tokens are no list": lambda values: values.update(added_tokens={}),
    "an added token is": lambda values: values["added_tokens"].append("a"),
    "has the ids": lambda values: values["added_tokens"].append({"id": 4, "content": "anna"}),
    "puts .* around a text": lambda values: (
        values.update(post_processor=None)
        or values.update(post_processor={"type": "BertProcessing", "sep": ["anna", 3], "cls": ["[CLS]", 4]})
    ),
    "the library refuses it": lambda values: values.update(post_processor={"type": "Nothing"}),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_is_not_understood_is_refused(tmp_path, reason):
    with pytest.raises(UserError, match=reason) as refused:
        adopt_tokenizer(broken(tmp_path, CHANGES[reason]), tmp_path / "ours")
    assert "changed/tokenizer.json" in str(refused.value)
    assert not (tmp_path / "ours").exists()


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        adopt_tokenizer(tmp_path / "none", tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no tokenizer there"):
        adopt_tokenizer(tmp_path / "empty", tmp_path / "ours")
    (tmp_path / "empty" / "spiece.model").write_bytes(b"")
    with pytest.raises(UserError, match="spiece.model: is a SentencePiece model"):
        adopt_tokenizer(tmp_path / "empty", tmp_path / "ours")
    (tmp_path / "empty" / "vocab.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match="no UTF-8 text"):
        adopt_tokenizer(tmp_path / "empty", tmp_path / "ours")
    source = write_bert_files(tmp_path / "bert", mask_token="[mask]")
    with pytest.raises(UserError, match=r"has no mask_token \('\[mask\]'\)"):
        adopt_tokenizer(source, tmp_path / "ours")
    (source / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": "[UNK]"}}))
    with pytest.raises(UserError, match="not five different ones"):
        adopt_tokenizer(source, tmp_path / "ours")
    (source / "tokenizer_config.json").unlink()
    (source / "config.json").write_text(json.dumps({"pad_token_id": 3}))
    with pytest.raises(UserError, match="is id 0, but config.json says 3"):
        adopt_tokenizer(source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_symbol_that_reads_like_a_word_is_refused(tmp_path):
    """Texts with the word would end there."""
    source = write_bert_files(tmp_path / "bert", sep_token="anna")
    with pytest.raises(UserError, match="'anna' would end there"):
        adopt_tokenizer(source, tmp_path / "ours")
