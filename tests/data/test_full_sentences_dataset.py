import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.data.full_sentences_dataset import FullSentencesDataset
from lazyformer_fairseq.data.masking import Masking
from lazyformer_fairseq.errors import UserError

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


def test_packing_efficiency_is_the_share_of_places_filled():
    assert dataset_of([[10, 11, 12, 13], [20, 21]], 6).packing_efficiency(6) == pytest.approx(10 / 12)


@pytest.mark.parametrize("items", [[], [[]], [[], []]])
def test_data_without_a_sentence_is_a_user_error(items):
    with pytest.raises(UserError, match="corpus: holds .*empty"):
        dataset_of(items, 8, name="corpus")


def test_sentences_without_an_end_are_a_user_error():
    with pytest.raises(UserError, match="corpus: its first sentence does not end in </s>"):
        FullSentencesDataset([torch.tensor([5, 6])], np.array([2]), 8, BOS, EOS, MASKING, name="corpus")
