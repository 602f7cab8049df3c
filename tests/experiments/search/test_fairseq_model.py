"""Two parts of the training data that never meet."""

import numpy as np
import pytest
import torch

from lazyformer_fairseq.data.datasets.labelled_texts import SizedDataset
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.fairseq_model import two_parts_of_blocks, two_parts_of_text


class Numbers(SizedDataset):
    """Block i holds the number i; another order each epoch."""

    def __init__(self, count):
        self.sizes = np.ones(count, dtype=int)

    def __getitem__(self, index):
        return index

    def collater(self, samples):
        return {"numbers": samples}

    def ordered_indices(self):
        return np.random.default_rng(self.epoch).permutation(len(self))


def numbers_of(part, epoch, start=0):
    return [batch["numbers"] for batch in part.batches(epoch, start)]


def test_blocks_of_an_epoch_are_all_seen_once_in_another_order_each_epoch():
    weights, architecture = two_parts_of_blocks(Numbers(23), 4)
    seen = [[number for batch in numbers_of(part, 1) for number in batch] for part in (weights, architecture)]
    assert sorted(seen[0]) == list(range(18))
    assert sorted(seen[1]) == list(range(18, 23))
    assert (len(weights), len(architecture)) == (5, 2)
    assert numbers_of(weights, 1) != numbers_of(weights, 2)
    assert numbers_of(weights, 1, start=2) == numbers_of(weights, 1)[2:]


def test_streams_of_the_two_parts_hold_the_whole_text_and_start_with_empty_memory():
    tokens = np.arange(10, 210)
    weights, architecture = two_parts_of_text(tokens, batch_size=2, tgt_len=8, mem_len=8, eos=2, pad=1)
    batches = list(weights.batches(1, 0))
    targets = torch.cat([batch["target"] for batch in batches], dim=1)
    assert targets.flatten().tolist() == list(range(10, 170))
    assert next(architecture.batches(1, 0))["target"][0, 0] == 170
    memory = batches[0]["net_input"]["memory"]
    memory.remember([torch.ones(2, 8, 4)], 8)
    assert memory.length == 8
    next(weights.batches(1, 3))
    assert memory.length == 8
    next(weights.batches(2, 0))
    assert memory.length == 0


def test_no_second_part_is_an_error():
    def text(count: int, batch_size: int, tgt_len: int = 8, mem_len: int = 0):
        return two_parts_of_text(np.arange(count), batch_size, tgt_len, mem_len, eos=2, pad=1)

    for make, message in (
        (lambda: two_parts_of_blocks(Numbers(1), 4), "1 blocks make no second part"),
        (lambda: text(2, 1, 1), "2 tokens make no second part"),
        (lambda: text(100, 4), "a segment is 8"),
        (lambda: text(100, 1, mem_len=16), "--mem-len 16"),
    ):
        with pytest.raises(UserError, match=message):
            make()
