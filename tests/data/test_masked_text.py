"""A corpus opened in one call: samples, masks and shards of epochs are those of fairseq's task; with any loader."""

import math
import pickle

import numpy as np
import pytest
import torch
from helpers import assert_equal_state
from torch.utils.data import DataLoader

from lazyformer_fairseq import open_masked_text
from lazyformer_fairseq.data.batches import EpochBatches
from lazyformer_fairseq.data.datasets.masked_blocks import FullSentencesDataset
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.loading import model_of
from lazyformer_fairseq.modules.networks.options import options_of_arch
from lazyformer_fairseq.training.objectives.masked_lm import start_from_counts

OPTIONS = {
    "plain": {"tokens_per_sample": 24},
    "words": {"tokens_per_sample": 24, "whole_word_masks": True, "mask_prob": "0.3:0.15", "leave_unmasked_prob": 0.2},
    "documents": {"tokens_per_sample": 40, "within_documents": True, "document_positions": True},
    "pairs": {"tokens_per_sample": 40, "next_sentence": True, "random_token_prob": 0.3},
    "permuted": {"tokens_per_sample": 24, "permuted_only": False, "whole_word_masks": True},
}
PERMUTED = {"task": "masked_permuted_lm", "seed": 3, "tokens_per_sample": 60, "mask_prob": 0.2}


@pytest.mark.parametrize(
    ("what", "size"), [*((what, {"max_sentences": 5}) for what in OPTIONS), ("plain", {"max_tokens": 120})]
)
def test_epochs_are_those_of_the_task_to_the_last_mask(what, size, three_shards):
    from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY

    options, run = OPTIONS[what], {"seed": 3, "max_update": 20}
    name = "masked_permuted_lm" if what == "permuted" else "full_sentences_masked_lm"
    text = open_masked_text(three_shards, task=name, **run, **options)
    splits = {name: pickle.loads(pickle.dumps(text.split(name))) for name in ("train", "valid")}
    batches = {
        name: EpochBatches(split, size.get("max_sentences"), size.get("max_tokens"), 3, shuffle=name == "train")
        for name, split in splits.items()
    }
    config = TASK_DATACLASS_REGISTRY[name](data=str(three_shards), **run, no_save=True, **options)
    task = TASK_REGISTRY[name].setup_task(config)
    for epoch in (1, 2, 3, 4):  # the last one reads the first shard again
        task.load_dataset("train", epoch)
        task.load_dataset("valid")
        for name, place in (("train", epoch), ("valid", 1)):
            made = task.get_batch_iterator(task.dataset(name), **size, seed=3, epoch=place, disable_iterator_cache=True)
            theirs = made.next_epoch_itr(shuffle=name == "train")
            for number, (one, other) in enumerate(zip(batches[name], theirs, strict=True)):
                assert_equal_state(one, other)
                if name == "train" and text.masking.last:
                    assert_equal_state(text.at_update(one, number), task.at_update(other, number))


def test_a_plain_loader_reads_it_and_validation_stays_the_same(three_shards):
    text = open_masked_text(three_shards, tokens_per_sample=32)
    train, valid = text.split("train"), text.split("valid")
    assert isinstance(train.now, FullSentencesDataset)
    before = valid[0]
    seen = []
    for epoch in (1, 2):
        for each in (train, valid):
            each.set_epoch(epoch)
        loader = DataLoader(train, batch_size=4, shuffle=True, collate_fn=train.collater, num_workers=1)
        seen.append(sum(batch["ntokens"] for batch in loader))
        assert seen[-1] == train.sizes.sum() == text.dataset("train", epoch).sizes.sum()
    assert seen[0] != seen[1]  # another shard
    assert torch.equal(valid[0]["source"], before["source"])
    ids = train.block(0)
    assert (ids[0], ids[-1]) == (text.special.bos, text.special.eos)
    assert text.tokenizer.dictionary == text.dictionary


