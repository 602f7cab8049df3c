"""Settings of a search, the two parts of its data, and what a pattern's latency is expected to be and costs."""

import json
import math

import numpy as np
import pytest
import torch

from lazyformer_fairseq.data.datasets.labelled_texts import SizedDataset
from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.experiments.search import latency, training
from lazyformer_fairseq.experiments.search.material import two_parts_of_blocks, two_parts_of_text
from lazyformer_fairseq.experiments.search.settings import SearchSettings, choose_baseline, read_candidates

PRICES = {"s": 3.0, "f": 1.0, "s_read": 5.0, "l": 2.0, "rest": 0.5}


def test_an_s_costs_more_where_an_l_reads_it():
    assert latency.latency_of(PRICES, "sf(lf)x2 s") == 0.5 + 5 + 1 + 3 + 3 + 3 and latency.latency_of(PRICES, "") == 0.5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "not an object; give an object of milliseconds"),
        (json.dumps({"s": 1, "f": 1, "x": 1}), "names:"),
        (json.dumps({"s": -1, "f": 1}), "field 's' is -1"),
        ('{"s": NaN, "f": 1}', "field 's' is nan"),
        (json.dumps({"s": 1}), "no price of f"),
    ],
)
def test_a_price_list_is_read_and_a_bad_one_refused_by_name(tmp_path, content, message):
    path = tmp_path / "prices.json"
    path.write_text('{"s": 2, "f": 1.5}')
    assert latency.read_price_list(path, ("s", "f")) == {"s": 2, "f": 1.5}
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        latency.read_price_list(path, ("s", "f"))


# --- Settings


def test_the_baseline_is_the_papers_unless_given_and_candidates_are_read_in_one_order():
    assert choose_baseline(None, 4, 32) == "sfsf"
    assert choose_baseline(None, None, 6) == "sfsfsf"
    assert choose_baseline("(sff)x2 f", None, 32) == "sffsfff"
    assert choose_baseline("M2x1", 4, 32) == "sflf"
    assert read_candidates(("identity", "f", "s")) == ("s", "f", "identity")
    assert read_candidates(("l", "f", "s")) == ("s", "l", "f")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: choose_baseline(None, 5, 32), r"--sublayers 5: the baseline \(sf\)x2 cannot have an odd number"),
        (lambda: choose_baseline("sfx", None, 32), "x needs the number of repeats"),
        *((lambda given=given: read_candidates((given,)), "nothing") for given in ("s", "")),
        (lambda: read_candidates(("s,f,x",)), "unknown 'x'"),
        (lambda: settings_of(budgets=(0.5, -1.0)), "--budgets -1.0: must be more than 0"),
        (
            lambda: settings_of(budgets=(0.5, 0.9), evaluations=1),
            "--evaluations 1: give one for each of 2 budgets at least",
        ),
    ],
)
def test_what_the_search_cannot_do_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def settings_of(**given) -> SearchSettings:
    return SearchSettings("data", "masked-lm", "bert_tiny", "sf", **given)


def test_temperature_is_constant_then_decays_exponentially_as_fbnets():
    assert pytest.approx(5 * math.exp(-0.045 * 90), rel=0.01) == training.FINAL_TEMPERATURE  # FBNet's 90 epochs
    settings = settings_of(constant_updates=100, max_updates=300)
    found = [training.temperature_at(update, settings) for update in (0, 100, 200, 300)]
    assert found == pytest.approx([5.0, 5.0, math.sqrt(5.0 * 0.087), 0.087])


# --- Two parts of the training data that never meet


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
    return [[number for chunk in batch for number in chunk["numbers"]] for batch in part.batches(epoch, start)]


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
    weights, architecture = two_parts_of_text(tokens, rows=2, tgt_len=8, mem_len=8, eos=2, pad=1)
    batches = [batch for (batch,) in weights.batches(1, 0)]
    targets = torch.cat([batch["target"] for batch in batches], dim=1)
    assert targets.flatten().tolist() == list(range(10, 170))
    assert next(architecture.batches(1, 0))[0]["target"][0, 0] == 170
    memory = batches[0]["net_input"]["memory"]
    memory.remember([torch.ones(2, 8, 4)], 8)
    assert memory.length == 8
    next(weights.batches(1, 3))
    assert memory.length == 8
    next(weights.batches(2, 0))
    assert memory.length == 0


def test_an_update_in_chunks_reads_what_the_whole_one_reads():
    [whole, divided] = (two_parts_of_blocks(Numbers(23), 4, chunks) for chunks in (1, 2))
    assert numbers_of(whole[0], 3) == numbers_of(divided[0], 3)
    assert [len(chunk["numbers"]) for chunk in next(divided[0].batches(1, 0))] == [2, 2]
    sizes = {"rows": 4, "tgt_len": 8, "mem_len": 8, "eos": 2, "pad": 1}
    (whole, _), (divided, _) = (two_parts_of_text(np.arange(10, 410), **sizes, chunks=chunks) for chunks in (1, 2))
    for (one,), chunks in zip(whole.batches(1, 0), divided.batches(1, 0), strict=True):
        assert torch.equal(one["target"], torch.cat([chunk["target"] for chunk in chunks]))
    for number, memory in enumerate(divided.memories):
        memory.remember([torch.full((2, 8, 4), float(number))], 8)
    again, _ = two_parts_of_text(np.arange(10, 410), **sizes, chunks=2)
    again.load_state_dict(divided.state_dict())
    assert [memory.states[0].mean() for memory in again.memories] == [0, 1]


def test_no_second_part_is_an_error():
    def text(count: int, rows: int, tgt_len: int = 8, mem_len: int = 0):
        return two_parts_of_text(np.arange(count), mem_len, rows=rows, tgt_len=tgt_len, eos=2, pad=1)

    for make, message in (
        (lambda: two_parts_of_blocks(Numbers(1), 4), "1 blocks make no second part"),
        (lambda: text(2, 1, 1), "2 tokens make no second part"),
        (lambda: text(100, 4), "a segment is 8"),
        (lambda: text(100, 1, mem_len=16), "--mem-len 16"),
    ):
        with pytest.raises(UserError, match=message):
            make()
