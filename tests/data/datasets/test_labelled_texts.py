"""Batches of labelled texts: contents, padding, order, and that no example is lost."""

import numpy as np
import torch

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset, token_types_of

PAD = 1


def dataset(count=203, shuffle=True, targets=True, seed=1):
    random = np.random.default_rng(0)
    inputs = [np.arange(2, 2 + length, dtype=np.int32) for length in random.geometric(1 / 20, size=count) + 2]
    return LabelledTextsDataset(inputs, np.arange(count) % 3 if targets else None, pad=PAD, shuffle=shuffle, seed=seed)


def batches(data, epoch=1, size=32):
    data.set_epoch(epoch)
    return data.batch_by_size(data.ordered_indices(), max_sentences=size, required_batch_size_multiple=8)


def test_a_batch_is_padded_on_the_right():
    data = LabelledTextsDataset(
        [np.array([0, 5, 2]), np.array([0, 6, 7, 8, 2])], np.array([1.5, 4.0]), pad=PAD, shuffle=False
    )
    batch = data.collater([data[1], data[0]])
    assert batch["id"].tolist() == [1, 0]
    assert batch["nsentences"] == 2
    assert batch["ntokens"] == 8
    assert batch["net_input"]["src_tokens"].tolist() == [[0, 6, 7, 8, 2], [0, 5, 2, PAD, PAD]]
    assert batch["net_input"]["src_tokens"].dtype == torch.long
    assert batch["net_input"]["src_lengths"].tolist() == [5, 3]
    assert batch["net_input"]["has_padding"]
    assert batch["target"].tolist() == [4.0, 1.5]
    assert data.collater([]) == {}


def test_models_with_token_types_get_them():
    pair, single = np.array([0, 5, 6, 2, 7, 2]), np.array([0, 8, 2])
    data = LabelledTextsDataset([pair, single], None, pad=PAD, shuffle=False, types_after=2)
    batch = data.collater([data[0], data[1]])
    assert batch["net_input"]["token_types"].tolist() == [[0, 0, 0, 0, 1, 1], [0] * 6]
    without = dataset(count=1, targets=False)
    assert "token_types" not in without.collater([without[0]])["net_input"]
    robertas = torch.tensor([[0, 5, 2, 2, 7, 2]])  # two ends between the texts
    assert token_types_of(robertas, eos=2, pad=PAD).tolist() == [[0, 0, 0, 1, 1, 1]]


def test_models_that_ask_for_global_tokens_get_the_first_text_of_a_pair_and_else_the_first_token():
    pair, single = np.array([0, 7, 8, 2, 2, 9, 2]), np.array([0, 7, 8, 2])
    data = LabelledTextsDataset([pair, single], None, pad=PAD, shuffle=False, marks_before=2)
    marked = data.collater([data[0], data[1]])["net_input"]["global_positions"]
    assert marked.dtype == torch.bool
    assert marked.int().tolist() == [[1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]


def test_without_labels_there_is_no_target():
    data = dataset(count=3, targets=False)
    batch = data.collater([data[0], data[0]])
    assert "target" not in batch
    assert not batch["net_input"]["has_padding"]


def test_every_example_is_in_one_batch():
    """fairseq's own batches would leave out 3 of 203."""
    for shuffle in (True, False):
        data = dataset(shuffle=shuffle)
        assert sorted(np.concatenate(batches(data)).tolist()) == list(range(203))


def test_batches_hold_little_padding():
    def padding(order):
        cut = [data.sizes[order[start : start + 32]] for start in range(0, len(order), 32)]
        return 1 - data.sizes.sum() / sum(len(sizes) * sizes.max() for sizes in cut)

    data = dataset(count=2000)
    assert padding(np.random.default_rng(1).permutation(2000)) > 0.6
    assert padding(data.ordered_indices()) < 0.12


def test_training_batches_are_new_each_epoch_and_a_function_of_the_seed():
    def composition(data, epoch):
        return [sorted(batch.tolist()) for batch in batches(data, epoch)]

    assert composition(dataset(), 1) != composition(dataset(), 2)
    assert composition(dataset(), 2) == composition(dataset(), 2)
    assert composition(dataset(), 1) != composition(dataset(seed=2), 1)
    assert not dataset().can_reuse_epoch_itr_across_epochs


def test_validation_batches_stay_the_same_in_order_of_length():
    data = dataset(shuffle=False)
    data.set_epoch(1)
    first = data.ordered_indices()
    data.set_epoch(2)
    assert first.tolist() == data.ordered_indices().tolist()
    assert (np.diff(data.sizes[first]) >= 0).all()
    assert data.can_reuse_epoch_itr_across_epochs
