"""Which back end ``auto`` takes: the fastest where it runs, what it keeps of that, and what it takes unmeasured."""

import math
from collections import Counter
from unittest import mock

import pytest
import torch
from every_kind import build, of_each_kind, tokens

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules import choices as chosen
from lazyformer_fairseq.modules.attention import BACK_ENDS, back_ends, choice
from lazyformer_fairseq.modules.attention.choice import Workload, choose, unmeasured
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.choices import FILE, ROUNDS, ROUNDS_OF_NEAR, SECONDS, Choices
from lazyformer_fairseq.storage.json_files import cache_file, read_json

CPU = Workload(
    device="cpu", precision=torch.float32, batch=1, heads=12, time=512, keys=512, head_size=64, is_training=True,
    features=frozenset(), has_dropout=False, blocks=6,
)  # fmt: skip
ALL = ("eager", "materialize", "recompute", "fused")


class Clock:
    """Things that take given times (1 where none is given), and how often each was called; may fail or be wrong."""

    def __init__(self):
        self.taken, self.calls, self.now = {}, Counter(), 0.0
        self.outputs = {}

    def timed(self, name):
        def call():
            self.calls[name] += 1
            self.now += self.taken.get(name, 1.0)
            found = self.outputs.get(name, torch.ones(3))
            if isinstance(found, Exception):
                raise found
            return [found]

        return call

    def monotonic(self):
        return self.now

    perf_counter = monotonic


@pytest.fixture
def clock(monkeypatch, tmp_path):
    monkeypatch.setenv("LAZYFORMER_CACHE", str(tmp_path))
    found = Clock()
    monkeypatch.setattr(chosen, "time", found)
    found.taken = dict.fromkeys(ALL, 0.01)
    return found


def take(clock, choices=None, workload=CPU, consumers=1, possible=ALL):
    with mock.patch.object(choice, "CHOICES", choices or Choices()):
        return choice._fastest(workload, consumers, possible, clock.timed)


@pytest.mark.parametrize("fastest", ALL)
def test_the_fastest_is_taken_kept_and_not_timed_again(clock, caplog, fastest):
    caplog.set_level("INFO")
    clock.taken[fastest] = 0.002
    choices = Choices()
    assert take(clock, choices) == fastest
    assert f"blocks of 2, about 1 x 512 queries, 512 keys, 12 heads of 64: {fastest} 2 ms, " in caplog.text
    calls = clock.calls.total()
    similar = CPU._replace(time=500, keys=490)
    assert take(clock, choices, similar) == take(clock, choices) == fastest
    assert take(clock, Choices(), similar) == fastest  # another process
    assert clock.calls.total() == calls
    for other in ({"time": 1024}, {"keys": 1024}, {"batch": 2}, {"precision": torch.bfloat16}, {"has_dropout": True}):
        before = clock.calls.total()
        take(clock, Choices(), CPU._replace(**other))
        assert clock.calls.total() > before, other


def test_those_far_behind_are_called_twice_and_the_nearest_most_often(clock):
    clock.taken |= {"eager": 0.09, "fused": 0.012, "recompute": 0.0105}
    take(clock)
    calls = {"eager": 2, "materialize": 1 + ROUNDS_OF_NEAR, "recompute": 1 + ROUNDS_OF_NEAR, "fused": 1 + ROUNDS}
    assert clock.calls == calls


def test_what_takes_no_longer_than_choosing_is_not_timed(clock):
    tiny = CPU._replace(heads=2, time=64, keys=64, head_size=16)
    assert take(clock, workload=tiny) == unmeasured(tiny, 1, ALL) and not clock.calls


def test_a_training_times_for_two_seconds_and_a_twentieth_of_its_time(clock):
    """What it had no time for is left out; where that is all but one, another process times."""
    clock.taken = {name: SECONDS + 0.5 for name in ALL}
    choices = Choices()
    assert take(clock, choices) == "recompute" and clock.calls == {"recompute": 1}
    other = CPU._replace(time=1024)
    assert take(clock, choices, other) == take(clock, choices) == "recompute" and clock.calls.total() == 1
    assert not cache_file(FILE).exists()
    clock.now += 20 * SECONDS
    clock.taken["recompute"] = 1.5
    assert take(clock, choices, other) == "recompute" and clock.calls == {"recompute": 2, "materialize": 1}
    assert cache_file(FILE).exists()


