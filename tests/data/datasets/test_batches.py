"""Blocks of masked words and labelled texts: what is in them, what is masked, how they are put into batches."""

import pickle
from dataclasses import replace
from itertools import chain, pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.data.datasets import masked_blocks
from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset, token_types_of
from lazyformer_fairseq.data.datasets.masked_blocks import (
    FullSentencesDataset,
    Masking,
    pack_full_sentences,
)
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.storage.indexed_format import MappedItems, write_items

BOS, PAD, EOS, UNK, MASK = SPECIAL = (0, 1, 2, 3, 99)
MASKING = Masking(vocab_size=100, mask_index=MASK, pad_index=PAD, special=SPECIAL)


def dataset_of(sentences: list[list[int]], tokens_per_sample: int, **options) -> FullSentencesDataset:
    """`sentences` without their </s>; an empty one is a document boundary."""
    items = [torch.tensor([*words, EOS]) for words in sentences]
    sizes = np.array([len(item) for item in items])
    return FullSentencesDataset(items, sizes, tokens_per_sample, BOS, EOS, MASKING, **options)


def blocks_of(dataset: FullSentencesDataset) -> list[list[int]]:
    return [dataset.block(number).tolist() for number in range(len(dataset))]


def naive_blocks(sentences: list[list[int]], tokens_per_sample: int) -> list[list[int]]:
    """The same rule, one sentence at a time."""
    blocks, block, room = [], [], tokens_per_sample - 1
    for words, before in zip([*sentences, None], [None, *sentences], strict=True):
        if words == []:
            if block and before != [] and len(block) < room:
                block = [*block, EOS]
            continue
        item = [*words, EOS] if words else []
        if words is None or len(block) + len(item) > room:
            while block[-2:] == [EOS, EOS]:  # no boundary at the end
                block.pop()
            blocks += [block] if block else []
            block = []
        while len(item) > room:
            blocks.append([*item[: room - 1], EOS])
            item = item[room - 1 :]
        block = [*block, *item]
    return [[BOS, *block] for block in blocks]


# Some longer than a block; and document boundaries.
words = st.integers(4, 98)
sentences = st.lists(st.just([]) | st.lists(words, max_size=7) | st.lists(words, max_size=60), max_size=60).filter(any)


@pytest.mark.parametrize("items_at_once", [1, 5, 1 << 20])
@settings(max_examples=50)
@given(sentences, st.integers(3, 20))
def test_blocks_are_those_of_packing_one_by_one_also_from_a_file(tmp_path_factory, items_at_once, sentences, most):
    with mock.patch.object(masked_blocks, "ITEMS_AT_ONCE", items_at_once):
        dataset = dataset_of(sentences, most)
    blocks = blocks_of(dataset)
    assert blocks == naive_blocks(sentences, most)
    for number, block in enumerate(blocks):
        assert (block[0], block[-1]) == (BOS, EOS) and block[1] != EOS and block[-2] != EOS
        assert len(block) == dataset.size(number) == dataset.num_tokens(number) <= most
    assert [token for block in blocks for token in block if token > 3] == [*chain(*sentences)]
    assert "documents" not in dataset.collater([dataset[0]])["net_input"]
    path = tmp_path_factory.mktemp("items") / "train"
    write_items(path, np.uint16, [(torch.cat(dataset.items).numpy(), np.array(list(map(len, dataset.items))))])
    items = pickle.loads(pickle.dumps(MappedItems(path)))
    mapped = FullSentencesDataset(items, items.sizes, most, BOS, EOS, MASKING)
    assert blocks_of(mapped) == blocks
    assert all(mapped.block(number).dtype == dataset.block(number).dtype for number in range(len(blocks)))


@given(sentences, st.integers(3, 40))
@settings(max_examples=50)
def test_a_batch_says_where_documents_end(sentences, most):
    """At the second of two </s>, which a sentence never has; whatever is masked."""
    dataset = dataset_of(sentences, most, within_documents=True, document_positions=True)
    net_input = dataset.collater([dataset[number] for number in range(len(dataset))])["net_input"]
    assert net_input["restart_positions"]
    for block, lengths in zip(blocks_of(dataset), net_input["documents"], strict=True):
        parts = np.split(block, np.cumsum(lengths)[:-1])
        assert all(len(part) > 1 and list(part[-2:]) == [EOS, EOS] for part in parts[:-1])
        assert all([EOS, EOS] not in map(list, pairwise(part[:-1])) for part in parts)


