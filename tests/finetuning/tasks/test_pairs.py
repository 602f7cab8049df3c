"""Pairs of halves: which segments, which halves, and that nothing but the text tells the answer."""

import shutil
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from in_process import invoke, refusal

from lazyformer_fairseq.data.prepared_folder import load_prepared
from lazyformer_fairseq.data.text.tokenizer import load_tokenizer
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.finetuning.made import Draws
from lazyformer_fairseq.finetuning.tasks import pairs as prepare
from lazyformer_fairseq.storage.indexed_format import write_items

EOS = 2
SMALL = {"rows": {"train": 60, "valid": 10, "test": 20}, "min_length": 20, "max_length": 40, "gap": 4}


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=30, max_size=90),
    per_document=st.integers(1, 4),
    gap=st.integers(0, 9),
    seed=st.integers(0, 9),
)
def test_halves_are_used_once_and_lengths_tell_nothing(sizes, per_document, gap, seed):
    rows = {"train": 16, "valid": 4, "test": 6}
    chosen = prepare.PairsSettings(rows, min_length=20, max_length=60, gap=gap, per_document=per_document, seed=seed)
    draws, sizes = Draws(seed), np.array(sizes)
    try:
        splits = prepare.choose_segments(sizes, chosen, draws)
    except UserError as error:
        room = np.clip(sizes // (60 + gap), 1, per_document)[sizes >= 20 + gap].sum()
        assert "give more text" in str(error)
        assert room < 26 + 3 * per_document  # what two splits may leave of a document
        return
    documents = [set(segments.document.tolist()) for segments in splits.values()]
    assert not documents[0] & documents[1] and not documents[0] & documents[2] and not documents[1] & documents[2]
    for split, segments in splits.items():
        assert len(segments.size) == rows[split]
        assert (20 + gap <= segments.size).all() and (segments.size <= 60 + gap).all()
        assert (segments.start + segments.size <= sizes[segments.document]).all()
        places = zip(*segments, strict=True)
        taken = np.concatenate([document * 1000 + np.arange(start, start + size) for document, start, size in places])
        assert len(set(taken.tolist())) == len(taken)
        try:
            halves = prepare.pair_halves(segments, gap, draws)
        except UserError:
            assume(False)
        assert sorted(halves.first) == sorted(halves.second) == list(range(rows[split]))
        own, other = halves.targets == 1, halves.targets == 0
        assert other.sum() == rows[split] // 4 * 2
        assert (segments.document[halves.first[other]] != segments.document[halves.second[other]]).all()
        needed = np.minimum(segments.size[halves.first], segments.size[halves.second])
        assert (2 * halves.size + gap <= needed).all()
        assert own.sum() + other.sum() == rows[split]


def test_both_answers_have_the_same_lengths():
    settings = prepare.PairsSettings({"train": 360}, min_length=10, max_length=500, gap=0)
    segments = prepare.choose_segments(np.arange(30, 430), settings, Draws(1))["train"]
    halves = prepare.pair_halves(segments, 0, Draws(2))
    lengths = [np.sort(halves.size[halves.targets == target]) for target in (0, 1)]
    assert np.abs(lengths[0] - lengths[1]).max() < 25  # of 200: sorted, the two lists run side by side


def write_corpus(folder, tokenizer, documents=100):
    """A corpus whose documents have words of their own, as books have names."""
    shutil.copytree(tokenizer, folder / "tokenizer")
    shutil.copy(tokenizer / "dict.txt", folder)
    chance, items = np.random.default_rng(1), []
    for _ in range(documents):
        own = chance.choice(np.arange(40, 150), 6, replace=False)
        words = np.where(chance.random((12, 8)) < 0.5, chance.choice(own, (12, 8)), chance.integers(10, 40, (12, 8)))
        items += [np.append(sentence, EOS) for sentence in words] + [np.array([EOS])]
    write_items(folder / "train", np.uint16, [(np.concatenate(items), np.array(list(map(len, items))))])
    return folder


def test_a_half_has_a_token_at_least():
    with pytest.raises(UserError, match="--min-length 1, .* two halves have 2 tokens at least"):
        prepare.PairsSettings(min_length=1)


@pytest.fixture(scope="module")
def prepared(data_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    corpus = write_corpus(folder / "corpus", data_folder / "tokenizer")
    chosen = {**SMALL, "min_length": 50, "max_length": 80}
    manifest = prepare.prepare_pairs(prepare.PairsSettings(**chosen), str(corpus), folder / "pairs")
    return load_prepared(folder / "pairs"), manifest


def test_words_alone_give_nothing_away_but_shared_ones_do(prepared):
    _, manifest = prepared
    constant, alone, shared = manifest["rules"].values()
    assert constant == 0.5
    assert 0.2 <= alone <= 0.8  # of 20 examples: 2.7 standard deviations
    assert shared >= 0.9
    assert list(manifest["rules"])[1] == prepare.WORDS_ALONE
    assert manifest["splits"]["train"]["labels"] == {"other document": 30, "same document": 30}


def test_inputs_are_pairs_as_the_tokenizer_joins_them(prepared):
    folder, _ = prepared
    tokenizer = load_tokenizer(folder.tokenizer_folder)
    bos, eos, halves = tokenizer.special.bos, tokenizer.special.eos, Counter()
    for split in ("train", "valid", "test"):
        for ids in folder.read(split, None, eos).inputs:
            ends = np.flatnonzero(ids == eos)
            assert ids[0] == bos and len(ends) == 1 + tokenizer.separators and ends[-1] == len(ids) - 1
            first, second = ids[1 : ends[0]], ids[ends[-2] + 1 : -1]
            assert len(first) == len(second)
            assert 50 - 1 <= 2 * len(first) <= 80
            halves.update([first.tobytes(), second.tobytes()])
    assert set(halves.values()) == {1}


def test_the_command_on_a_prepared_corpus_and_on_raw_text_which_is_prepared_first(data_folder, tmp_path, monkeypatch):
    def build(inputs, folder, settings):
        assert (inputs, settings.vocab_size) == (["my_text.txt"], 160)
        shutil.copytree(data_folder, folder)

    monkeypatch.setattr(prepare, "build_corpus", build)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_text.txt").touch()
    options = "--train 40 --valid 8 --test 8 --min-length 20 --max-length 30 --gap 2 --vocab-size 160".split()
    files = []
    for number, source in enumerate((data_folder, data_folder, "my_text.txt")):
        assert "same document" in invoke("diagnostics", "pairs", source, tmp_path / str(number), *options)
        files.append({path.name: path.read_bytes() for path in (tmp_path / str(number)).iterdir() if path.is_file()})
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--min-length 50 --max-length 40", "below the minimum"),
        ("--train 7", "give an even number from 4"),
        ("--min-length 5000 --max-length 6000", "segments of 5,032 to 6,032 tokens in 0 of 150 documents"),
    ],
)
def test_what_cannot_be_made_is_refused(options, reason, data_folder, tmp_path):
    assert reason in refusal("diagnostics", "pairs", data_folder, tmp_path / "out", *options.split())
    assert not list(tmp_path.iterdir())