@pytest.mark.parametrize("seconds", [0.9, pytest.param(20, id="20 on a GPU")])
def test_what_the_first_call_prepares_does_not_count(clock, monkeypatch, seconds):
    """oneDNN makes code for each shape, half a second of it, Triton longer: nobody is the slowest for that."""
    prepares = iter([seconds, seconds])
    if seconds > SECONDS:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        for does_nothing in ("synchronize", "current_device", "set_device"):
            monkeypatch.setattr(torch.cuda, does_nothing, mock.Mock())

    def timed(name):
        call = clock.timed(name)

        def after_preparing():
            clock.now += next(prepares, 0) if clock.calls[name] == 0 else 0
            return call()

        return after_preparing

    clock.taken = {"recompute": 0.06, "materialize": 0.03, "fused": 0.05, "eager": 0.04}
    with mock.patch.object(choice, "CHOICES", Choices()):
        assert choice._fastest(CPU, 1, ALL, timed) == "materialize"
        assert choice.CHOICES.pays("another shape", is_training=True, candidates=2)


def test_inference_times_when_that_is_a_twentieth_of_what_it_has_done(clock):
    choices, inference = Choices(), CPU._replace(is_training=False)
    clock.taken["fused"] = 0.001
    passes = len(ALL) * (1 + ROUNDS_OF_NEAR) / CPU.blocks * 20  # a call of each is that of a block
    found = [take(clock, choices, inference) for _ in range(math.ceil(passes) + 1)]
    assert found.index("fused") == math.floor(passes) and set(found[: math.floor(passes)]) == {"recompute"}
    bench = Choices()
    bench.at_once()
    cache_file(FILE).unlink()
    assert take(clock, bench, inference) == "fused"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (ValueError("no\nway"), "fused is left out here: no"),
        (torch.ones(3) * 1.01, "fused is left out here: it is off by 0.01 of what it should be"),
        (torch.ones(3) * math.nan, "fused is left out here: it is off by inf"),
    ],
)
def test_what_fails_or_computes_something_else_is_left_out(clock, caplog, output, said):
    clock.taken["fused"], clock.outputs["fused"] = 0.0001, output
    assert take(clock) in {"eager", "materialize", "recompute"} and said in caplog.text
    assert read_json(cache_file(FILE))
    if isinstance(output, torch.Tensor):  # where chance decides, outputs differ
        assert take(clock, workload=CPU._replace(has_dropout=True)) == "fused"


def test_if_none_can_be_timed_the_unmeasured_one_is_taken(clock, monkeypatch):
    clock.outputs = dict.fromkeys(ALL, ValueError("no"))
    assert take(clock) == unmeasured(CPU, 1, ALL) and not cache_file(FILE).exists()
    monkeypatch.setattr(choice, "_free_memory", lambda device: 0)
    clock.calls.clear()
    clock.outputs = {}
    take(clock)
    assert set(clock.calls) == {"recompute", "fused"}  # eager and materialize write n x n


def test_a_resumed_run_and_other_processes_take_what_was_chosen_on_such_a_machine(clock, monkeypatch, caplog):
    caplog.set_level("INFO")
    first, second = Choices(), Choices()
    clock.taken["fused"] = 0.002
    take(clock, first)
    cache_file(FILE).unlink()
    clock.calls.clear()
    second.measures = False  # not the first process
    assert take(clock, second) == "recompute"
    second.load_state_dict(first.state_dict())
    assert take(clock, second) == "fused" and not clock.calls
    monkeypatch.setattr(chosen, "machine", lambda device: "another one")
    third = Choices()
    third.load_state_dict(first.state_dict())
    take(clock, third)
    assert clock.calls and "this is another one, which chooses anew" in caplog.text