@given(
    st.lists(st.integers(4, 98), max_size=40).map(lambda words: np.array([0, *words, 2, 2, 3, 2])),
    *(st.integers(0, 3), st.integers(1, 3), st.integers(0, 10_000)),
)
def test_masks_are_a_function_of_seed_epoch_and_index_and_targets_are_the_words_to_predict(tokens, seed, epoch, index):
    np.random.seed(seed + epoch)  # the global state must not matter
    masked, targets, _ = MASKING.apply(tokens, seed, epoch, index)
    np.random.seed(7)
    again = MASKING.apply(tokens, seed, epoch, index)
    assert np.array_equal(masked, again[0]) and np.array_equal(targets, again[1])
    to_predict = targets != PAD
    assert np.array_equal(targets[to_predict], tokens[to_predict])
    assert np.array_equal(masked[~to_predict], tokens[~to_predict])
    assert not np.isin(tokens[to_predict], SPECIAL).any()
    words = (~np.isin(tokens, SPECIAL)).sum()
    assert abs(to_predict.sum() - 0.15 * words) < 1 or (to_predict.sum() == 1 and 0 < words < 7)
    many = np.arange(4, 99)
    base = MASKING.apply(many, seed, epoch, index)[0]
    for other in ((seed + 1, epoch, index), (seed, epoch + 1, index), (seed, epoch, index + 1)):
        assert not np.array_equal(base, MASKING.apply(many, *other)[0])


def test_shares_are_15_percent_and_80_10_10_in_short_blocks_too():
    tokens = np.random.default_rng(1).integers(4, 99, 200_000)
    masked, targets, _ = MASKING.apply(tokens, 1, 1, 0)
    chosen = targets != PAD
    assert chosen.mean() == pytest.approx(0.15, abs=1e-4)
    became_mask = masked[chosen] == MASK
    stayed = masked[chosen] == tokens[chosen]
    assert became_mask.mean() == pytest.approx(0.8, abs=0.01)
    # A random word is the word itself once in 95.
    assert stayed.mean() == pytest.approx(0.1 + 0.1 / 95, abs=0.01)
    assert set(masked[chosen][~became_mask & ~stayed]) == set(range(4, 99))
    counts = [(MASKING.apply(np.arange(4, 14), 1, 1, index)[1] != PAD).sum() for index in range(4000)]
    assert set(counts) == {1, 2} and np.mean(counts) == pytest.approx(1.5, abs=0.05)


BEGINS = np.isin(np.arange(100), range(4, 40))  # ids 4 to 39 begin a word, the others go on with one


@pytest.mark.parametrize("last", [None, 0.05])
def test_words_are_masked_whole_and_tokens_keep_their_shares(last):
    """2,000 blocks of two texts, each with an unknown piece within a word: 10^5 tokens, words of 1 to some 20."""
    masking = replace(MASKING, begins_word=BEGINS, last=last)
    blocks = np.random.default_rng(1).integers(4, 99, (2000, 54))
    blocks[:, [0, 20, 30, -1]] = BOS, UNK, EOS, EOS
    found = [masking.apply(block, 1, 1, number) for number, block in enumerate(blocks)]
    masked, targets = (np.stack([each[part] for each in found]) for part in (0, 1))
    chosen, is_text = targets != PAD, ~np.isin(blocks, SPECIAL)
    assert not chosen[~is_text].any() and np.array_equal(masked[~chosen], blocks[~chosen])
    begins = BEGINS[blocks] | (np.roll(blocks, 1, axis=1) == EOS) | (blocks == BOS)
    begins[:, 1] = True
    word = begins.cumsum().reshape(blocks.shape)[is_text]  # <unk> does not part a word
    sizes, hits = np.bincount(word), np.bincount(word, chosen[is_text])
    assert set(np.unique(hits[sizes > 0] / sizes[sizes > 0])) == {0, 1} and (sizes > 5).sum() > 100
    # A little more than the share: at least one word of a block, which may be longer than the share.
    assert chosen.sum() / is_text.sum() == pytest.approx(0.15, abs=0.003)
    long = sizes > 3
    assert hits[long].sum() / sizes[long].sum() == pytest.approx(0.15, abs=0.015)  # long words are not left out
    fate = np.where(masked == MASK, 0, np.where(masked == blocks, 1, 2))[chosen]
    assert np.bincount(fate) / len(fate) == pytest.approx([0.8, 0.101, 0.099], abs=0.01)
    fates = np.bincount(word, (masked == MASK)[is_text])[(hits > 1)] / hits[hits > 1]
    assert ((fates > 0) & (fates < 1)).mean() > 0.2  # each piece by itself
    again = masking.apply(blocks[7], 1, 1, 7)
    assert all(np.array_equal(*pair) for pair in zip(again[:2], found[7][:2], strict=True))
    assert not np.array_equal(masking.apply(blocks[7], 1, 2, 7)[1], found[7][1])


