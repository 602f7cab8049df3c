import errno
import mmap
from dataclasses import astuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.data.datasets import packing
from lazyformer_fairseq.data.datasets.packing import kept_blocks, pack_full_sentences
from lazyformer_fairseq.errors import UserError

# Sizes of items: sentences with their </s>, some longer than a block, and 1 for a document boundary.
item_sizes = st.lists(st.one_of(st.just(1), st.integers(2, 8), st.integers(2, 60)), max_size=60)
block_sizes = st.integers(3, 20)


def naive_blocks(sizes: list[int], tokens_per_sample: int) -> list[list[tuple[int, int]]]:
    """The same rule, one item at a time: blocks as lists of (item, offset), one entry a token of the text."""
    blocks: list[list[tuple[int, int]]] = []
    block: list[tuple[int, int]] = []
    room = tokens_per_sample - 1

    def close():
        nonlocal block
        while block and sizes[block[-1][0]] == 1:
            block.pop()
        if block:
            blocks.append(block)
        block = []

    for item, size in enumerate(sizes):
        tokens = [(item, offset) for offset in range(size)]
        if size == 1:
            follows_boundary = item > 0 and sizes[item - 1] == 1
            if block and not follows_boundary and len(block) < room:
                block += tokens
            continue
        if len(block) + size > room:
            close()
        while len(tokens) > room:
            blocks.append(tokens[: room - 1])
            tokens = tokens[room - 1 :]
        block += tokens
    close()
    return blocks


def packed_blocks(sizes: list[int], tokens_per_sample: int) -> list[list[tuple[int, int]]]:
    blocks = pack_full_sentences(np.array(sizes, dtype=np.int32), tokens_per_sample)
    packed = []
    for number in range(len(blocks)):
        tokens = []
        for item in range(blocks.first_item[number], blocks.last_item[number] + 1):
            start = blocks.first_offset[number] if item == blocks.first_item[number] else 0
            stop = blocks.last_end[number] if item == blocks.last_item[number] else sizes[item]
            if sizes[item] > 1 or sizes[item - 1] > 1:
                tokens += [(item, offset) for offset in range(start, stop)]
        packed.append(tokens)
    return packed


@pytest.mark.parametrize("items_at_once", [1, 5, 1 << 20])
@given(item_sizes, block_sizes)
def test_equals_packing_item_by_item(items_at_once, sizes, tokens_per_sample):
    with mock.patch.object(packing, "ITEMS_AT_ONCE", items_at_once):
        assert packed_blocks(sizes, tokens_per_sample) == naive_blocks(sizes, tokens_per_sample)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A dataset that is worth keeping: its prefix, and the sizes of its items."""
    monkeypatch.setattr(packing, "WORTH_KEEPING", 1)
    (tmp_path / "train.idx").touch()
    return tmp_path / "train", np.array([5, 1, 7, 30, 2, 1, 4], dtype=np.int32)


def rows(blocks) -> list[list[int]]:
    return [row.tolist() for row in astuple(blocks)]


def test_blocks_of_much_data_are_packed_once_and_mapped_by_all_processes(data, monkeypatch):
    expected = rows(pack_full_sentences(data[1], 12))
    assert rows(kept_blocks(*data, 12)) == expected
    monkeypatch.setattr(packing, "pack_full_sentences", lambda *_: pytest.fail("packed again"))
    kept = kept_blocks(*data, 12)
    assert rows(kept) == expected
    base = kept.sizes
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base, mmap.mmap)
    assert [path.suffix for path in sorted(data[0].parent.iterdir())] == [".npy", ".idx"]


def test_other_data_or_blocks_are_packed_anew(data):
    kept_blocks(*data, 12)
    for sizes, tokens_per_sample in ((data[1], 13), (data[1][:-1], 12), (data[1][::-1].copy(), 12)):
        expected = rows(pack_full_sentences(sizes, tokens_per_sample))
        assert rows(kept_blocks(data[0], sizes, tokens_per_sample)) == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-7]),
        lambda path: path.write_bytes(b""),
        lambda path: np.save(path, np.load(path) + 1000),
        lambda path: np.save(path, np.load(path).astype(object)),
        lambda path: np.save(path, np.load(path)[:, :0]),
    ],
)
def test_a_damaged_file_of_blocks_is_written_anew(data, damage):
    expected = rows(kept_blocks(*data, 12))
    (path,) = data[0].parent.glob("*.npy")
    whole = path.read_bytes()
    damage(path)
    assert rows(kept_blocks(*data, 12)) == expected
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_keeps_no_blocks(data, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(packing, "atomic_file", refuse)
    assert rows(kept_blocks(*data, 12)) == rows(pack_full_sentences(data[1], 12))


@given(item_sizes, block_sizes)
def test_no_token_is_lost_and_no_block_too_long(sizes, tokens_per_sample):
    text = [token for block in packed_blocks(sizes, tokens_per_sample) for token in block if sizes[token[0]] > 1]
    assert text == [(item, offset) for item, size in enumerate(sizes) if size > 1 for offset in range(size)]
    blocks = pack_full_sentences(np.array(sizes, dtype=int), tokens_per_sample)
    assert (blocks.sizes <= tokens_per_sample).all()
    for number, block in enumerate(packed_blocks(sizes, tokens_per_sample)):
        item, offset = block[-1]
        is_cut = offset < sizes[item] - 1
        assert blocks.sizes[number] == 1 + len(block) + is_cut, "<s>, and </s> behind a cut sentence"


def test_a_block_without_room_is_refused():
    with pytest.raises(UserError, match="tokens_per_sample is 2"):
        pack_full_sentences(np.array([3]), 2)