def test_permuted_text_is_the_text_whose_last_words_are_asked_for(three_shards):
    """Every token once in its place; whole words are asked for, never <s> or </s>; 8:1:1 in both groups of masks."""
    text = open_masked_text(three_shards, whole_word_masks=True, **PERMUTED)
    blocks, begins = text.split("train").now, text.tokenizer.begins_word
    of_masks, orders, predicted = [], [], 0
    for sample, block in ((blocks[index], blocks.block(index)) for index in range(40)):
        time, (source, positions, target) = (
            len(block),
            (sample[key].numpy() for key in ("source", "positions", "target")),
        )
        count = (len(source) - time) // 2
        assert sorted(positions[:time]) == list(range(time)) and (source[:time] == block[positions[:time]]).all()
        groups = [slice(time - count, time), slice(time, time + count), slice(time + count, None)]
        assert all((positions[group] == positions[groups[0]]).all() for group in groups)
        assert (source[groups[1]] == source[groups[2]]).all()
        assert (target[: time + count] == text.special.pad).all() and (target[groups[2]] == source[groups[0]]).all()
        asked = set(positions[groups[0]])
        assert asked and not asked & {0, *np.flatnonzero(np.isin(block, [*text.special]))}
        for place in range(1, time):  # pieces of a word with the one before
            if not begins[block[place]] and block[place - 1] not in text.special and block[place] not in text.special:
                assert (place in asked) == (place - 1 in asked)
        of_masks.append(np.stack([source[groups[1]], target[groups[2]]]))
        orders.append((positions[groups[0]], positions[: time - count]))
        predicted += count / np.isin(block, [*text.special], invert=True).sum()
    source, target = np.concatenate(of_masks, 1)
    shares = [(source == text.special.mask).mean(), (source == target).mean()]
    assert shares == [pytest.approx(0.8, abs=0.06), pytest.approx(0.1, abs=0.05)] and predicted / 40 == pytest.approx(
        0.2, abs=0.03
    )
    assert any((np.diff(order) < 0).any() for order, _ in orders) and any(
        (np.diff(rest) < 0).any() for _, rest in orders
    )
    only = open_masked_text(three_shards, permuted_only=True, whole_word_masks=True, **PERMUTED).split("train").now
    for index in range(3):
        both, (one, other) = orders[index][0], (each[index] for each in (blocks, only))
        assert (other["source"][-len(both) :] == text.special.mask).all() and len(one["source"]) - len(both) == len(
            other["source"]
        )
        assert torch.equal(one["positions"][: -len(both)], other["positions"])
    batch = blocks.collater([blocks[0], blocks[1]])
    assert batch["ntokens"] == blocks.sizes[:2].sum() and batch["net_input"]["turns"].shape[1:] == (
        3,
        batch["target"].size(1),
    )
    before = np.concatenate(orders[0][::-1])
    assert (blocks[0]["positions"].numpy()[: len(before)] == before).all()
    blocks.set_epoch(2)
    assert (blocks[0]["positions"].numpy()[: len(before)] != before).any()


def test_counts_of_neighbours_are_of_all_shards_and_see_the_masked_input(three_shards):
    """The count table reads what the model reads: hiding more of a target's neighbours cannot help it."""
    text = open_masked_text(three_shards, tokens_per_sample=24)
    ids = [np.fromfile(path, np.uint16) for path in sorted(three_shards.glob("shard*/train.bin"))]
    assert text.neighbour_counts.tables[()].context_counts.tolist() == [sum(map(len, ids))]
    batch = text.split("valid").collater([text.split("valid")[number] for number in range(4)])
    cost = text.count_model_loss([batch])
    assert cost < text.cost_of_frequencies([batch])
    at = batch["target"].numpy() != text.special.pad
    source = batch["net_input"]["src_tokens"].numpy()
    assert cost == pytest.approx(text.neighbour_counts.bits(source, at, batch["target"].numpy()[at]))
    hidden = torch.full_like(batch["net_input"]["src_tokens"], text.special.mask)
    assert text.count_model_loss([{**batch, "net_input": {"src_tokens": hidden}}]) > cost


def test_short_blocks_come_first_with_the_tokens_and_targets_of_whole_ones(three_shards):
    text = open_masked_text(three_shards, 3, max_update=10, tokens_per_sample=40, length_schedule="8:0.3,16:0.75")
    assert [text.length_at(update) for update in range(10)] == [8] * 3 + [16] * 5 + [None] * 2
    batch = next(iter(EpochBatches(text.split("train"), 5, seed=3)))
    assert "to_cut" not in next(iter(EpochBatches(text.split("valid"), 5, shuffle=False)))
    pad = text.special.pad
    whole_ids, whole_targets = batch["net_input"]["src_tokens"], batch["target"]
    assert text.at_update(batch, 9) is batch
    for update, length in ((0, 8), (3, 16)):
        cut = text.at_update(batch, update)
        ids, targets = cut["net_input"]["src_tokens"], cut["target"]
        assert ids.shape == targets.shape and ids.size(1) == length and ids.ne(pad).any(1).all()
        assert torch.equal(ids[ids.ne(pad)], whole_ids[whole_ids.ne(pad)])
        assert torch.equal(targets[targets.ne(pad)], whole_targets[whole_targets.ne(pad)])
        assert torch.equal(targets.flatten()[cut["masked_positions"]], targets[targets.ne(pad)])
        assert torch.equal(cut["net_input"]["src_lengths"], ids.ne(pad).sum(1))
        assert cut["net_input"]["has_padding"] == bool(ids.eq(pad).any()) and cut["ntokens"] == ids.ne(pad).sum()


