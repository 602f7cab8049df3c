"""Data that is damaged or does not belong together is named before a run starts."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fairseq_plugin.reliability.damage import TINY
from helpers import message_of, updates_of

from lazyformer_fairseq.data.shards import check_data
from lazyformer_fairseq.data.text.dictionary_file import load_dictionary
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage import indexed_format
from lazyformer_fairseq.storage.indexed_format import HEADER, MAGIC, check_items, write_index

SHARDS = 3
Damage = Callable[[Path], object]


@pytest.fixture
def corpus(three_shards, tmp_path) -> Path:
    """A corpus of three shards to do damage to."""
    return Path(shutil.copytree(three_shards, tmp_path / "corpus"))


def check(corpus: Path, split: str = "train", verify: str = "quick", **options) -> None:
    shards = [str(corpus / f"shard{number}") for number in range(SHARDS) if (corpus / f"shard{number}").is_dir()]
    dictionary = load_dictionary(f"{shards[0]}/dict.txt")
    check_data(shards, split, dictionary, verify, tokenizer=corpus / "tokenizer", **options)


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda corpus: (corpus / name).write_bytes(change((corpus / name).read_bytes()))


def cut(name: str, end: int) -> Damage:
    return rewrite(name, lambda data: data[:end])


def put(name: str, place: int, new: bytes) -> Damage:
    """Overwrites bytes."""
    return rewrite(name, lambda data: data[:place] + new + data[place + len(new) :])


def copy(name: str, target: str) -> Damage:
    return lambda corpus: shutil.copy(corpus / name, corpus / target)


def remove(name: str) -> Damage:
    return lambda corpus: shutil.rmtree(corpus / name) if (corpus / name).is_dir() else (corpus / name).unlink()


def swap(name: str, other: str) -> Damage:
    return both(copy(name, "kept"), copy(other, name), copy("kept", other))


def both(*damages: Damage) -> Damage:
    return lambda corpus: [damage(corpus) for damage in damages]


def with_id(corpus: Path, place: float, value: int) -> None:
    """Writes an id into shard1, `place` of the way through it, but not over an item's end."""
    path = corpus / "shard1" / "train.bin"
    ids = np.fromfile(path, dtype=np.uint16)
    index = int(place * len(ids))
    while ids[index] == 2:
        index += 1
    ids[index] = value
    ids.tofile(path)