@of_each_kind
@pytest.mark.parametrize("is_training", [True, False])
def test_a_block_is_timed_without_a_trace(direction, s, is_training, monkeypatch):
    """On all back ends that can compute it: outputs and gradients agree, and no number of the run changes."""
    monkeypatch.setattr(choice, "WORTH_IT", 1)
    monkeypatch.setenv("LAZYFORMER_CACHE", "/nowhere")
    asked = []

    def choose_and_time(workload, consumers, possible, timed):
        asked.append((consumers, {name: timed(name)() for name in possible}))
        return "eager"

    network = build(direction, f"{s}fl", attention_backend="auto").train(is_training)
    expected = build(direction, f"{s}fl").train(is_training)
    monkeypatch.setattr(choice, "_fastest", choose_and_time)

    def run(model):
        ids = tokens()
        with torch.set_grad_enabled(is_training), torch.random.fork_rng():
            torch.manual_seed(2)
            return model(ids)[0], torch.get_rng_state()

    for found, right in zip(run(network), run(expected), strict=True):
        assert torch.equal(found, right)
    assert all(weight.grad is None for weight in network.parameters())
    ((consumers, outputs),) = asked
    assert consumers == 1
    reference = outputs.pop("eager")
    for name, found in outputs.items():
        assert chosen.difference(found, reference) < 1e-6, name


@pytest.mark.parametrize("pattern", ["sfkf", "sflf"])
def test_a_pass_takes_what_is_fastest(pattern, clock, monkeypatch):
    """The whole way: an encoder with a bias and padding, real sublayers; what is chosen computes the same."""
    monkeypatch.setattr(choice, "WORTH_IT", 1)
    monkeypatch.setattr(choice, "CHOICES", Choices())
    network = build("encoder", pattern, attention_backend="auto", relative_position_buckets=8)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[1, 7:] = True
    found = network(tokens(), padding)[0]
    (shapes,) = choice.CHOICES.known.values()
    assert len(shapes) == 1
    network.attention_backend = "eager"
    torch.testing.assert_close(found, network(tokens(), padding)[0])


def test_what_does_not_fit_into_memory_is_not_chosen(monkeypatch):
    monkeypatch.setattr(choice, "memory_of", lambda device: 2**36)
    possible = choice._possible(CPU, choice.BACKENDS)
    assert {"eager", "materialize"} <= set(possible) and "tiles" not in possible
    assert choice._possible(CPU._replace(batch=10_000), choice.BACKENDS) == ("recompute", "fused")
    # At inference a block's distribution is gone when the next one comes.
    batch = int(choice.SHARE_OF_MEMORY * 2**36 / (12 * 512 * 512 * 4) / 2)
    assert "materialize" not in choice._possible(CPU._replace(batch=batch), choice.BACKENDS)
    assert "materialize" in choice._possible(CPU._replace(batch=batch, is_training=False), choice.BACKENDS)


CUDA = {"device": "cuda"}
MASK = {"features": {"mask"}, "share": 0.125}
LONG = {"time": 2**18, "keys": 2**18}
HALF = {**CUDA, "precision": torch.float16, "features": {"bias"}}


