"""Data that is damaged or does not belong together is named before a run starts."""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import build_toy_corpus

from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.reliability.command_line import find_user_error
from lazyformer_fairseq.fairseq_plugin.reliability.data import check_data
from lazyformer_fairseq.storage import indexed_format
from lazyformer_fairseq.storage.indexed_format import HEADER, MAGIC, check_items, write_index

TINY = "--arch lazyformer_m2x6_s_tiny --sublayer-pattern M2 --criterion masked_lm_accuracy --batch-size 4"
SHARDS = 3


@pytest.fixture(scope="session")
def whole_corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "corpus"
    build_toy_corpus(folder, vocab_size=160, shards=SHARDS)
    return folder


@pytest.fixture
def corpus(whole_corpus, tmp_path) -> Path:
    """A corpus of three shards to do damage to."""
    return Path(shutil.copytree(whole_corpus, tmp_path / "corpus"))


def check(corpus: Path, split: str = "train", verify: str = "quick", **options) -> None:
    shards = [str(corpus / f"shard{number}") for number in range(SHARDS) if (corpus / f"shard{number}").is_dir()]
    dictionary = load_dictionary(f"{shards[0]}/dict.txt")
    check_data(shards, split, dictionary, verify, tokenizer=corpus / "tokenizer", **options)


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def swap(first: Path, second: Path) -> None:
    """Exchanges two files."""
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def with_id(corpus: Path, place: float, value: int) -> None:
    """Writes an id into shard1, `place` of the way through it, but not over an item's end."""
    path = corpus / "shard1" / "train.bin"
    ids = np.fromfile(path, dtype=np.uint16)
    index = int(place * len(ids))
    while ids[index] == 2:
        index += 1
    ids[index] = value
    ids.tofile(path)


