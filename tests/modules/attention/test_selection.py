"""Which back end ``auto`` takes: the fastest where it runs, and in which order where nothing is timed."""

import pytest
import torch
from every_variant import build, of_each_row, tokens
from masked_attention import Case

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules import timing
from lazyformer_fairseq.modules.attention import AttentionInputs, attend, interface, selection
from lazyformer_fairseq.modules.attention.interface import AttentionCall
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band
from lazyformer_fairseq.modules.attention.selection import AUTO, BackEndSelector, Workload, check_back_end, fixed_order
from lazyformer_fairseq.modules.timing import Autotuner, difference

PLAIN = AttentionCall(batch=1, heads=12, time=512, keys=512, consumers=1)
CPU = Workload(PLAIN, "cpu", torch.float32, attentions=6)
NARROW = AttentionMask(((12, (Band(32, 32),)),))
WIDE = AttentionMask(((12, (Band(200, 200),)),))


@pytest.fixture
def selector(monkeypatch, tmp_path):
    """Nothing is known yet, here or in the cache folder."""
    monkeypatch.setenv("LAZYFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(selection, "SELECTOR", made := Autotuner())
    return made


def on(device="cpu", dtype=torch.float32, **parts):
    return Workload(PLAIN._replace(**parts), device, dtype, attentions=6)


@pytest.mark.parametrize(
    ("capability", "workload", "expected"),
    [
        ((8, 0), on(), ["materialize", "fused", "recompute", "eager"]),
        ((8, 0), on(consumers=0), ["recompute", "materialize", "fused", "eager"]),
        ((8, 0), on(is_training=False), ["recompute", "materialize", "fused", "eager"]),
        ((8, 0), on(has_bias=True), ["materialize", "fused", "eager"]),
        ((8, 0), on(has_bias=True, time=16, keys=16), ["eager"]),
        ((8, 0), on(time=16, keys=16), ["recompute", "materialize", "fused", "eager"]),
        ((8, 0), on(has_bias=True, is_training=False), ["recompute", "materialize", "fused", "eager"]),
        ((8, 0), on(dropout=0.1), ["eager", "recompute"]),
        ((8, 0), on(dropout=0.1, consumers=0), ["recompute", "eager"]),
        ((8, 0), on(has_entmax=True), ["eager"]),
        ((8, 0), on(has_dense=True, query_size=0), ["materialize", "fused", "eager"]),
        ((8, 0), on(mask=NARROW), ["materialize", "fused", "eager"]),
        ((8, 0), on(mask=NARROW, consumers=0), ["fused", "materialize", "eager"]),
        ((8, 0), on(mask=WIDE, consumers=0), ["recompute", "materialize", "fused", "eager"]),
        ((8, 0), on(mask=NARROW, dropout=0.1), ["eager", "recompute"]),
        ((8, 0), on("cuda"), ["recompute", "fused", "eager"]),
        ((7, 0), on("cuda"), ["recompute", "eager"]),
        ((8, 0), on("cuda", has_bias=True), ["fused", "recompute", "eager"]),
        ((7, 0), on("cuda", torch.float16, has_bias=True), ["recompute", "eager"]),
        ((7, 0), on("cuda", torch.bfloat16, has_bias=True), ["eager"]),  # torch would write the distribution
        ((8, 0), on("cuda", torch.float64, has_bias=True), ["eager"]),
        ((8, 0), on("cuda", has_bias=True, query_size=60, value_size=60), ["fused", "recompute", "eager"]),
        ((8, 0), on("cuda", torch.float16, has_bias=True, query_size=60, value_size=60), ["fused", "eager"]),
        ((8, 0), on("cuda", dropout=0.1), ["recompute", "eager"]),
        ((8, 0), on("cuda", is_causal=True, has_positions=True), ["recompute", "eager"]),
        ((8, 0), on("cuda", keys=64), ["recompute", "eager"]),
        ((8, 0), on("cuda", mask=NARROW), ["flex", "recompute", "eager"]),
        ((8, 0), on("cuda", mask=NARROW, query_size=48, value_size=48), ["recompute", "eager"]),
        ((7, 0), on("cuda", mask=NARROW), ["recompute", "eager"]),
        ((8, 0), on("cuda", mask=NARROW, has_entmax=True), ["eager"]),
    ],
)
def test_the_fixed_order(monkeypatch, capability, workload, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(interface, "has_triton", lambda: True)
    assert fixed_order(workload) == expected


def test_the_fixed_order_without_sizes_is_that_of_large_ones():
    assert fixed_order(on(time=16, keys=16, has_bias=True), knows_sizes=False)[0] == "materialize"


def test_what_does_not_fit_into_memory_is_not_selected(monkeypatch):
    monkeypatch.setattr(selection, "memory_of", lambda device: 2**36)

    def fitting(**parts):
        workload = on(**parts)
        return [name for name in fixed_order(workload) if selection._fits(name, workload)]

    assert fitting(batch=10_000) == ["fused", "recompute"]
    batch = int(selection.MEMORY_FRACTION * 2**36 / (12 * 512 * 512 * 4) / 2)
    assert "materialize" not in fitting(batch=batch)
    assert "materialize" in fitting(batch=batch, is_training=False), "there one distribution is gone before the next"
    assert "materialize" in fitting(batch=batch, mask=NARROW), "of which it keeps what the mask shows"


def test_a_selection_holds_for_sizes_near_its_own():
    similar = {on(time=time, keys=time).shape() for time in (500, 512, 540)}
    assert similar == {
        "training, float32, blocks of 2, about 1 x 512 queries, 512 keys, 12 heads of 64",
    }
    others = [{"time": 1024}, {"keys": 1024}, {"batch": 2}, {"dropout": 0.1}, {"mask": NARROW}, {"is_padded": True}]
    assert len({on(**other).shape() for other in others} | similar) == 1 + len(others)


def test_a_pass_takes_what_is_fastest_and_computes_it_alike_when_it_computes_it_again(selector, monkeypatch):
    monkeypatch.setattr(selection, "MIN_MULTIPLY_ADDS_TO_TIME", 1)
    selector.seconds = 60.0
    case = Case(parts={"bias", "right"}, consumers=2)
    given = AttentionInputs(case.q, case.k, case.values[0], case.scores, consumers=2)
    select = BackEndSelector(AUTO, attentions=1)
    name = select(given)
    ((shape, known),) = selector.known[timing.machine("cpu")].items()
    assert known == name and "bias" in shape
    selector.known.clear()
    assert select(given) == name and not selector.known
    assert torch.equal(attend(given, name)[0], case.by(name)[0])


@of_each_row
@pytest.mark.parametrize("is_training", [True, False])
def test_an_attention_is_timed_without_a_trace(direction, s, is_training, monkeypatch, selector):
    """On all back ends that can compute it: outputs and gradients agree, and no number of the run changes."""
    monkeypatch.setattr(selection, "MIN_MULTIPLY_ADDS_TO_TIME", 1)
    selector.time_at_once()
    asked = []

    def select_and_time(device, shape, names, prepare, largest_error):
        asked.append({name: prepare(name)() for name in {*names, "eager"}})
        return "eager"

    monkeypatch.setattr(selector, "select", select_and_time)
    network = build(direction, f"{s}fl", attention_backend="auto").train(is_training)
    expected = build(direction, f"{s}fl").train(is_training)

    def run(model):
        ids = tokens()
        with torch.set_grad_enabled(is_training), torch.random.fork_rng():
            torch.manual_seed(2)
            return model(ids)[0], torch.get_rng_state()

    for found, right in zip(run(network), run(expected), strict=True):
        torch.testing.assert_close(found, right, atol=1e-12, rtol=1e-9)
    assert all(weight.grad is None for weight in network.parameters())
    for outputs in asked:
        reference = outputs.pop("eager")
        for name, found in outputs.items():
            assert difference(found, reference) < 1e-6, name


def test_a_back_end_that_is_not_there_or_has_no_dropout_is_refused():
    with pytest.raises(UserError, match="--attention-backend tiles: choose from auto, eager, materialize, "):
        check_back_end("tiles", 0.0)
    for name in ("materialize", "fused", "flex"):
        check_back_end(name, 0.0)
        with pytest.raises(UserError, match=f"--attention-backend {name}: it does not support attention dropout; use"):
            check_back_end(name, 0.1)
    for name in ("auto", "eager", "recompute"):
        check_back_end(name, 0.1)