@pytest.mark.parametrize("begins", [None, BEGINS])
def test_a_share_that_changes_is_exact_at_each_update_and_its_masks_hold_those_of_smaller_ones(begins):
    dataset = dataset_of(np.random.default_rng(1).integers(4, 99, (400, 250)).tolist(), 252)
    dataset.masking = replace(MASKING, probability=0.3, last=0.15, begins_word=begins)
    batch = dataset.collater([dataset[number] for number in range(400)])
    source, before = batch["net_input"]["src_tokens"], []
    for share in (0.15, 0.2, 0.25, 0.3):
        found = masked_blocks.apply_masking_rate(batch, share, PAD)
        target = found["target"]
        assert torch.equal(found["masked_positions"], target.flatten().ne(PAD).nonzero().squeeze(1))
        assert target.ne(PAD).sum() / 1e5 == pytest.approx(share, abs=3e-4 if begins is None else 2e-3)
        restored = batch["target"].ne(PAD) & target.eq(PAD)
        expected = torch.where(restored, batch["target"], source)
        assert torch.equal(found["net_input"]["src_tokens"], expected) and "mask_shares" not in found
        places = found["masked_positions"].numpy()
        assert np.isin(before, places).all()
        before = places
    assert torch.equal(target, batch["target"]) and torch.equal(found["net_input"]["src_tokens"], source)


def test_masks_and_order_are_new_in_each_epoch_and_the_same_when_it_returns():
    dataset = dataset_of([[word] * 8 for word in range(10, 40)], 12)
    seen = []
    for epoch in (1, 2, 1):
        dataset.set_epoch(epoch)
        seen.append((dataset.ordered_indices().tolist(), [dataset[n]["source"].tolist() for n in range(len(dataset))]))
    assert seen[0] == seen[2]
    assert seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1]
    assert sorted(seen[0][0]) == list(range(len(dataset)))
    dataset.shuffle = False
    assert dataset.ordered_indices().tolist() == list(range(len(dataset)))


def test_batches_are_padded_and_say_so_and_where_the_targets_are():
    dataset = dataset_of([[10, 11, 12, 13], [20, 21]], 6)
    batch = dataset.collater([dataset[0], dataset[1]])
    assert batch["net_input"]["src_tokens"].shape == (2, 6) and batch["ntokens"] == 10
    assert batch["net_input"]["src_tokens"][1, 4:].tolist() == [PAD, PAD]
    assert batch["net_input"]["has_padding"] and not dataset.collater([dataset[0]])["net_input"]["has_padding"]
    assert batch["target"].shape == (2, 6) and batch["target"].ne(PAD).sum() == 2
    assert dataset.collater([]) == {}
    assert dataset.packing_efficiency(6) == pytest.approx(10 / 12)
    positions, target = batch["masked_positions"], batch["target"].flatten()
    assert sorted(positions.tolist()) == [place for place, word in enumerate(target.tolist()) if word != PAD] != []
    dataset = dataset_of([[10] * 7, [20] * 3], 12)  # as wide as a multiple of eight, but no wider than blocks may be
    widths = [dataset.collater([dataset[number]])["net_input"]["src_tokens"].shape[1] for number in range(2)]
    assert dataset.sizes.tolist() == [9, 5] and widths == [12, 8]
    assert all(dataset.collater([dataset[number]])["net_input"]["has_padding"] for number in range(2))


def test_what_makes_no_blocks_is_a_user_error():
    for items in ([], [[]], [[], []]):
        with pytest.raises(UserError, match="corpus contains .*no sentences; was the corpus empty"):
            dataset_of(items, 8, name="corpus")
    with pytest.raises(UserError, match="corpus: the first sentence does not end in </s>"):
        FullSentencesDataset([torch.tensor([5, 6])], np.array([2]), 8, BOS, EOS, MASKING, name="corpus")
    with pytest.raises(UserError, match="--tokens-per-sample 2: must be at least 3"):
        pack_full_sentences(np.array([3]), 2)
    for shares in ({"probability": 0}, {"probability": 1.5}, {"last": 0}, {"keep": 0.6, "random": 0.6}, {"keep": -1}):
        with pytest.raises(UserError, match="--mask-prob .* must be above 0 and at most 1"):
            Masking(vocab_size=100, mask_index=MASK, pad_index=PAD, special=SPECIAL, **shares)


