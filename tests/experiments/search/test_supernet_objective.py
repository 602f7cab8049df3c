"""The objective of a supernet: two parts of the training data that never meet, read in turn; what each carries."""

from itertools import islice

import numpy as np
import pytest
import torch

from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.data.datasets.labelled_texts import SizedDataset
from lazyformer_fairseq.data.datasets.token_streams import open_tokens
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search.material import SearchContext
from lazyformer_fairseq.experiments.search.settings import SearchSettings
from lazyformer_fairseq.experiments.search.supernet_objective import (
    ARCHITECTURE,
    SIDE,
    WEIGHTS,
    BatchesInTurn,
    part_of,
    side_at,
)


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


def numbers_in_turn(constant_updates=3, per_update=1) -> BatchesInTurn:
    sides = {
        side: EpochBatches(Numbers(23), 4, sample_range=part_of(side, 23, "blocks")) for side in (WEIGHTS, ARCHITECTURE)
    }
    return BatchesInTurn(sides, per_update, constant_updates)


def test_blocks_of_an_epoch_are_all_seen_once_in_another_order_each_epoch():
    sides = numbers_in_turn().sides
    orders = [[number for batch in sides[side] for number in batch["numbers"]] for side in sides for _ in range(2)]
    for first, second, numbers in ((*orders[:2], range(18)), (*orders[2:], range(18, 23))):
        assert sorted(first) == sorted(second) == list(numbers)
        assert first != second


def test_every_fifth_update_is_the_architectures_after_the_constant_phase():
    whose = [batch[SIDE] for batch in islice(numbers_in_turn(constant_updates=7), 20)]
    assert [update for update, side in enumerate(whose) if side == ARCHITECTURE] == [9, 14, 19]
    assert whose == [side_at(update, 7) for update in range(20)]


@pytest.mark.parametrize("stop", range(1, 14))
def test_updates_in_chunks_resume_at_any_of_them_and_leave_no_block_out(stop):
    def updates(batches, count):
        read = [[*islice(flow, 2)] for flow in [iter(batches)] for _ in range(count)]
        assert all(len({chunk[SIDE] for chunk in update if chunk}) == 1 for update in read)
        return read

    whole = updates(numbers_in_turn(per_update=2), 14)
    stopped = numbers_in_turn(per_update=2)
    begun = updates(stopped, stop)
    resumed = numbers_in_turn(per_update=2)
    resumed.load_state_dict(stopped.state_dict())
    assert begun + updates(resumed, 14 - stop) == whole
    epoch = [number for update in whole[:3] for chunk in update for number in chunk.get("numbers", ())]
    assert sorted(epoch) == list(range(18))
    assert whole[2][1] == {}, "five batches are two updates of two chunks, and one of one"


SIZES = {"update_freq": 1, "constant_updates": 2, "max_updates": 20}
OF_TEXT = ("--tgt-len", "8", "--mem-len", "8", "--adaptive-softmax-cutoff", "")


def objective_on(data, batch_size=2, options=OF_TEXT):
    how = {"batch_size": batch_size, **SIZES, "fairseq_options": options}
    return SearchContext(
        SearchSettings(str(data), "language-model", "transformer_xl_tiny", "sfsf", **how)
    ).supernet_objective()


def test_streams_of_the_two_parts_hold_the_whole_text_each_with_a_memory_of_its_own(lm_data):
    objective = objective_on(lm_data)
    batches = objective.batches()
    text = open_tokens(lm_data / "train")
    read = {side: torch.cat([batch["target"] for batch in batches.sides[side]], dim=1) for side in batches.sides}
    begin = 0
    for side, count in ((WEIGHTS, len(text) - round(len(text) / 5)), (ARCHITECTURE, round(len(text) / 5))):
        assert read[side].flatten().tolist() == text[begin : begin + count // 2 * 2].tolist()
        begin += count

    memories = {side: objective.sides[side].memory for side in (WEIGHTS, ARCHITECTURE)}
    for number, memory in enumerate(memories.values()):
        memory.memory.remember([torch.full((2, 8, 4), float(number))], 8)
        memory.has_read(number)
    again = objective_on(lm_data)
    again.batches()
    again.load_state_dict(objective.state_dict())
    assert [again.sides[side].memory.memory.states[0].mean() for side in memories] == [0, 1]
    assert [again.sides[side].memory.next_segment for side in memories] == [1, 2]
    batch = again.at_update({SIDE: ARCHITECTURE, "segment": 2, "net_input": {}}, update=4)
    assert batch["net_input"]["memory"] is again.sides[ARCHITECTURE].memory.memory
    again.forget()
    assert batch["net_input"]["memory"].length == 0


@pytest.mark.parametrize(
    ("count", "message"),
    [(1, r"too little text \(1 blocks\) to reserve 20% of it for the architecture; use more text"), (2, "2 blocks")],
)
def test_no_second_part_is_an_error(count, message):
    with pytest.raises(UserError, match=message):
        part_of(WEIGHTS, count, "blocks")


@pytest.mark.parametrize(
    ("batch_size", "options", "message"),
    [
        (1_000_000, OF_TEXT, "a segment has 8"),
        (2, ("--tgt-len", "8", "--mem-len", "100000000", "--adaptive-softmax-cutoff", ""), "--mem-len 100000000"),
    ],
)
def test_a_part_too_short_for_its_streams_is_an_error(batch_size, options, message, lm_data):
    with pytest.raises(UserError, match=message):
        objective_on(lm_data, batch_size, options).batches()
