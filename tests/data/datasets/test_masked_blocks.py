"""Blocks: what is packed into them, and what is masked in them."""

import errno
import mmap
import pickle
from dataclasses import astuple
from unittest import mock

import numpy as np
import pytest
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.data.datasets import masked_blocks
from lazyformer_fairseq.data.datasets.masked_blocks import (
    FullSentencesDataset,
    Masking,
    kept_blocks,
    pack_full_sentences,
)
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import MappedItems

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
    with mock.patch.object(masked_blocks, "ITEMS_AT_ONCE", items_at_once):
        assert packed_blocks(sizes, tokens_per_sample) == naive_blocks(sizes, tokens_per_sample)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A dataset that is worth keeping: its prefix, and the sizes of its items."""
    monkeypatch.setattr(masked_blocks, "WORTH_KEEPING", 1)
    (tmp_path / "train.idx").touch()
    return tmp_path / "train", np.array([5, 1, 7, 30, 2, 1, 4], dtype=np.int32)


def rows(blocks) -> list[list[int]]:
    return [row.tolist() for row in astuple(blocks)]


def test_blocks_of_much_data_are_packed_once_and_mapped_by_all_processes(data, monkeypatch):
    expected = rows(pack_full_sentences(data[1], 12))
    assert rows(kept_blocks(*data, 12)) == expected
    monkeypatch.setattr(masked_blocks, "pack_full_sentences", lambda *_: pytest.fail("packed again"))
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

    monkeypatch.setattr(masked_blocks, "atomic_file", refuse)
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


SPECIAL = (0, 1, 2, 3, 99)
MASK, PAD = 99, 1
MASKING = Masking(vocab_size=100, mask_index=MASK, pad_index=PAD, special=SPECIAL)

blocks = st.lists(st.integers(4, 98), max_size=40).map(lambda words: np.array([0, *words, 2, 2, 3, 2]))


@given(blocks, st.integers(0, 3), st.integers(1, 3), st.integers(0, 10_000))
def test_masks_are_a_function_of_seed_epoch_and_index(tokens, seed, epoch, index):
    np.random.seed(seed + epoch)  # the global state must not matter
    first = MASKING.apply(tokens, seed, epoch, index)
    np.random.seed(7)
    second = MASKING.apply(tokens, seed, epoch, index)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


@given(blocks, st.integers(1, 1000))
def test_targets_are_the_words_to_predict_and_all_else_stays(tokens, index):
    masked, targets = MASKING.apply(tokens, 1, 1, index)
    to_predict = targets != PAD
    assert np.array_equal(targets[to_predict], tokens[to_predict])
    assert np.array_equal(masked[~to_predict], tokens[~to_predict])
    assert not np.isin(tokens[to_predict], SPECIAL).any()
    words = (~np.isin(tokens, SPECIAL)).sum()
    assert abs(to_predict.sum() - 0.15 * words) < 1 or (to_predict.sum() == 1 and 0 < words < 7)


def test_each_of_seed_epoch_and_index_changes_the_masks():
    tokens = np.arange(4, 99)
    base = MASKING.apply(tokens, 1, 1, 1)[0]
    for other in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        assert not np.array_equal(base, MASKING.apply(tokens, *other)[0])


def test_shares_are_15_percent_and_80_10_10():
    tokens = np.random.default_rng(1).integers(4, 99, 200_000)
    masked, targets = MASKING.apply(tokens, 1, 1, 0)
    chosen = targets != PAD
    assert chosen.mean() == pytest.approx(0.15, abs=1e-4)
    became_mask = masked[chosen] == MASK
    stayed = masked[chosen] == tokens[chosen]
    assert became_mask.mean() == pytest.approx(0.8, abs=0.01)
    # A random word is the word itself once in 95.
    assert stayed.mean() == pytest.approx(0.1 + 0.1 / 95, abs=0.01)
    replacements = masked[chosen][~became_mask & ~stayed]
    assert set(replacements) == set(range(4, 99))


def test_short_blocks_still_have_the_expected_share():
    tokens = np.arange(4, 14)
    counts = [(MASKING.apply(tokens, 1, 1, index)[1] != PAD).sum() for index in range(4000)]
    assert set(counts) == {1, 2} and np.mean(counts) == pytest.approx(1.5, abs=0.05)


@pytest.mark.parametrize(
    "shares", [{"probability": 0}, {"probability": 1.5}, {"keep": 0.6, "random": 0.6}, {"keep": -1}]
)
def test_impossible_shares_are_refused(shares):
    with pytest.raises(UserError, match="mask_prob"):
        Masking(vocab_size=100, mask_index=MASK, pad_index=PAD, special=SPECIAL, **shares)


BOS, PAD, EOS, MASK = 0, 1, 2, 99
MASKING = Masking(vocab_size=100, mask_index=MASK, pad_index=PAD, special=(0, 1, 2, 3, 99))


def dataset_of(sentences: list[list[int]], tokens_per_sample: int, **options) -> FullSentencesDataset:
    """`sentences` without their </s>; an empty one is a document boundary."""
    items = [torch.tensor([*words, EOS]) for words in sentences]
    sizes = np.array([len(item) for item in items])
    return FullSentencesDataset(items, sizes, tokens_per_sample, BOS, EOS, MASKING, **options)


def test_blocks_read_as_roberta_defines_them():
    dataset = dataset_of([[10, 11], [12], [], [13], [14, 15, 16, 17]], 12)
    assert [dataset.block(number).tolist() for number in range(len(dataset))] == [
        [BOS, 10, 11, EOS, 12, EOS, EOS, 13, EOS],
        [BOS, 14, 15, 16, 17, EOS],
    ]


def test_a_long_sentence_is_cut_into_whole_blocks_and_others_follow_its_end():
    dataset = dataset_of([[9], list(range(20, 31)), [40]], 7)
    assert [dataset.block(number).tolist() for number in range(len(dataset))] == [
        [BOS, 9, EOS],
        [BOS, 20, 21, 22, 23, 24, EOS],
        [BOS, 25, 26, 27, 28, 29, EOS],
        [BOS, 30, EOS, 40, EOS],
    ]


sentences = st.lists(st.lists(st.integers(4, 98), max_size=30), min_size=1, max_size=20)


@settings(max_examples=40)
@given(sentences.filter(any), st.integers(3, 20))
def test_every_block_is_between_bos_and_eos_and_the_text_is_whole(sentences, tokens_per_sample):
    dataset = dataset_of(sentences, tokens_per_sample)
    blocks = [dataset.block(number).tolist() for number in range(len(dataset))]
    for number, block in enumerate(blocks):
        assert (block[0], block[-1]) == (BOS, EOS) and block[1] != EOS and block[-2] != EOS
        assert len(block) == dataset.size(number) == dataset.num_tokens(number) <= tokens_per_sample
    words = [token for block in blocks for token in block if token > 3]
    assert words == [word for sentence in sentences for word in sentence]


def test_masks_and_order_are_new_in_each_epoch_and_the_same_when_it_returns():
    dataset = dataset_of([[word] * 8 for word in range(10, 40)], 12)
    seen = []
    for epoch in (1, 2, 1):
        dataset.set_epoch(epoch)
        seen.append((dataset.ordered_indices().tolist(), [dataset[n]["source"].tolist() for n in range(len(dataset))]))
    assert seen[0] == seen[2]
    assert seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1]
    assert sorted(seen[0][0]) == list(range(len(dataset)))


def test_validation_keeps_its_order():
    dataset = dataset_of([[word] * 8 for word in range(10, 20)], 12, shuffle=False)
    assert dataset.ordered_indices().tolist() == list(range(len(dataset)))


def test_batches_are_padded_and_say_so():
    dataset = dataset_of([[10, 11, 12, 13], [20, 21]], 6)
    batch = dataset.collater([dataset[0], dataset[1]])
    assert batch["net_input"]["src_tokens"].shape == (2, 6) and batch["ntokens"] == 10
    assert batch["net_input"]["src_tokens"][1, 4:].tolist() == [PAD, PAD]
    assert batch["net_input"]["has_padding"] and not dataset.collater([dataset[0]])["net_input"]["has_padding"]
    assert batch["target"].shape == (2, 6) and batch["target"].ne(PAD).sum() == 2
    assert dataset.collater([]) == {}


def test_batches_say_where_the_targets_are():
    dataset = dataset_of([[word] * 9 for word in range(10, 40)], 14)
    batch = dataset.collater([dataset[number] for number in range(3)])
    positions, target = batch["masked_positions"], batch["target"].flatten()
    assert sorted(positions.tolist()) == [place for place, word in enumerate(target.tolist()) if word != PAD] != []


def test_batches_are_as_wide_as_a_multiple_of_eight_but_no_wider_than_blocks_may_be():
    dataset = dataset_of([[10] * 7, [20] * 3], 12)
    widths = [dataset.collater([dataset[number]])["net_input"]["src_tokens"].shape[1] for number in range(2)]
    assert dataset.sizes.tolist() == [9, 5] and widths == [12, 8]
    assert all(dataset.collater([dataset[number]])["net_input"]["has_padding"] for number in range(2))


@settings(max_examples=40)
@given(sentences.filter(any), st.integers(3, 20))
def test_blocks_of_a_file_are_those_of_its_items(tmp_path_factory, sentences, tokens_per_sample):
    expected = dataset_of(sentences, tokens_per_sample)
    path = tmp_path_factory.mktemp("items") / "train"
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for item in expected.items:
        builder.add_item(item)
    builder.finalize(f"{path}.idx")
    items = pickle.loads(pickle.dumps(MappedItems(path)))
    dataset = FullSentencesDataset(items, items.sizes, tokens_per_sample, BOS, EOS, MASKING)
    for number in range(len(expected)):
        block, same = dataset.block(number), expected.block(number)
        assert block.dtype == same.dtype and block.tolist() == same.tolist()


def test_packing_efficiency_is_the_share_of_places_filled():
    assert dataset_of([[10, 11, 12, 13], [20, 21]], 6).packing_efficiency(6) == pytest.approx(10 / 12)


@pytest.mark.parametrize("items", [[], [[]], [[], []]])
def test_data_without_a_sentence_is_a_user_error(items):
    with pytest.raises(UserError, match="corpus: holds .*empty"):
        dataset_of(items, 8, name="corpus")


def test_sentences_without_an_end_are_a_user_error():
    with pytest.raises(UserError, match="corpus: its first sentence does not end in </s>"):
        FullSentencesDataset([torch.tensor([5, 6])], np.array([2]), 8, BOS, EOS, MASKING, name="corpus")