def dataset(count=203, shuffle=True, seed=1):
    random = np.random.default_rng(0)
    inputs = [np.arange(2, 2 + length, dtype=np.int32) for length in random.geometric(1 / 20, size=count) + 2]
    return LabelledTextsDataset(inputs, np.arange(count) % 3, pad=PAD, shuffle=shuffle, seed=seed)


def batch_of(texts, targets=None, **options):
    data = LabelledTextsDataset([np.array(text) for text in texts], targets, pad=PAD, shuffle=False, **options)
    assert data.collater([]) == {}
    return data.collater([data[index] for index in range(len(texts))])


def batches(data, epoch=1, size=32):
    data.set_epoch(epoch)
    return data.batch_by_size(data.ordered_indices(), max_sentences=size, required_batch_size_multiple=8)


def test_a_batch_is_padded_on_the_right_and_has_targets_where_there_are_labels():
    batch = batch_of([[0, 6, 7, 8, 2], [0, 5, 2]], np.array([4.0, 1.5]))
    assert (batch["id"].tolist(), batch["nsentences"], batch["ntokens"]) == ([0, 1], 2, 8)
    assert batch["net_input"]["src_tokens"].tolist() == [[0, 6, 7, 8, 2], [0, 5, 2, PAD, PAD]]
    assert batch["net_input"]["src_tokens"].dtype == torch.long
    assert batch["net_input"]["src_lengths"].tolist() == [5, 3]
    assert batch["target"].tolist() == [4.0, 1.5]
    unlabelled = batch_of([[0, 5, 2]] * 2)
    assert batch["net_input"]["has_padding"] and not unlabelled["net_input"]["has_padding"]
    assert "target" not in unlabelled and "token_types" not in unlabelled["net_input"]


def test_models_with_token_types_or_global_tokens_get_them():
    batch = batch_of([[0, 5, 6, 2, 7, 2], [0, 8, 2]], token_type_eos=2)
    assert batch["net_input"]["token_types"].tolist() == [[0, 0, 0, 0, 1, 1], [0] * 6]
    robertas = torch.tensor([[0, 5, 2, 2, 7, 2]])  # two ends between the texts
    assert token_types_of(robertas, eos=2, pad=PAD).tolist() == [[0, 0, 0, 1, 1, 1]]
    # The first text of a pair, and else the first token.
    marked = batch_of([[0, 7, 8, 2, 2, 9, 2], [0, 7, 8, 2]], global_attention_eos=2)["net_input"]["global_positions"]
    assert marked.dtype == torch.bool
    assert marked.int().tolist() == [[1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]


def test_every_example_is_in_one_batch_and_batches_hold_little_padding():
    for shuffle in (True, False):  # fairseq's own batches would leave out 3 of 203
        assert sorted(np.concatenate(batches(dataset(shuffle=shuffle))).tolist()) == list(range(203))

    def padding(order):
        cut = [data.sizes[order[start : start + 32]] for start in range(0, len(order), 32)]
        return 1 - data.sizes.sum() / sum(len(sizes) * sizes.max() for sizes in cut)

    data = dataset(count=2000)
    assert padding(np.random.default_rng(1).permutation(2000)) > 0.6
    assert padding(data.ordered_indices()) < 0.12


def test_training_batches_are_new_each_epoch_and_a_function_of_the_seed_validation_s_are_in_order_of_length():
    def composition(data, epoch):
        return [sorted(batch.tolist()) for batch in batches(data, epoch)]

    assert composition(dataset(), 1) != composition(dataset(), 2) == composition(dataset(), 2)
    assert composition(dataset(), 1) != composition(dataset(seed=2), 1)
    valid = dataset(shuffle=False)
    orders = []
    for epoch in (1, 2):
        valid.set_epoch(epoch)
        orders.append(valid.ordered_indices().tolist())
    assert orders[0] == orders[1] and (np.diff(valid.sizes[orders[0]]) >= 0).all()
    assert valid.can_reuse_epoch_itr_across_epochs and not dataset().can_reuse_epoch_itr_across_epochs