@pytest.mark.parametrize(
    ("capability", "changes", "consumers", "expected"),
    [
        ((8, 0), {}, 1, "recompute"),
        ((8, 0), {"features": {"bias"}}, 1, "eager"),  # torch would write the distribution
        ((8, 0), {"features": {"bias"}, "is_training": False}, 1, "recompute"),
        ((8, 0), {"has_dropout": True}, 1, "eager"),
        ((8, 0), {"has_dropout": True}, 0, "recompute"),
        ((8, 0), {**CUDA, "has_dropout": True}, 1, "recompute"),
        # On a GPU a bias that learns goes through torch's kernel where that runs and fits.
        ((7, 0), HALF, 1, "recompute"),
        ((7, 0), {**HALF, "head_size": 60}, 1, "eager"),  # the memory-efficient kernel wants 16 bytes
        ((7, 0), {**HALF, "precision": torch.float32, "head_size": 60}, 1, "recompute"),
        ((7, 0), {**HALF, "precision": torch.bfloat16}, 1, "eager"),
        ((8, 0), {**HALF, "precision": torch.bfloat16}, 1, "recompute"),
        ((8, 0), {**HALF, "precision": torch.float64}, 1, "eager"),
        ((8, 0), {**HALF, "batch": 2048}, 1, "recompute"),  # the bias is that of one sequence
        ((8, 0), {**HALF, "batch": 2048, "features": {"bias", "padding"}}, 1, "fused"),
        ((7, 0), {**HALF, "has_dropout": True, "head_size": 60}, 1, "eager"),
        # What looks at some of the keys.
        ((8, 0), MASK, 1, "tiles"),  # where that leaves most out
        ((8, 0), {**MASK, "share": 0.8}, 1, "recompute"),
        ((8, 0), {**MASK, "time": 16, "keys": 16}, 1, "recompute"),
        ((8, 0), {**MASK, "time": 16, "keys": 16, "features": {"mask", "bias"}}, 1, "eager"),
        ((8, 0), {**MASK, "features": {"mask", "learned"}}, 1, "eager"),
        ((8, 0), {**MASK, "has_dropout": True}, 1, "tiles"),
        ((8, 0), {**MASK, "has_dropout": True, "share": 0.8}, 1, "eager"),
        ((8, 0), {**MASK, "share": 0.8, **LONG}, 1, "tiles"),  # no mask fits
        ((8, 0), {**MASK, **CUDA}, 0, "flex"),
        ((8, 0), {**MASK, **CUDA, "features": {"mask", "causal", "positions"}}, 0, "flex"),
        ((8, 0), {**MASK, **CUDA, "features": {"mask", "entmax"}}, 0, "tiles"),
        ((8, 0), {**MASK, **CUDA, "head_size": 48}, 0, "tiles"),  # of a size that not every torch has
        ((8, 0), {**MASK, **CUDA, "head_size": 256, "share": 0.9}, 0, "recompute"),
        ((8, 0), {**MASK, **CUDA, "features": {"mask", "causal", "positions"}, **LONG}, 0, "tiles"),
        ((8, 0), {**MASK, **CUDA, "has_dropout": True}, 0, "recompute"),
    ],
)
def test_what_is_taken_unmeasured(monkeypatch, capability, changes, consumers, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(choice, "memory_of", lambda device: 2**34 if device == "cuda" else 2**36)
    monkeypatch.setattr(back_ends, "has_triton", lambda: True)
    monkeypatch.setattr(choice, "CHOICES", Choices())
    monkeypatch.setattr(chosen, "machine", lambda device: device)
    workload = CPU._replace(**{**changes, "features": frozenset(changes.get("features", ()))})
    assert choose("auto", workload, consumers) == expected


@pytest.mark.parametrize("keys", [64, 1024])
def test_tritons_kernels_take_as_many_keys_as_queries(monkeypatch, keys):
    """Linformer's are fewer; the kernels would read beyond their end."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(choice, "memory_of", lambda device: 2**36)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(back_ends, "has_triton", lambda: True)
    monkeypatch.setattr(back_ends, "triton_kernels", lambda: "triton")
    for count, expected in ((512, "triton"), (keys, back_ends.KERNELS["blockwise"])):
        q, k = torch.empty(1, 2, 512, 4), torch.empty(1, 2, count, 4)
        assert BACK_ENDS["fused"].kernels(q, k, k, Scores(), 0.0, 0) == expected
        possible = choice._possible(CPU._replace(device="cuda", keys=count), choice.BACKENDS)
        assert ("fused" in possible) == (expected == "triton")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0), (7, 5), (7, 0)])
def test_what_cannot_run_is_not_chosen_and_below_8_0_not_to_be_had(monkeypatch, capability):
    monkeypatch.setattr(back_ends, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(choice, "memory_of", lambda device: 2**36)
    cuda = CPU._replace(device="cuda")
    assert "fused" not in choice._possible(cuda._replace(head_size=256), choice.BACKENDS)
    if capability >= (8, 0):
        assert "fused" in choice._possible(cuda, choice.BACKENDS) and choose("fused", cuda, 1) == "fused"
        masked = cuda._replace(features=frozenset(MASK["features"]), share=0.5)
        assert ["flex" in choice._possible(each, choice.BACKENDS) for each in (cuda, masked)] == [False, True]
        monkeypatch.setattr(back_ends, "has_triton", lambda: False)
        assert "fused" not in choice._possible(cuda, choice.BACKENDS)
        return
    assert "fused" not in choice._possible(cuda, choice.BACKENDS)
    with pytest.raises(UserError, match=f"has {capability[0]}.{capability[1]}: give auto or recompute"):
        choose("fused", cuda, 1)
    assert choose("fused", CPU, 1) == "fused" and "fused" in BACK_ENDS
