"""Preparing texts: counts, the dictionary's order, what is written and what is refused."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from fairseq.data import Dictionary, data_utils
from hypothesis import given, settings
from hypothesis import strategies as st
from language_model_data import write_toy_wikitext

from lazyformer_fairseq.data.datasets.token_streams import open_tokens
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.language_modeling import prepare as steps
from lazyformer_fairseq.language_modeling.prepare import not_official, overview, prepare, read_manifest


@pytest.fixture
def short(monkeypatch):
    """Files of 100 characters."""
    monkeypatch.setattr(steps, "CHARACTERS", {"train": 60, "valid": 20, "test": 20})


@pytest.fixture
def wikitext(tmp_path):
    """Training and test have unknown words already, which are fairseq's own."""
    folder = write_toy_wikitext(tmp_path / "text")
    for split in ("train", "test"):
        with open(folder / f"wiki.{split}.tokens", "a") as file:
            file.write(" a new <unk> <unk> \n")
    return folder


def words_of(folder, split: str) -> list[str]:
    lines = (folder / f"wiki.{split}.tokens").read_text(encoding="utf-8").split("\n")[:-1]
    return [word for line in lines for word in [*line.split(), "</s>"]]


def symbols(folder, split: str) -> list[str]:
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    return [dictionary[token] for token in open_tokens(folder / split)]


@pytest.mark.parametrize("block", [1, 100, 1 << 22])
def test_words_stand_as_they_are_and_every_line_ends(wikitext, tmp_path, monkeypatch, block):
    monkeypatch.setattr(steps, "BLOCK", block)
    manifest = prepare("wikitext", wikitext, tmp_path / "data")
    counts = Counter(words_of(wikitext, "train"))
    for split, found in manifest["splits"].items():
        words = [word if word in counts else "<unk>" for word in words_of(wikitext, split)]
        assert symbols(tmp_path / "data", split) == words
        assert found == {"tokens": len(words), "items": words.count("</s>"), "unknown": words.count("<unk>")}
    assert manifest["vocabulary"] == len(counts) and manifest["unit"] == "word"
    assert json.loads((tmp_path / "data" / "manifest.json").read_text()) == read_manifest(tmp_path / "data") == manifest
    # fairseq reads lines, the second of which is empty; its dictionary is sorted by frequency and has no filling.
    dictionary = Dictionary.load(str(tmp_path / "data" / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(tmp_path / "data" / "train"), dictionary)
    assert all(line[-1] == dictionary.eos() and dictionary.eos() not in line[:-1] for line in lines)
    assert lines[1].tolist() == [dictionary.eos()]
    own = dictionary.symbols[dictionary.nspecial :]
    assert set(own) == counts.keys() - {"</s>", "<unk>"}
    assert all((-counts[one], one) < (-counts[other], other) for one, other in pairwise(own))
    assert [dictionary.count[dictionary.index(word)] for word in own] == [counts[word] for word in own]


@settings(max_examples=15)
@given(st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1))
def test_any_text_keeps_its_words(tmp_path_factory, text):
    folder = write_toy_wikitext(tmp_path_factory.mktemp("any") / "text")
    with open(folder / "wiki.train.tokens", "w", encoding="utf-8", newline="") as file:
        file.write(text)
    lines = text.split("\n")
    expected = [word for line in (lines if lines[-1] else lines[:-1]) for word in [*line.split(), "</s>"]]
    manifest = prepare("wikitext", folder, folder.parent / "data")
    assert manifest["splits"]["train"]["tokens"] == len(expected)
    assert symbols(folder.parent / "data", "train") == expected


