"""Batches of labelled texts: contents, padding, order, and that no example is lost."""

import numpy as np
import torch

from lazyformer_fairseq.data.datasets.labelled_texts import LabelledTextsDataset, token_types_of

PAD = 1


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
    batch = batch_of([[0, 5, 6, 2, 7, 2], [0, 8, 2]], types_after=2)
    assert batch["net_input"]["token_types"].tolist() == [[0, 0, 0, 0, 1, 1], [0] * 6]
    robertas = torch.tensor([[0, 5, 2, 2, 7, 2]])  # two ends between the texts
    assert token_types_of(robertas, eos=2, pad=PAD).tolist() == [[0, 0, 0, 1, 1, 1]]
    # The first text of a pair, and else the first token.
    marked = batch_of([[0, 7, 8, 2, 2, 9, 2], [0, 7, 8, 2]], marks_before=2)["net_input"]["global_positions"]
    assert marked.dtype == torch.bool
    assert marked.int().tolist() == [[1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]


def test_every_example_is_in_one_batch():
    """fairseq's own batches would leave out 3 of 203."""
    for shuffle in (True, False):
        assert sorted(np.concatenate(batches(dataset(shuffle=shuffle))).tolist()) == list(range(203))


def test_batches_hold_little_padding():
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
