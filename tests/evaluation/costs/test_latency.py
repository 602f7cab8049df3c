"""Latencies, on things whose calls can be seen."""

import time

import pytest
import torch

from lazyformer_fairseq.evaluation.costs.latency import Timing, measure, measure_sublayers, next_segment, peak_memory
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.report.numbers import with_spread


def test_things_take_turns_and_warm_up_is_not_kept():
    calls = []
    things = {name: lambda name=name: (calls.append(name), time.sleep(0.02 * (name == "c"))) for name in "abc"}
    timings = measure(things, rounds=5, warm_up=2)
    rounds = [calls[start : start + 3] for start in range(0, len(calls), 3)]
    assert len(rounds) == 7 and all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1, "the order changes, so that nobody always follows the same one"
    assert [len(timing.samples) for timing in timings.values()] == [5, 5, 5]
    assert timings["c"].median >= 0.02 > timings["a"].median


def test_median_and_quartiles():
    timing = Timing((4.0, 1.0, 2.0, 3.0, 100.0))
    assert timing.median == 3.0
    assert timing.as_json() == {"n": 5, "median": 3.0, "low": 2.0, "high": 4.0, "samples": [4.0, 1.0, 2.0, 3.0, 100.0]}
    assert with_spread(timing.as_json(), 2) == "3.00 (2.00 to 4.00)"
    assert with_spread(Timing((4.0, 1.0)).as_json()) == "2.5 (n = 2)", "two samples have no quartiles"


SIZES = {"vocab_size": 17, "embed_dim": 8, "ffn_embed_dim": 16, "num_heads": 2}


@pytest.mark.parametrize(
    ("network", "memory"), [(Encoder("f", **SIZES), 0), (CausalDecoder("f", **SIZES, mem_len=6), 6)]
)
def test_sublayers_of_a_network(network, memory):
    sublayers = {planned.text: planned for planned in plan("slf")}
    timings = measure_sublayers(network, sublayers, time=4, memory=memory, rounds=2, warm_up=0)
    assert list(timings) == ["s", "l", "f"]
    assert all(len(timing.samples) == 2 and timing.median > 0 for timing in timings.values())


def test_next_segment_meets_a_full_memory():
    decoder, lengths = CausalDecoder("sflf", **SIZES, mem_len=6), []

    def model(tokens_BT, memory, target):
        lengths.append(memory.length)
        decoder(tokens_BT, memory)

    tokens = torch.zeros(1, 4, dtype=torch.long)
    score = next_segment(model, tokens, tokens, mem_len=6)
    score(), score()
    assert lengths == [0, 4, 6, 6]


def test_peak_memory_counts_what_was_held_at_once():
    def two_then_one():
        kept = torch.ones(1000)  # 4,000 bytes
        gone = torch.ones(3000)
        del gone
        return kept, torch.ones(500)

    assert [peak_memory(two_then_one, "cpu") for _ in range(2)] == [16_000] * 2, "the same on every run"
