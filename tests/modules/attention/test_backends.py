"""Every back end against `eager` in float64, forward, consumers, all gradients; `eager` against the equations."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from every_variant import ON_A_CPU
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_attention import Case, assert_errors_like, masks, use_chunks
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.evaluation.costs.latency import peak_memory
from lazyformer_fairseq.modules.attention import AttentionInputs, attend, back_ends, blockwise, reused_memory
from lazyformer_fairseq.modules.attention.back_ends import aligned, attention_with_learned_bias
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns
from lazyformer_fairseq.modules.attention.scores import Scores

PARTS = ["bias", "positions", "right", "given"]
WINDOW = AttentionMask(((2, (Band(6, 6),)),))
STRIDED = AttentionMask(((2, (Band(7, 7), Band(None, None, dilation=8))),))
FIXED = AttentionMask(((2, (Band(None, None, block=8), Columns(0, 8, 2))),))
of_lazy_blocks = pytest.mark.parametrize("back_end", ["materialize", "fused"])


@pytest.mark.parametrize("back_end", [name for name in ON_A_CPU if name != "eager"])
@settings(max_examples=15, deadline=None)
@given(
    mask=st.none() | masks,
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    time=st.sampled_from([1, 2, 5, 17, 33, 40, 65]),
    size=st.sampled_from([1, 3, 8, 32]),
    memory=st.sampled_from([0, 0, 3, 20, 64]),
    extra=st.sampled_from([0, 0, 2]),
    is_causal=st.booleans(),
    parts=st.sets(st.sampled_from(PARTS), max_size=3),
    consumers=st.integers(0, 5),
    tile=st.sampled_from([4, 8, 64]),
    elements=st.sampled_from([1, 7, 40, 200, 5000, 2**20]),
    seed=st.integers(0, 1000),
)
def test_forward_readers_and_all_gradients(back_end, mask, memory, is_causal, parts, tile, elements, **given):
    if mask is None:  # what no network has
        parts = parts - {"given", "bias" if "positions" in parts else ""}
    case = Case(mask, memory=memory if is_causal else 0, is_causal=is_causal, parts=parts, **given)
    with pytest.MonkeyPatch.context() as patch:
        use_chunks(patch, tile, elements)
        try:
            found = case.by(back_end)
        except UserError:
            assert back_end == "materialize" and "given" in parts
            return
    torch.testing.assert_close(found, case.by("eager"), atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("back_end", "given"),
    [
        *((name, {"parts": {"bias", "right"}, "size": 32}) for name in ON_A_CPU),
        *(("fused", {"mask": mask, "parts": {"right"}}) for mask in (WINDOW, STRIDED, FIXED)),
        *(("materialize", {"mask": mask, "parts": {"right"}, "is_causal": True}) for mask in (WINDOW, STRIDED, FIXED)),
    ],
)
def test_in_low_precision_no_back_end_is_worse_than_rounding(back_end, given, dtype, monkeypatch):
    use_chunks(monkeypatch, 8, 20 * 40)  # half of the rows of a head
    narrow, exact = (Case(consumers=2, dtype=precision, **given) for precision in (dtype, torch.double))
    assert_errors_like(narrow.by(back_end), exact.by("eager"), 16 * torch.finfo(dtype).eps)


@of_lazy_blocks
def test_the_gradient_of_the_bias_is_the_same_each_time(back_end):
    case = Case(batch=3, time=50, size=8, parts={"bias", "right"}, consumers=2, dtype=torch.float32)
    for one, other in zip(case.by(back_end), case.by(back_end), strict=True):
        assert torch.equal(one, other)


@of_lazy_blocks
def test_a_graph_may_be_kept_run_twice_and_run_in_part(back_end):
    case = Case(time=9, parts={"bias"}, consumers=2)
    graphs = []
    for name in (back_end, "eager"):
        output, reusable = attend(AttentionInputs(case.q, case.k, case.values[0], case.scores, consumers=2), name)
        outputs = [output, *(reusable.attend(v, 0.0) for v in case.values[1:])]
        graphs.append([(part * d).sum() for part, d in zip(outputs, case.d_outputs, strict=True)])
    # An l alone, then all, then all again: nothing of one run is left for the next. One l is not in the loss, or the s.
    torch.autograd.grad(graphs[0][2], case.values[2], retain_graph=True)
    for counted in ((0, 1, 2), (0, 1, 2), (1, 2), (0, 2)):
        leaves = case.leaves if len(counted) == 3 else [case.q, case.k]
        losses = (sum(graph[number] for number in counted) for graph in graphs)
        torch.testing.assert_close(*(torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses))


@pytest.mark.slow
@pytest.mark.parametrize(("back_end", "biased"), [("fused", False), ("fused", True), ("recompute", False)])
def test_memory_grows_linearly_with_the_length(back_end, biased):
    """Twice the length takes twice the memory, where a distribution would take four times as much."""
    taken = {}
    for time, name in itertools.product((1024, 2048), (back_end, "eager")):
        case = Case(None, 1, time, parts={"bias"} if biased else set(), size=8, dtype=torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blockwise, "CHUNK_ELEMENTS", 64 * time)
            taken[time, name] = peak_memory(lambda case=case, name=name: case.by(name), "cpu")
    assert taken[2048, back_end] < 2.6 * taken[1024, back_end]
    assert taken[2048, "eager"] > 3 * taken[1024, "eager"]  # so the test can fail


@pytest.mark.parametrize("back_end", ON_A_CPU)
@pytest.mark.parametrize("biased", [False, True])
def test_which_kernel_runs(back_end, biased):
    """With a bias that learns, torch's attention would fall back to its unfused form: ours takes its place."""
    case = Case(time=64, size=32, parts={"bias"} if biased else set(), dtype=torch.float32)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        case.by(back_end)
    names = {event.key for event in recorded.key_averages()}
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    operators = {"materialize": "materialize", "fused": "blockwise"}
    ours = {name: f"lazyformer::{operator}_block_gradient" for name, operator in operators.items()}
    expected = {
        "eager": "aten::_softmax_backward_data",
        "recompute": ours["fused"] if biased else f"{flash}_backward",
        **ours,
    }
    assert expected[back_end] in names
    assert "aten::_scaled_dot_product_attention_math" not in names
    assert (flash in names) == (back_end == "recompute" and not biased)


