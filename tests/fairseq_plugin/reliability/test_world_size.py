"""An epoch resumed by other processes, with another batch size or update-freq: every sample once, none twice."""

import numpy as np
from fairseq.data import FairseqDataset, iterators
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lazyformer_fairseq.fairseq_plugin.tasks.encoder_task import EncoderTask


class Numbers(FairseqDataset):
    """Samples that are their own numbers; of sizes 1, 2, 3, 1, 2, ... where batches are made of tokens."""

    def __init__(self, count: int):
        self.sizes = np.arange(count) % 3 + 1
        self.epoch = 1

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return int(index)

    def collater(self, samples):
        return samples

    def size(self, index):
        return int(self.sizes[index])

    num_tokens = size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def ordered_indices(self):
        return np.random.default_rng(self.epoch).permutation(len(self))


class Run:
    """The data of a run of so many processes in an epoch, as fairseq's trainer and training loop go through it."""

    def __init__(self, samples: int, world: int, update_freq: int, batch_size: dict, state=None, grouped=False):
        self.ranks = []
        for rank in range(world):
            iterator = EncoderTask(None, None).get_batch_iterator(
                Numbers(samples), **batch_size, num_shards=world, shard_id=rank, grouped_shuffling=grouped
            )
            if state:
                iterator.load_state_dict(state)
            self.ranks.append(iterator)
        self.groups = [iterators.GroupedIterator(rank.next_epoch_itr(), update_freq) for rank in self.ranks]

    def update(self) -> list[int]:
        return [sample for group in self.groups for batch in next(group) for sample in batch]

    def is_over(self) -> bool:
        over = {not group.has_next() for group in self.groups}
        assert len(over) == 1, "all processes have equally many updates, else some would wait for others for ever"
        assert over == {rank.end_of_epoch() for rank in self.ranks}
        return over.pop()

    def rest(self) -> list[int]:
        """What is left of the epoch."""
        seen = []
        while not self.is_over():
            seen += self.update()
        return seen

    def state_dict(self) -> dict:
        states = [rank.state_dict() for rank in self.ranks]
        assert all(state == states[0] for state in states)  # the first one's is saved
        return states[0]


def samples_of_epoch(samples: int, stretches: list[tuple], grouped: bool = False) -> list[int]:
    """Of an epoch made by runs in turn, each (processes, update-freq, batch size, updates); the last one ends it."""
    seen, state = [], None
    for number, (world, update_freq, batch_size, updates) in enumerate(stretches):
        run = Run(samples, world, update_freq, batch_size, state, grouped)
        is_last = number == len(stretches) - 1
        while not run.is_over() and (is_last or updates > 0):
            seen += run.update()
            updates -= 1
        if run.is_over():
            assert run.state_dict() == {"version": 2, "epoch": 2, "iterations_in_epoch": 0, "shuffle": True}
            break
        state = run.state_dict()
    return seen


batch_sizes = st.one_of(
    st.integers(1, 5).map(lambda size: {"max_tokens": None, "max_sentences": size}),
    st.integers(3, 9).map(lambda tokens: {"max_tokens": tokens, "max_sentences": None}),
)
one_stretch = st.tuples(st.integers(1, 5), st.integers(1, 4), batch_sizes, st.integers(1, 6))
ONE, TWO = ({"max_tokens": None, "max_sentences": size} for size in (1, 2))


@settings(max_examples=200)
@given(st.integers(1, 90), st.lists(one_stretch, min_size=2, max_size=5))
@example(10, [(1, 1, ONE, 3), (2, 2, ONE, 1)])  # fairseq's offset is 3 of each process
@example(10, [(1, 1, ONE, 3), (1, 2, ONE, 1)])  # fairseq leaves out the last batch
@example(20, [(2, 1, TWO, 1), (3, 1, ONE, 1), (1, 2, TWO, 1), (2, 1, ONE, 1)])
def test_every_sample_of_the_epoch_comes_once(samples, stretches):
    assert sorted(samples_of_epoch(samples, stretches)) == list(range(samples))


@given(st.integers(20, 90), st.integers(1, 4), one_stretch, one_stretch)
def test_batches_shuffled_in_groups_come_once_too(samples, world, second, third):
    # Of what does not fill a group fairseq leaves out a part, so the measure is what one run would have seen.
    (size, updates) = ({"max_tokens": None, "max_sentences": 2}, 2)
    alone = samples_of_epoch(samples, [(world, 1, size, updates)], grouped=True)
    together = samples_of_epoch(samples, [(world, 1, size, updates), second, third], grouped=True)
    assert sorted(together) == sorted(alone)


@given(st.integers(1, 90), st.integers(1, 4), st.integers(1, 3), batch_sizes, st.integers(1, 9))
def test_the_same_processes_go_on_with_the_same_batches(samples, world, update_freq, batch_size, updates):
    alone = samples_of_epoch(samples, [(world, update_freq, batch_size, 0)])
    resumed = samples_of_epoch(samples, [(world, update_freq, batch_size, updates)] * 3)
    assert resumed == alone


def test_a_checkpoint_of_fairseq_goes_on_and_other_data_starts_the_epoch_anew_and_says_so(caplog):
    run = Run(20, 2, 1, TWO)
    seen = run.update()
    state = {key: run.state_dict()[key] for key in ("version", "epoch", "iterations_in_epoch", "shuffle")}
    assert sorted(seen + Run(20, 2, 1, TWO, state).rest()) == list(range(20))
    assert sorted(Run(30, 1, 1, TWO, run.state_dict()).rest()) == list(range(30))
    assert "an epoch of 20 samples, and now there are 30" in caplog.text


def test_a_run_that_leaves_out_the_remainder_ends_its_epoch():
    run = Run(10, 1, 1, ONE)
    run.update()
    (rank,) = Run(10, 1, 1, ONE, run.state_dict()).ranks
    groups = iterators.GroupedIterator(rank._cur_epoch_itr, 4, skip_remainder_batch=True)
    assert [len(group) for group in groups] == [4, 4]
    assert rank.end_of_epoch()
