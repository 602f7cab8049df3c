"""The batches of epochs: those of fairseq's iterator, by index; resumed; and what fairseq is told of our datasets."""

import pickle
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, FairseqDataset, data_utils
from fairseq.tasks import FairseqTask
from hypothesis import given
from hypothesis import strategies as st

from lazyformer_fairseq.data.batches import EpochBatches, batch_by_size, pad_right
from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset
from lazyformer_fairseq.data.text import dictionary_file
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.fairseq_plugin.fairseq_classes import as_fairseq

SIZES = st.lists(st.integers(1, 30), max_size=80).map(lambda sizes: np.array(sizes, dtype=np.int64))


def texts_of(sizes: np.ndarray, seed: int = 1) -> LabelledTextsDataset:
    return LabelledTextsDataset([np.arange(size) for size in sizes], None, pad=1, shuffle=True, seed=seed)


@given(SIZES, st.none() | st.integers(30, 200), st.none() | st.integers(1, 20))
def test_an_order_is_cut_where_fairseq_cuts_it(sizes, max_tokens, max_sentences):
    order = np.random.default_rng(1).permutation(len(sizes))
    theirs = data_utils.batch_by_size(order, None, sizes[order], max_tokens, max_sentences, 1)
    ours = batch_by_size(order, sizes[order], max_tokens, max_sentences)
    assert [batch.tolist() for batch in ours] == [batch.tolist() for batch in theirs]


def test_a_sample_longer_than_a_batch_is_refused():
    with pytest.raises(UserError, match="a sample has 31 tokens, but the limit per batch is 30"):
        batch_by_size(np.arange(2), np.array([3, 31]), max_tokens=30)
    with pytest.raises(UserError, match="the batch size is missing"):
        EpochBatches(texts_of([3]))


@given(SIZES.filter(len), st.none() | st.integers(1, 40))
def test_rows_are_padded_as_fairseq_pads_them(sizes, width):
    rows = [torch.arange(size) for size in sizes]
    theirs = data_utils.collate_tokens(rows, 7, pad_to_length=width)
    assert torch.equal(pad_right(rows, 7, width or 0), theirs)


@given(SIZES.filter(len), st.sampled_from([{"max_tokens": 60}, {"max_sentences": 3}]), st.integers(0, 5))
def test_epochs_are_those_of_fairseq_and_go_on_where_they_stopped(sizes, size, seed):
    task = FairseqTask(SimpleNamespace())
    ours = EpochBatches(texts_of(sizes, seed), size.get("max_sentences"), size.get("max_tokens"), seed)
    for epoch in (1, 2, 3):
        theirs = task.get_batch_iterator(as_fairseq(texts_of(sizes, seed)), **size, seed=seed, epoch=epoch)
        theirs = [batch["id"].tolist() for batch in theirs.next_epoch_itr(shuffle=True)]
        assert [batch.tolist() for batch in ours.indices] == theirs and len(ours) == len(theirs)
        found = []
        for batch in ours:
            found.append(batch["id"].tolist())
            resumed = EpochBatches(texts_of(sizes, seed), ours.batch_size, ours.max_tokens, seed)
            resumed.load_state_dict(ours.state_dict())
            if len(found) < len(theirs):
                assert next(iter(resumed))["id"].tolist() == theirs[len(found)]
            else:
                assert ours.state_dict() == {"epoch": epoch + 1, "iterations_in_epoch": 0}
        assert found == theirs


def test_without_shuffling_the_order_is_the_dataset_s_and_workers_change_nothing():
    sizes = np.arange(1, 20)
    plain, read_ahead = (EpochBatches(texts_of(sizes), 4, shuffle=False, workers=workers) for workers in (0, 2))
    found = [[batch["id"].tolist() for batch in batches] for batches in (plain, read_ahead)]
    assert found[0] == found[1]
    assert [*chain(*found[0])] == texts_of(sizes).ordered_indices().tolist()


@pytest.mark.parametrize("plain_class", [dictionary_file.Dictionary, LabelledTextsDataset])
def test_fairseq_takes_ours_for_its_own_and_it_can_be_pickled(plain_class):
    symbols = dictionary_file.Dictionary()
    symbols.add_symbol("a")
    thing = as_fairseq(symbols if plain_class is dictionary_file.Dictionary else texts_of([2, 3]))
    assert isinstance(thing, plain_class) and isinstance(thing, (Dictionary, FairseqDataset))
    again = pickle.loads(pickle.dumps(thing))
    assert type(again) is type(thing) and len(again) == len(thing)
    if isinstance(thing, Dictionary):  # what is fairseq's alone, and what both have
        assert again.string(torch.tensor([4, 3, 2])) == "a <unk>" and again.index("b") == again.unk()
    assert as_fairseq(thing) is thing and type(thing).__name__ == plain_class.__name__
    assert not isinstance(plain_class.__new__(plain_class), (Dictionary, FairseqDataset))