DICTIONARIES = [f"shard{number}/dict.txt" for number in range(SHARDS)]
DAMAGE = {
    "shard2/train.bin is truncated: .* according to train.idx; copy or binarize both": cut("shard2/train.bin", -2),
    "shard2/train.bin is too long": rewrite("shard2/train.bin", lambda data: data + b"\0\0"),
    "shard1/train.bin is truncated: it has 0 bytes": cut("shard1/train.bin", 0),
    r"shard1/train.idx is truncated: it has [\d,]+ bytes, but needs [\d,]+ for the \d+ items in its header": cut(
        "shard1/train.idx", -8
    ),
    "shard1/train.idx is truncated: it has 12 bytes": cut("shard1/train.idx", 12),
    r"shard0/train.bin is too long: it has [\d,]+ bytes, but should have [\d,]+ according to": copy(
        "shard0/valid.idx", "shard0/train.idx"
    ),
    "shard0/train.bin is truncated.*, and keep matching files together": swap("shard0/train.bin", "shard0/valid.bin"),
    "shard0/train.bin is truncated.* keep matching files together": swap("shard0/train.bin", "shard2/train.bin"),
    r"the train files have [\d,]+ tokens, but .*manifest.json lists [\d,]+; the files and the manifest are from": both(
        copy("shard0/valid.bin", "shard1/train.bin"), copy("shard0/valid.idx", "shard1/train.idx")
    ),
    r"shard1/train.bin: item \d+ contains id 160, but dict.txt has 160 symbols": lambda c: with_id(c, 0.5, 160),
    "shard1/train.bin: item 0 does not end in </s>": put("shard1/train.bin", 0, b"\0" * 100),
    "shard1/train.idx: the shard is empty; remove the shard": both(
        cut("shard1/train.bin", 0), rewrite("shard1/train.idx", lambda _: HEADER.pack(MAGIC, 1, 8, 0))
    ),
    "shard1/train.bin: no such file, although tra": remove("shard1/train.bin"),
    "shard1/train.idx: no such file, although tra": remove("shard1/train.idx"),
    "shard1: this shard is missing; found 2 of 3": remove("shard1"),
    "shard2: this shard is missing; found 2 of 3": remove("shard2"),
    "shard0: this shard is missing": both(copy("shard0/dict.txt", "shard1/dict.txt"), remove("shard0")),
    # The type of the ids: of another width, not the file's, no integer.
    "shard0/train.bin is truncated|shard0/train.idx is damaged at item": put("shard0/train.idx", 17, b"\x04"),
    "shard0/train.bin is too long": rewrite(
        "shard0/train.bin", lambda data: np.frombuffer(data, dtype=np.uint16).astype(np.int64).tobytes()
    ),
    "shard0/train.idx: the ids have type 6, which is not an integer": put("shard0/train.idx", 17, b"\x06"),
    "shard1/train.idx: not an index in fairseq's mm": rewrite("shard1/train.idx", lambda _: b"nothing " * 9),
    "shard0/train.idx is damaged: item 0 has -1 ids": put("shard0/train.idx", 26, b"\xff\xff\xff\xff"),
    r"train.idx is damaged at item \d+: items are not contiguous": put("shard0/train.idx", -20, b"\x01"),
    "shard1/dict.txt differs from .*shard0/dict.txt": rewrite(
        "shard1/dict.txt", lambda data: data.replace(b" ", b"x ", 1)
    ),
    "tokenizer/dict.txt differs from .*shard0/dict.txt": both(
        *(rewrite(name, lambda data: b"new 1\n" + data) for name in DICTIONARIES)
    ),
    r"(not a dictionary|shard0/train.bin: item \d+ contains id \d+, but dict.txt has \d+ symbols)": both(
        *(rewrite(name, lambda data: data[: len(data) // 2]) for name in DICTIONARIES), remove("tokenizer")
    ),
    "manifest.json: cannot be read as J": rewrite("manifest.json", lambda _: b"{"),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_damage_is_named(words, corpus):
    for verify in ("quick", "full"):
        check(corpus, verify=verify)
    DAMAGE[words](corpus)
    for verify in ("quick", "full"):
        with pytest.raises(UserError) as caught:
            check(corpus, verify=verify)
        assert re.search(words, str(caught.value)), str(caught.value)
        assert str(corpus) in str(caught.value)


def test_what_only_full_sees(corpus, monkeypatch):
    """Between the samples of "quick" there is what it does not look at."""
    monkeypatch.setattr(indexed_format, "SAMPLES", 2)
    monkeypatch.setattr(indexed_format, "ITEMS_OF_SAMPLE", 2)
    with_id(corpus, 0.5, 200)
    check(corpus, verify="quick")
    check(corpus, verify="none")
    with pytest.raises(UserError, match=r"item \d+ contains id 200"):
        check(corpus, verify="full")


def test_full_is_shared_between_processes_and_counts_as_the_manifest_does(corpus, monkeypatch):
    """Every piece is read by one of them, and by one only."""
    check(corpus, "valid", "full")
    counted = [check_items(corpus / f"shard{number}/train", 160, 2) for number in range(SHARDS)]
    assert sum(counted) == json.loads((corpus / "manifest.json").read_text())["train"]["tokens"]
    monkeypatch.setattr(indexed_format, "ITEMS_AT_ONCE", 7)
    whole = (corpus / "shard1/train.bin").read_bytes()
    for place in (0, 0.3, 0.8):
        with_id(corpus, place, 999)
        found = []
        for part in range(3):
            try:
                check_items(corpus / "shard1/train", 160, 2, "full", part, 3)
            except UserError:
                found.append(part)
        assert len(found) == 1
        (corpus / "shard1/train.bin").write_bytes(whole)


def test_data_of_fairseq_preprocess_has_no_manifest(corpus, tmp_path):
    """A folder a:b of any name, with nothing but fairseq's files; a train1 is refused."""
    for name, shard in (("a", "shard1"), ("b", "shard2")):
        shutil.copytree(corpus / shard, tmp_path / name)
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    dictionary = load_dictionary(tmp_path / "a" / "dict.txt")
    check_data(folders, "train", dictionary)
    cut("b/train.bin", 0)(tmp_path)
    with pytest.raises(UserError, match="b/train.bin is truncated"):
        check_data(folders, "train", dictionary)
    for kind in ("bin", "idx"):
        copy(f"shard1/train.{kind}", f"shard1/train1.{kind}")(corpus)
    both(remove("tokenizer"), remove("manifest.json"))(corpus)
    with pytest.raises(UserError, match="train1.idx: additional training files are not read"):
        check(corpus)


def test_a_run_names_the_damage_of_all_it_will_read_before_it_trains(corpus, tmp_path, fairseq_train, caplog):
    run, options = tmp_path / "run", f"{TINY} --max-update 1 --disable-validation"
    with_id(corpus, 0.5, 160)
    message = message_of(fairseq_train, corpus, options.replace("--max-update", "--max-epoch"), run)
    assert "shard1/train.bin: item " in message and " contains id 160" in message, "of the second epoch"
    assert not (run / "checkpoint_last.pt").exists()
    assert updates_of(fairseq_train(corpus, f"{options} --verify none", run)) == 1
    cut("shard0/valid.bin", -2)(corpus)
    message = message_of(fairseq_train, corpus, f"{TINY} --max-update 1 --verify full", tmp_path / "other")
    assert "shard0/valid.bin is truncated" in message
    fairseq_train(f"{corpus}/shard0:{corpus}/shard2", options, tmp_path / "other")
    assert "shards 1 are not read" in caplog.text, "no mistake, but said"
    assert "an empty name is not a folder" in message_of(fairseq_train, f"{corpus}:", options, tmp_path / "other")


def write_sparse(prefix: Path, gigabytes: float, ids_an_item: int = 25) -> int:
    """A dataset of zeros that takes no room for its ids; returns the number of items."""
    items = int(gigabytes * 10**9) // 2 // ids_an_item

    def sizes():
        for start in range(0, items, 1 << 22):
            yield np.full(min(1 << 22, items - start), ids_an_item, dtype=np.int32)

    with prefix.with_suffix(".idx").open("wb") as file, prefix.with_suffix(".bin").open("wb") as data:
        write_index(file, sizes, np.uint16)
        data.truncate(items * ids_an_item * 2)
    return items


@pytest.mark.parametrize(
    "gigabytes", [0.4, pytest.param(16, marks=[pytest.mark.slow, pytest.mark.reliability, pytest.mark.timeout(3600)])]
)
def test_quick_reads_as_much_whatever_the_size(gigabytes, tmp_path, record_counts, monkeypatch):
    items, pieces, check_piece = write_sparse(tmp_path / "train", gigabytes), [], indexed_format._check_piece

    def counted(index, data, ids, first, last, *more):
        pieces.append(last - first)
        check_piece(index, data, ids, first, last, *more)

    def seconds_of(how: str) -> float:
        began = time.perf_counter()
        assert check_items(tmp_path / "train", 32_768, eos=0, how=how) == items * 24
        return round(time.perf_counter() - began, 3)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(indexed_format, "_check_piece", counted)
            counts = {"gigabytes": gigabytes, "items": items, "quick_seconds": seconds_of("quick")}
        assert len(pieces) <= indexed_format.SAMPLES + 1 and max(pieces) <= indexed_format.ITEMS_OF_SAMPLE
        if gigabytes > 1:
            counts["full_seconds"] = seconds_of("full")
        record_counts("--verify", **counts)
        os.truncate(tmp_path / "train.bin", items * 50 - 2)
        with pytest.raises(UserError, match="truncated"):
            check_items(tmp_path / "train", 32_768, eos=0)
    finally:
        for path in tmp_path.iterdir():
            path.unlink()
