"""torch's FlexAttention, unfused on a processor, against `eager` in float64: forward, consumers, all gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_attention import Case, masks
from packaging.version import Version
from torch.nn.attention import flex_attention as torchs

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention import flex
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns

pytestmark = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.7"),
    reason="it is chosen with Triton 3.3, which torch 2.7 was the first to bring",
)

sizes = dict(
    mask=masks,
    batch=st.integers(1, 3),
    time=st.sampled_from([1, 2, 17, 40, 100]),
    memory=st.sampled_from([0, 3, 20]),
    extra=st.sampled_from([0, 0, 2]),
    is_causal=st.booleans(),
    parts=st.sets(st.sampled_from(["bias", "positions", "right", "given"]), max_size=3),
    seed=st.integers(0, 1000),
)


def outputs(case: Case, back_end: str) -> list[torch.Tensor]:
    return case.by(back_end, with_gradients=False)


@settings(max_examples=12, deadline=None)
@given(**sizes)
def test_forward_and_readers(**given):
    case = Case(**given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
        found = outputs(case, "flex")
    torch.testing.assert_close(found, outputs(case, "eager"), atol=1e-11, rtol=1e-9)


MIXED = AttentionMask(((1, (Band(6, 6), Columns(2))), (1, (Band(3, 3, 2), Band(None, None, block=8)))))


@pytest.mark.parametrize(
    ("parts", "is_causal", "extra"),
    [({"bias", "right", "given"}, False, 2), ({"bias"}, True, 0), ({"bias", "positions", "right"}, True, 2)],
)
def test_gradients(parts, is_causal, extra, monkeypatch):
    """torch refuses gradients on a processor, although it computes them."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *given: None)
    case = Case(MIXED, memory=20 if is_causal else 0, extra=extra, is_causal=is_causal, parts=parts)
    torch.testing.assert_close(case.by("flex"), case.by("eager"), atol=1e-11, rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(block=st.sampled_from([4, 8, 16]), **sizes)
def test_blocks_that_torch_computes_are_those_with_a_pair_to_see(block, **given):
    case = Case(**given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", block)
        flex._plan.cache_clear()
        mask = flex.FlexAttention(case.q, case.k, case.scores).block_mask
        flex._plan.cache_clear()
    time, keys = case.q.size(2), case.k.size(2)
    added = case.scores.with_own(table_KN=None, position_queries_BNTD=None).dense(time, keys, case.q)
    seen = (added > -torch.inf).expand(*case.q.shape[:3], -1)
    padded = torch.nn.functional.pad(seen, (0, -keys % block, 0, -time % block))
    by_block = padded.unflatten(3, (-1, block)).unflatten(2, (-1, block)).transpose(3, 4)
    shown, whole = by_block.any(-1).any(-1), by_block.all(-1).all(-1)
    partial, full = (
        torchs.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block).to_dense().bool()
        for lists in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    )
    for never in (partial & full, full & ~whole, shown & ~(partial | full)):
        assert not never.any()
    if case.scores.features.isdisjoint({"padding"}) and case.scores.seen_BK is None:
        assert torch.equal((partial | full).expand_as(shown), shown)


def test_sublayers_share_one_block_mask():
    case = Case(MIXED, parts={"right"})
    first, second = (flex.FlexAttention(case.q, case.k, case.scores.with_own()).block_mask for _ in range(2))
    assert first is second
    other = flex.FlexAttention(case.q, case.k, Case(MIXED, parts={"right"}, seed=2).scores).block_mask
    assert other is not first


@pytest.mark.slow
def test_lengths_that_change_do_not_compile_each_time(monkeypatch):
    """Of one combination of features: once as it comes, once for sizes that vary, once for a single block."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, fullgraph: compile_it(f, fullgraph=fullgraph, backend=count))
    for seed, (batch, time) in enumerate([(2, 150), (3, 170), (5, 300), (2, 127)]):
        for mask in (MIXED, AttentionMask(((1, (Band(9, 4), Columns(1))), (1, (Band(1, 1), Band(2, 2)))))):
            case = Case(mask, batch, time, parts={"right"}, seed=seed)
            with monkeypatch.context() as patch:
                patch.setattr(flex, "_is_compiled", lambda device: True)
                found = outputs(case, "flex")
            torch.testing.assert_close(found, outputs(case, "eager"), atol=1e-11, rtol=1e-9)
    assert len(graphs) <= 4


def test_within_a_compiled_model_it_is_part_of_the_graph():
    case = Case(MIXED, extra=2, parts={"bias", "right", "given"})
    found = torch.compile(lambda: outputs(case, "flex"), backend="eager", fullgraph=True)()
    torch.testing.assert_close(found, outputs(case, "eager"), atol=1e-11, rtol=1e-9)


@pytest.mark.skipif(Version(torch.__version__) < Version("2.11"), reason="torch 2.10 trains with it on a processor")
def test_training_on_a_processor_is_refused_in_words():
    with pytest.raises(UserError, match=r"--attention-backend flex: .* on this device \(cpu\); give auto"):
        Case(MIXED, 1, 5).by("flex")


@pytest.mark.slow
def test_compiled_for_a_processor(monkeypatch):
    """Where torch's compiler reads the lists of blocks; in single precision, forward alone.

    Sizes are constants: of many that vary, torch 2.13 writes C++ that names one wrongly (`cur_qSplitSize4`).
    """
    monkeypatch.setattr(flex, "_is_compiled", lambda device: True)
    monkeypatch.setattr(torch._dynamo.config, "automatic_dynamic_shapes", False)
    mask = AttentionMask(((1, (Band(40, 40),)), (1, (Columns(0, 64, 3),))))
    case = Case(mask, time=400, parts={"bias", "right"})
    with torch.no_grad():
        found = case.by("flex", with_gradients=False, dtype=torch.float32)
    expected = [part.float() for part in outputs(case, "eager")]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