def test_frequencies_are_of_the_training_text_and_their_cost_of_what_is_scored(three_shards):
    text = open_masked_text(three_shards, tokens_per_sample=24)
    ids = np.concatenate([np.fromfile(path, np.uint16) for path in three_shards.glob("shard*/train.bin")]).tolist()
    scored = sorted(set(range(len(text.dictionary))) - set(text.special))
    counts = {id: ids.count(id) + 1 for id in scored}
    assert min(counts.values()) == 1  # of a piece that does not occur
    batches = [text.split("valid").collater([text.split("valid")[number] for number in (0, 1)])]
    targets = [id for id in batches[0]["target"].flatten().tolist() if id != text.special.pad]
    bits = [-math.log2(counts[id] / sum(counts.values())) for id in targets]
    assert text.cost_of_frequencies(batches) == pytest.approx(sum(bits) / len(bits))
    model = model_of(options_of_arch("bert_laptop_tiny", frequency_bias=True), text.dictionary)
    start_from_counts(model, text)
    bias = model.encoder.lm_head.bias
    expected = [math.log(counts.get(id, 1) / sum(counts.values())) for id in range(len(bias))]
    assert bias.tolist() == pytest.approx(expected, abs=1e-6)
    start_from_counts(other := model_of(options_of_arch("bert_laptop_tiny"), text.dictionary), text)
    assert not other.encoder.lm_head.bias.any()


def test_word_embeddings_start_from_counts(three_shards):
    text = open_masked_text(three_shards, tokens_per_sample=24)
    model = model_of(options_of_arch("bert_laptop_tiny", neighbour_embeddings=True), text.dictionary)
    weight = model.encoder.sentence_encoder.embed_tokens.weight
    before = weight.detach().clone()
    start_from_counts(model, text)
    expected = torch.from_numpy(text.neighbour_embeddings(weight.size(1)))
    occurs = expected.any(dim=1)
    assert torch.equal(weight[occurs], expected[occurs])
    assert torch.equal(weight[~occurs], before[~occurs])
    assert not occurs[text.special.mask] and occurs.sum() > 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"mask_probability": 0.2},
            "mask_probability: not an option of masked text; choose from tokens_per_sample, mask_prob",
        ),
        ({"mask_prob": "0.3:0.15"}, "--mask-prob 0.3:0.15: a schedule depends on the length"),
        ({"mask_prob": "0.3:"}, "--mask-prob 0.3:: must be a masking rate such as 0.15, or the rates .* as 0.3:0.15"),
        ({"mask_prob": "0.3:0.2:0.1"}, "--mask-prob 0.3:0.2:0.1: must be a masking rate"),
        ({"mask_prob": "0.3:0", "max_update": 1}, r"--mask-prob 0.0 must be above 0 and at most 1"),
        ({"length_schedule": "8:0.8"}, "--length-schedule 8:0.8: a schedule depends .*; set --max-update"),
        ({"length_schedule": "8"}, "--length-schedule 8: use LENGTH:FRACTION pairs"),
        ({"length_schedule": "8:0.5,16:0.5"}, "--length-schedule 8:0.5,16:0.5: use LENGTH"),
        ({"length_schedule": "2:0.5"}, "--length-schedule 2:0.5: use LENGTH"),
        (
            {"length_schedule": "8:0.5", "within_documents": True, "max_update": 2},
            "--length-schedule: only plain blocks can be split",
        ),
        ({"document_positions": True}, "--document-positions: requires --within-documents"),
        ({"task": "mpnet"}, "task mpnet: must be full_sentences_masked_lm or masked_permuted_lm"),
        ({"permuted_only": True}, "permuted_only: not an option of masked text"),
        ({**PERMUTED, "next_sentence": True}, "--next-sentence: not supported for permuted text"),
        ({**PERMUTED, "within_documents": True}, "--within-documents: not supported for permuted text"),
        ({**PERMUTED, "mask_prob": "0.3:0.15"}, "--mask-prob 0.3:0.15: permuted text does not"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words, three_shards):
    with pytest.raises(UserError, match=words):
        open_masked_text(three_shards, **options)
    with pytest.raises(UserError, match="is not a folder"):
        open_masked_text(three_shards / "none")
