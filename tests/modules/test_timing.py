"""What is fastest: found by turns, told apart or left to the caller's order, and kept only from a quiet machine."""

import itertools
import math
import random
from collections import Counter

import pytest
import torch

from lazyformer_fairseq.modules import timing
from lazyformer_fairseq.modules.timing import (
    FILE,
    MOST_ROUNDS,
    MOST_SECONDS,
    TELLING_ROUNDS,
    Autotuner,
)
from lazyformer_fairseq.storage.json_files import cache_file, read_json

NAMES = ("one", "two", "three")
GOOD = {"a machine": {"a shape": "eager"}}


class Clock:
    """A clock that stands still but for calls, which take given seconds; a call may fail or compute something else.

    Attributes:
        taken: by name the seconds of a call, or a function that draws them.
        outputs: by name what a call returns or raises.
        granted: share of the processor that this process gets.
    """

    def __init__(self):
        self.taken = dict.fromkeys(NAMES, 0.01)
        self.outputs = {}
        self.calls = Counter()
        self.granted = 1.0
        self.now = 0.0
        self.used = 0.0

    def prepare(self, name):
        def call():
            self.calls[name] += 1
            taken = self.taken[name]
            self.pass_time(taken() if callable(taken) else taken)
            found = self.outputs.get(name, torch.ones(3))
            if isinstance(found, Exception):
                raise found
            return [found]

        return call

    def pass_time(self, seconds):
        self.now += seconds
        self.used += seconds * self.granted * torch.get_num_threads()

    def monotonic(self):
        return self.now

    def perf_counter(self):
        self.pass_time(1e-6)
        return self.now

    def process_time(self):
        return self.used