def test_time_and_memory_of_a_window_are_linear():
    """FLOPs in place of time: they wait for no clock."""
    scores = Scores(mask=WINDOW)
    shapes = [torch.empty(1, 2, time, 8, device="meta") for time in (1024, 2048)]
    stored = [blockwise.Blockwise.stored_size(shape, shape, scores) for shape in shapes]
    assert stored[1] < 2.1 * stored[0]
    cases = [Case(WINDOW, 1, time, consumers=1, dtype=torch.float32) for time in (2048, 4096)]
    taken = [peak_memory(lambda case=case: case.by("fused"), "cpu") for case in cases]
    assert taken[1] < 2.6 * taken[0]


def test_a_query_that_sees_nothing_gets_zeros():
    """As in Sparse Transformer's summaries alone: before the first one there is none."""
    case = Case(AttentionMask(((1, (Columns(0, 8, 2),)),)), 1, 24, is_causal=True)
    output, reused, *gradients = case.by("fused")
    assert not output[:, :, :6].any() and not reused[:, :, :6].any() and output[:, :, 6:].all()
    assert all(gradient.isfinite().all() for gradient in gradients)


def biased(batch: int, time: int, size: int, padded: bool, **given) -> Case:
    return Case(None, batch, time, size=size, parts={"bias", "right"} if padded else {"bias"}, **given)


def test_memory_is_used_again_when_nothing_refers_to_it_and_that_of_inference_serves_training():
    reused_memory.give_back()
    like = torch.empty(0)
    with torch.inference_mode():
        reused_memory.empty((24,), like)
    first, second = reused_memory.empty((2, 3, 4), like), reused_memory.empty((2, 3, 4), like)
    assert first.is_contiguous() and not first.is_inference()
    addresses = {first.data_ptr(), second.data_ptr()}
    part_of_it = first[1:]
    del first
    assert reused_memory.empty((2, 3, 4), like).data_ptr() not in addresses  # a view still refers to the first
    del part_of_it
    assert reused_memory.empty((4, 3, 2), like).data_ptr() in addresses
    scratch = reused_memory.scratch("one", (3, 4), like)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(reused_memory.scratch, "one", (3, 4), like).result()
    assert theirs.data_ptr() != scratch.data_ptr() == reused_memory.scratch("one", (2, 2), like).data_ptr()
    reused_memory.give_back()


def of_all_values(case: Case, bias: torch.Tensor) -> list[torch.Tensor]:
    return case.with_gradients([attention_with_learned_bias(case.q, case.k, v, bias) for v in case.values])


@settings(max_examples=30)
@given(
    batch=st.integers(1, 5),
    heads=st.integers(1, 3),
    time=st.integers(1, 19),
    size=st.sampled_from([1, 8, 12]),
    padded=st.booleans(),
    sequences_at_once=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_forward_and_all_gradients_are_those_of_eager(batch, heads, time, size, padded, sequences_at_once, seed):
    case = biased(batch, time, size, padded, heads=heads, seed=seed)
    expected = case.by("eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(back_ends, "CHUNK_NUMBERS", sequences_at_once * heads * time * time)
        found = of_all_values(case, aligned(case.dense()))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


def test_no_kernel_is_allowed_that_has_no_gradient_for_the_bias(monkeypatch):
    """cuDNN's, which torch prefers on some GPUs; and the memory-efficient one where nothing but the bias learns."""
    allowed, case = [], biased(1, 8, 8, padded=False)
    kept = back_ends.sdpa_kernel
    monkeypatch.setattr(back_ends, "sdpa_kernel", lambda kernels: allowed.append(kernels) or kept(kernels))
    attention_with_learned_bias(case.q, case.k, case.values[0], case.dense())
    attention_with_learned_bias(case.q.detach(), case.k.detach(), case.values[0].detach(), case.dense())
    assert allowed == [[SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], [SDPBackend.MATH]]