DAMAGE = {
    "truncated bin": (
        lambda c: rewrite(c / "shard2/train.bin", lambda data: data[:-2]),
        r"shard2/train.bin: truncated: [\d,]+ bytes, [\d,]+ by train.idx; copy or binarise both files again",
    ),
    "bin with more": (lambda c: rewrite(c / "shard2/train.bin", lambda data: data + b"\0\0"), r"train.bin: too long"),
    "empty bin": (lambda c: rewrite(c / "shard1/train.bin", lambda data: b""), r"shard1/train.bin: truncated: 0 bytes"),
    "truncated idx": (
        lambda c: rewrite(c / "shard1/train.idx", lambda data: data[:-8]),
        r"shard1/train.idx: truncated: [\d,]+ bytes, [\d,]+ for the \d+ items of its header",
    ),
    "idx cut in its header": (
        lambda c: rewrite(c / "shard1/train.idx", lambda data: data[:12]),
        r"idx: truncated: 12 bytes",
    ),
    "idx of another split": (
        lambda c: shutil.copy(c / "shard0/valid.idx", c / "shard0/train.idx"),
        r"shard0/train.bin: too long: [\d,]+ bytes, [\d,]+ by train.idx",
    ),
    "bins of two splits swapped": (
        lambda c: swap(c / "shard0/train.bin", c / "shard0/valid.bin"),
        r"shard0/train.bin: truncated.*, or put each beside its own",
    ),
    "bins of two shards swapped": (
        lambda c: swap(c / "shard0/train.bin", c / "shard2/train.bin"),
        r"shard0/train.bin: truncated.*, or put each beside its own",
    ),
    "a shard of another corpus": (
        lambda c: [shutil.copy(c / f"shard0/valid.{kind}", c / f"shard1/train.{kind}") for kind in ("bin", "idx")],
        r"its train files hold [\d,]+ tokens, .*manifest.json speaks of [\d,]+: a file is of another corpus",
    ),
    "an id beyond the dictionary": (
        lambda c: with_id(c, 0.5, 160),
        r"shard1/train.bin: id 160 in item \d+, but dict.txt has 160 symbols",
    ),
    "a hole in the first item": (
        lambda c: rewrite(c / "shard1/train.bin", lambda data: b"\0" * 100 + data[100:]),
        r"shard1/train.bin: item 0 does not end in </s>",
    ),
    "an empty shard": (
        lambda c: (
            (c / "shard1/train.idx").write_bytes(HEADER.pack(MAGIC, 1, 8, 0)),
            (c / "shard1/train.bin").write_bytes(b""),
        ),
        r"shard1/train.idx: an empty shard, it has no item; leave it out",
    ),
    "a shard without bin": (lambda c: (c / "shard1/train.bin").unlink(), r"shard1/train.bin: no such file, though tra"),
    "a shard without idx": (lambda c: (c / "shard1/train.idx").unlink(), r"shard1/train.idx: no such file, though tra"),
    "no shard 1": (lambda c: shutil.rmtree(c / "shard1"), r"shard1: this shard is missing; 2 of 3 are there"),
    "no shard 2": (lambda c: shutil.rmtree(c / "shard2"), r"shard2: this shard is missing; 2 of 3 are there"),
    "no shard 0": (
        lambda c: (shutil.copy(c / "shard0/dict.txt", c / "shard1"), shutil.rmtree(c / "shard0")),
        r"shard0: this shard is missing",
    ),
    "type of the ids": (
        lambda c: rewrite(c / "shard0/train.idx", lambda data: data[:17] + b"\x04" + data[18:]),
        r"shard0/train.bin: truncated|shard0/train.idx: damaged at item",
    ),
    "ids of another width": (
        lambda c: np.fromfile(c / "shard0/train.bin", dtype=np.uint16).astype(np.int64).tofile(c / "shard0/train.bin"),
        r"shard0/train.bin: too long",
    ),
    "no index": (
        lambda c: (c / "shard1/train.idx").write_bytes(b"nothing " * 9),
        r"train.idx: no index of fairseq's mm",
    ),
    "ids that are no integers": (
        lambda c: rewrite(c / "shard0/train.idx", lambda data: data[:17] + b"\x06" + data[18:]),
        r"shard0/train.idx: its ids are of type 6, which is no integer",
    ),
    "sizes that do not fit": (
        lambda c: rewrite(c / "shard0/train.idx", lambda data: data[:26] + b"\xff\xff\xff\xff" + data[30:]),
        r"shard0/train.idx: item 0 has -1 ids: damaged",
    ),
    "pointers that do not fit": (
        lambda c: rewrite(c / "shard0/train.idx", lambda data: data[:-20] + b"\x01" + data[-19:]),
        r"shard0/train.idx: damaged at item \d+: items do not follow each other",
    ),
    "another dictionary in a shard": (
        lambda c: rewrite(c / "shard1/dict.txt", lambda data: data.replace(b" ", b"x ", 1)),
        r"shard1/dict.txt: another dictionary than .*shard0/dict.txt",
    ),
    "another dictionary than the tokenizer's": (
        lambda c: [rewrite(c / f"shard{n}/dict.txt", lambda data: b"new 1\n" + data) for n in range(SHARDS)],
        r"tokenizer/dict.txt: another dictionary than .*shard0/dict.txt",
    ),
    "a smaller dictionary": (
        lambda c: (
            [rewrite(c / f"shard{n}/dict.txt", lambda data: data[: len(data) // 2]) for n in range(SHARDS)],
            shutil.rmtree(c / "tokenizer"),
        ),
        r"(not a dictionary|shard0/train.bin: id \d+ in item \d+, but dict.txt has \d+ symbols)",
    ),
    "a manifest that is none": (lambda c: (c / "manifest.json").write_text("{"), r"manifest.json: cannot be read as J"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("verify", ["quick", "full"])
def test_damage_is_named(damage, verify, corpus):
    do_damage, words = DAMAGE[damage]
    check(corpus, verify=verify)
    do_damage(corpus)
    with pytest.raises(UserError) as caught:
        check(corpus, verify=verify)
    assert re.search(words, str(caught.value)), str(caught.value)
    assert str(corpus) in str(caught.value)


def test_what_only_full_sees(corpus, monkeypatch):
    """Between the samples of "quick" there is what it does not look at."""
    monkeypatch.setattr("lazyformer_fairseq.storage.indexed_format.SAMPLES", 2)
    monkeypatch.setattr("lazyformer_fairseq.storage.indexed_format.ITEMS_OF_SAMPLE", 2)
    with_id(corpus, 0.5, 200)
    check(corpus, verify="quick")
    check(corpus, verify="none")
    with pytest.raises(UserError, match="id 200 in item"):
        check(corpus, verify="full")


def test_full_is_shared_between_processes(corpus, monkeypatch):
    """Every piece is read by one of them, and by one only."""
    monkeypatch.setattr("lazyformer_fairseq.storage.indexed_format.ITEMS_AT_ONCE", 7)
    for place in (0, 0.3, 0.8):
        with_id(corpus, place, 999)
        found = []
        for part in range(3):
            try:
                check_items(corpus / "shard1/train", 160, 2, "full", part, 3)
            except UserError:
                found.append(part)
        assert len(found) == 1
        ids = np.fromfile(corpus / "shard1/train.bin", dtype=np.uint16)
        ids[ids == 999] = 5
        ids.tofile(corpus / "shard1/train.bin")


def test_counts_are_those_of_the_manifest(corpus):
    check(corpus, "valid", "full")
    manifest = json.loads((corpus / "manifest.json").read_text())
    counted = [check_items(corpus / f"shard{number}/train", 160, 2) for number in range(SHARDS)]
    assert sum(counted) == manifest["train"]["tokens"]


def test_data_of_fairseq_preprocess_has_no_manifest(corpus, tmp_path):
    """A folder a:b of any name, with nothing but fairseq's files."""
    for name, shard in (("a", "shard1"), ("b", "shard2")):
        shutil.copytree(corpus / shard, tmp_path / name)
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    dictionary = load_dictionary(tmp_path / "a" / "dict.txt")
    check_data(folders, "train", dictionary)
    (tmp_path / "b" / "train.bin").write_bytes(b"")
    with pytest.raises(UserError, match="b/train.bin: truncated"):
        check_data(folders, "train", dictionary)


def test_train1_is_read_with_train(corpus):
    for kind in ("bin", "idx"):
        shutil.copy(corpus / f"shard1/train.{kind}", corpus / f"shard1/train1.{kind}")
    shutil.rmtree(corpus / "tokenizer")
    (corpus / "manifest.json").unlink()
    check(corpus, combine=True)
    rewrite(corpus / "shard1/train1.bin", lambda data: data[:-1])
    check(corpus)
    with pytest.raises(UserError, match="train1.bin: truncated"):
        check(corpus, combine=True)


def test_some_shards_by_name_are_no_mistake_but_said(corpus, caplog):
    shards = [str(corpus / "shard0"), str(corpus / "shard2")]
    with caplog.at_level(logging.WARNING):
        check_data(shards, "train", load_dictionary(corpus / "shard0" / "dict.txt"))
    assert "shards 1 are not read" in caplog.text


def test_other_formats_of_fairseq_are_left_to_it(corpus, caplog):
    for kind in (".bin", ".idx"):
        (corpus / f"shard0/train{kind}").unlink()
    (corpus / "shard0/train").write_text("raw text\n")
    with caplog.at_level(logging.WARNING):
        check(corpus)
    assert "older format of fairseq's, which is not checked" in caplog.text


def message_of(run: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:
        run()
    error = find_user_error(caught.value)
    assert isinstance(error, UserError), repr(caught.value)
    return str(error)


def test_a_run_names_the_damage_of_a_later_epochs_shard_before_it_trains(corpus, tmp_path, fairseq_train):
    run = tmp_path / "run"
    with_id(corpus, 0.5, 160)
    options = f"{TINY} --max-epoch 1 --disable-validation"
    assert "shard1/train.bin: id 160" in message_of(lambda: fairseq_train(corpus, options, run))
    assert not (run / "checkpoint_last.pt").exists()
    with_options = f"{options} --max-update 1 --verify none"
    assert fairseq_train(corpus, with_options, run)["optimizer_history"][-1]["num_updates"] == 1


def test_a_valid_split_is_checked_too(corpus, tmp_path, fairseq_train):
    rewrite(corpus / "shard0/valid.bin", lambda data: data[:-2])
    run = tmp_path / "run"
    assert "shard0/valid.bin: truncated" in message_of(
        lambda: fairseq_train(corpus, f"{TINY} --max-update 1 --verify full", run)
    )


def test_an_empty_name_among_folders(corpus, tmp_path, fairseq_train):
    assert "an empty name is no folder" in message_of(
        lambda: fairseq_train(f"{corpus}:", f"{TINY} --max-update 1", tmp_path / "run")
    )


def write_sparse(prefix: Path, gigabytes: float, ids_an_item: int = 25) -> int:
    """A dataset of zeros that takes no room for its ids; returns the number of items."""
    items = int(gigabytes * 10**9) // 2 // ids_an_item

    def sizes():
        for start in range(0, items, 1 << 22):
            yield np.full(min(1 << 22, items - start), ids_an_item, dtype=np.int32)

    with prefix.with_suffix(".idx").open("wb") as file:
        write_index(file, sizes, np.uint16)
    with prefix.with_suffix(".bin").open("wb") as data:
        data.truncate(items * ids_an_item * 2)
    return items


@pytest.mark.parametrize(
    "gigabytes", [0.4, pytest.param(16, marks=[pytest.mark.slow, pytest.mark.reliability, pytest.mark.timeout(3600)])]
)
def test_quick_reads_as_much_whatever_the_size(gigabytes, tmp_path, record_counts, monkeypatch):
    items = write_sparse(tmp_path / "train", gigabytes)
    pieces = []
    check_piece = indexed_format._check_piece

    def counted(index, data, ids, first, last, *more):
        pieces.append(last - first)
        check_piece(index, data, ids, first, last, *more)

    try:
        began = time.perf_counter()
        with monkeypatch.context() as patched:
            patched.setattr(indexed_format, "_check_piece", counted)
            assert check_items(tmp_path / "train", 32_768, eos=0) == items * 24
        seconds = time.perf_counter() - began
        assert len(pieces) <= indexed_format.SAMPLES + 1 and max(pieces) <= indexed_format.ITEMS_OF_SAMPLE
        counts = {"gigabytes": gigabytes, "items": items, "quick_seconds": round(seconds, 3)}
        if gigabytes > 1:
            began = time.perf_counter()
            check_items(tmp_path / "train", 32_768, eos=0, how="full")
            counts["full_seconds"] = round(time.perf_counter() - began, 1)
        record_counts("--verify", **counts)
        os.truncate(tmp_path / "train.bin", items * 50 - 2)
        with pytest.raises(UserError, match="truncated"):
            check_items(tmp_path / "train", 32_768, eos=0)
    finally:
        for path in tmp_path.iterdir():
            path.unlink()
