"""Encoding of a split: pairs, cuts and the share of unknown words."""

from pathlib import Path

import pytest

from lazyformer_fairseq.data.glue.encode import encode_split
from lazyformer_fairseq.data.glue.tsv import Example, SplitFile
from lazyformer_fairseq.data.text.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(data_folder):
    return Tokenizer.load(data_folder / "tokenizer")


def encode(tokenizer, *texts, max_length=512):
    return encode_split(tokenizer, SplitFile(Path("x"), [Example(pair, 0, 1) for pair in texts], []), max_length)


def test_a_pair_has_two_separators(tokenizer):
    bos, eos = tokenizer.dictionary.bos(), tokenizer.dictionary.eos()
    first, second = tokenizer.encode("Anna sees Ben"), tokenizer.encode("the old mirror")
    encoded = encode(tokenizer, ("Anna sees Ben",), ("Anna sees Ben", "the old mirror"))
    assert [ids.tolist() for ids in encoded.inputs] == [
        [bos, *first, eos],
        [bos, *first, eos, eos, *second, eos],
    ]
    assert (encoded.truncated, encoded.unknown_share) == (0, 0.0)


def test_long_inputs_are_cut_and_counted(tokenizer):
    long = "Anna sees Ben near the old mirror " * 10
    encoded = encode(tokenizer, ("Anna",), (long,), ("Anna", long), max_length=24)
    assert encoded.truncated == 2
    assert [len(ids) for ids in encoded.inputs[1:]] == [24, 24]
    assert all(ids[-1] == tokenizer.dictionary.eos() for ids in encoded.inputs)


def test_unknown_share_is_of_all_ids(tokenizer):
    encoded = encode(tokenizer, ("字",))
    ids = encoded.inputs[0].tolist()
    assert tokenizer.dictionary.unk() in ids
    assert encoded.unknown_share == ids.count(tokenizer.dictionary.unk()) / len(ids)