@pytest.mark.slow
def test_wikitext_2_has_the_official_counts(real_data, tmp_path):
    manifest = prepare("wikitext", real_data / "lm" / "wikitext-2", tmp_path / "data", official="wikitext-2")
    counts = {split: found["tokens"] for split, found in manifest["splits"].items()}
    assert counts == {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    assert manifest["vocabulary"] == 33_278 and manifest["official"] == "wikitext-2"
    assert len(Dictionary.load(str(tmp_path / "data" / "dict.txt"))) == 33_280  # <s> and <pad>
    assert open_tokens(tmp_path / "data" / "train").dtype == np.uint16
    assert "these are wikitext-2's official counts" in overview(manifest)


def test_other_counts_are_said_plainly_and_refused_where_asked(wikitext, tmp_path, monkeypatch):
    def refused(official: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            prepare("wikitext", wikitext, tmp_path / "other", official=official)
        assert not (tmp_path / "other").exists()

    manifest = prepare("wikitext", wikitext, tmp_path / "data")
    counts = {split: found["tokens"] for split, found in manifest["splits"].items()}
    assert manifest["official"] is None
    assert "NOT an official text" in overview(manifest)
    assert f"train {counts['train']:,}, wikitext-2 has 2,088,628" in not_official(manifest)
    refused("wikitext-103", "not wikitext-103: train")
    refused("text8", "--official text8: is no wikitext")
    as_2 = {**counts, "vocabulary": manifest["vocabulary"]}  # the other one is refused for what it is
    monkeypatch.setitem(steps.OFFICIAL_COUNTS, "wikitext-2", as_2)
    reason = rf"train {counts['train']:,}, wikitext-103 has 103,227,021; .*; give --official wikitext-2"
    refused("wikitext-103", f"not wikitext-103: {reason}")


@pytest.mark.usefixtures("short")
def test_bytes_of_enwik8(tmp_path):
    content = bytes(range(0, 256, 4)) + b"\n <page>\xc3\xa9" * 3 + b"abc"
    content = content + b"z" * (100 - len(content))
    (tmp_path / "enwik8").write_bytes(content)
    manifest = prepare("enwik8", tmp_path, tmp_path / "data")
    known = set(content[:60])
    for split, part in {"train": content[:60], "valid": content[60:80], "test": content[80:]}.items():
        assert symbols(tmp_path / "data", split) == [str(byte) if byte in known else "<unk>" for byte in part]
        assert manifest["splits"][split]["tokens"] == len(part)
    assert (manifest["unit"], manifest["vocabulary"], manifest["official"]) == ("character", len(known), None)
    assert "its MD5 is not a1fa5ffddb56f4953e226637dabbb36a" in overview(manifest)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("block", [7, 1 << 22])
def test_characters_of_text8(tmp_path, monkeypatch, block):
    monkeypatch.setattr(steps, "BLOCK", block)
    content = ("the quick brown fox jumps over a lazy dog " * 3)[:100]
    (tmp_path / "text8").write_text(content)
    prepare("text8", tmp_path / "text8", tmp_path / "data")
    assert "".join(symbols(tmp_path / "data", "train")) == content[:60].replace(" ", "_")
    assert "".join(symbols(tmp_path / "data", "test")) == content[80:].replace(" ", "_")
    dictionary = Dictionary.load(str(tmp_path / "data" / "dict.txt"))
    assert dictionary[dictionary.nspecial] == "_"  # the most frequent one
    assert len(data_utils.load_indexed_dataset(str(tmp_path / "data" / "train"), dictionary)) == 1


@pytest.mark.usefixtures("short")
def test_a_file_that_the_splits_do_not_fit_or_of_other_characters_is_refused(tmp_path):
    for size in (0, 99, 101):
        (tmp_path / "enwik8").write_bytes(b"x" * size)
        with pytest.raises(UserError, match=f"has {size} bytes, enwik8 has 100: the splits need 60, 20 and 20"):
            prepare("enwik8", tmp_path, tmp_path / "data")
    (tmp_path / "text8").write_bytes(b"abc D" + b"x" * 95)
    with pytest.raises(UserError, match="has the byte 68, but text8 is a to z and spaces"):
        prepare("text8", tmp_path, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_what_is_missing_or_wrong_is_named_and_nothing_is_written(wikitext, tmp_path):
    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            prepare("wikitext", wikitext, tmp_path / "data")
        assert not (tmp_path / "data").exists()

    valid = wikitext / "wiki.valid.tokens"
    for content, message in {
        b" fine \n\n caf\xe9 \n": r"valid\.tokens, line 3: not UTF-8",
        b" fine \n a <pad> b \n": r"valid\.tokens, line 2: <pad> means something to fairseq",
        b" a </s> \n": r"valid\.tokens, line 1: </s> means something to fairseq",
        b"": r"valid\.tokens: is empty",
    }.items():
        valid.write_bytes(content)
        refused(message)
    valid.unlink()
    refused(r"wiki\.valid\.tokens: no such file")
    with pytest.raises(UserError, match=r"nowhere: no such file; give enwik8 itself"):
        prepare("enwik8", tmp_path / "nowhere", tmp_path / "data")
    with pytest.raises(UserError, match=r"manifest\.json: no such file; give a folder that `lazyformer lm prepare` w"):
        read_manifest(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("mine")
    with pytest.raises(UserError, match="data: exists already"):
        prepare("wikitext", wikitext, tmp_path / "data")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["mine"]