@pytest.fixture
def clock(monkeypatch, tmp_path):
    monkeypatch.setenv("LAZYFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(timing, "PROBE", 1e-5)
    found = Clock()
    monkeypatch.setattr(timing, "time", found)
    return found


def select(clock, selector=None, shape="a shape", names=NAMES):
    selector = selector or Autotuner()
    return selector.known_fastest("cpu", shape) or selector.select("cpu", shape, names, clock.prepare, 1e-3)


@pytest.mark.parametrize("fastest", NAMES)
def test_the_fastest_is_taken_kept_and_not_timed_again(clock, caplog, fastest):
    caplog.set_level("INFO")
    clock.taken[fastest] = 0.008
    selector = Autotuner()
    assert select(clock, selector) == fastest
    assert f"fastest for a shape: {fastest} 8 ms, " in caplog.text
    calls = clock.calls.total()
    assert select(clock, selector) == select(clock, Autotuner()) == fastest, "another process"
    assert clock.calls.total() == calls
    assert read_json(cache_file(FILE)) == {timing.machine("cpu"): {"a shape": fastest}}


def test_candidates_that_are_far_behind_are_given_up_early(clock):
    clock.taken |= {"two": 0.02, "three": 0.0095}
    select(clock)
    assert clock.calls["two"] < clock.calls["one"] <= clock.calls["three"] + 1


@pytest.mark.parametrize(("granted", "fastest"), [(1.0, "one"), (0.5, "two")])
def test_beside_other_programs_a_few_slow_rounds_do_not_decide(clock, granted, fastest):
    clock.granted = granted
    seconds = itertools.chain([0.02] * 5, itertools.repeat(0.008))
    clock.taken["two"] = lambda: next(seconds)
    assert select(clock, names=("one", "two")) == fastest


def test_noise_that_hits_everyone_hides_no_difference(clock):
    """A program that runs beside for a while slows whatever is timed then, and rounds compare what is timed then."""
    chance = random.Random(1)
    base = {"one": 0.0105, "two": 0.01, "three": 0.0115}

    def noisy(name):
        return lambda: base[name] * (1 + 0.5 * (clock.now % 0.4 > 0.2)) * chance.uniform(0.99, 1.01)

    clock.taken = {name: noisy(name) for name in NAMES}
    assert select(clock) == "two"


def test_what_cannot_be_told_apart_is_left_to_the_order_and_is_not_kept(clock):
    seconds = itertools.cycle([0.011, 0.009, 0.011, 0.009, 0.011])
    clock.taken["two"] = lambda: next(seconds)
    assert select(clock, names=("one", "two")) == "one"
    assert not cache_file(FILE).exists()


def test_where_there_is_no_difference_the_first_is_taken_and_kept(clock):
    clock.taken = {"one": 0.01001, "two": 0.01, "three": 0.02}
    assert select(clock) == "one"
    assert cache_file(FILE).exists()
    assert clock.calls["one"] <= MOST_ROUNDS + 2


def test_what_is_measured_on_a_busy_machine_is_used_but_not_kept(clock):
    clock.granted = 0.75
    clock.taken["three"] = 0.005
    selector = Autotuner()
    assert select(clock, selector) == "three"
    assert not cache_file(FILE).exists()
    calls = clock.calls.total()
    assert select(clock, selector) == "three" and clock.calls.total() == calls, "this process does not time it again"


def test_a_training_times_for_two_seconds_and_a_twentieth_of_its_time(clock):
    selector = Autotuner()
    assert selector.is_worth_timing("a shape", is_training=True, candidates=3)
    clock.taken = dict.fromkeys(NAMES, MOST_SECONDS + 0.5)
    assert select(clock, selector) == "one" and clock.calls == {"one": 1}
    assert not cache_file(FILE).exists(), "another process times it"
    assert not selector.is_worth_timing("another", is_training=True, candidates=3)
    clock.now += 20 * MOST_SECONDS
    assert selector.is_worth_timing("another", is_training=True, candidates=3)


def test_what_the_first_call_prepares_does_not_count(clock):
    """oneDNN makes code for each shape, half a second of it: nobody is the slowest for that."""
    first = iter([0.5])
    clock.taken["one"] = lambda: next(first, 0.005)
    assert select(clock) == "one"


def test_long_calls_and_a_long_preparation_leave_time_for_a_few_rounds(clock):
    """As of attention in bf16 on a processor without it, where the first call took two seconds and a round 0.6."""
    first = iter([2.0])
    clock.taken = {"one": lambda: next(first, 0.25), "two": 0.25, "three": 0.1}
    assert select(clock) == "three"
    assert clock.calls["three"] <= TELLING_ROUNDS + 2


def test_inference_times_when_that_is_a_twentieth_of_what_it_has_done(clock):
    selector = Autotuner()
    passes = 3 * TELLING_ROUNDS / 6 * 20  # a call of each is that of one attention of six
    pays = [
        selector.is_worth_timing("a shape", is_training=False, candidates=3, uses=6)
        for _ in range(math.ceil(passes) + 1)
    ]
    assert pays.index(True) == math.floor(passes)
    at_once = Autotuner()
    at_once.time_at_once()
    assert at_once.is_worth_timing("a shape", is_training=False, candidates=3, uses=6)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (ValueError("no\nway"), "three is not used here: no"),
        (torch.ones(3) * 1.01, "three is not used here: the relative error of its result is 0.01"),
        (torch.ones(3) * math.nan, "three is not used here: the relative error of its result is inf"),
    ],
)
def test_what_fails_or_computes_something_else_is_left_out(clock, caplog, output, said):
    clock.taken["three"] = 0.0001
    clock.outputs["three"] = output
    assert select(clock) == "one"
    assert said in caplog.text


def test_if_none_can_be_timed_the_first_is_taken_and_nothing_kept(clock):
    clock.outputs = dict.fromkeys(NAMES, ValueError("no"))
    assert select(clock) == "one"
    assert not cache_file(FILE).exists()


def test_a_resumed_run_and_other_processes_take_what_was_selected_on_such_a_machine(clock, monkeypatch, caplog):
    caplog.set_level("INFO")
    first, second, third = Autotuner(), Autotuner(), Autotuner()
    clock.taken["three"] = 0.002
    select(clock, first)
    cache_file(FILE).unlink()
    clock.calls.clear()
    second.measures = False  # not the first process
    assert not second.is_worth_timing("a shape", is_training=True, candidates=3)
    second.load_state_dict(first.state_dict())
    assert select(clock, second) == "three" and not clock.calls
    monkeypatch.setattr(timing, "machine", lambda device: "another one")
    third.load_state_dict(first.state_dict())
    select(clock, third)
    assert clock.calls and "this machine is another one, so the methods are selected again" in caplog.text


def test_choices_of_a_checkpoint_are_taken():
    selector = Autotuner()
    assert selector.load_state_dict(GOOD) == GOOD == selector.state_dict()


@pytest.mark.parametrize(
    "state", [None, 5, "x", [], {"a machine": 5}, {"a machine": {"a shape": 5}}, {"a machine": {"a": torch.ones(2)}}]
)
def test_damaged_choices_end_no_run(state):
    selector = Autotuner()
    assert selector.load_state_dict(state) == {} == selector.state_dict()
