"""torch's FlexAttention, unfused on a processor, against `eager` in float64: forward, consumers, all gradients."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from masked_attention import Case, masks
from packaging.version import Version
from tiny_networks import make_decoder, make_encoder, random_tokens, vectors
from torch.nn.attention import flex_attention as torchs

from lazyformer_fairseq.modules.attention import flex
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory

pytestmark = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.7"),
    reason="it is chosen with Triton 3.3, which torch 2.7 was the first to bring",
)


@pytest.fixture(autouse=True)
def on_a_processor(monkeypatch):
    """There torch computes it unfused, which the back end refuses."""
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)
    monkeypatch.setattr(flex.Flex, "why_not", lambda *given: None)


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


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**sizes)
def test_forward_and_readers(**given):
    case = Case(**given)
    torch.testing.assert_close(outputs(case, "flex"), outputs(case, "eager"), atol=1e-11, rtol=1e-9)


MIXED = AttentionMask(((1, (Band(6, 6), Columns(2))), (1, (Band(3, 3, 2), Band(None, None, block=8)))))


@pytest.mark.parametrize(
    ("parts", "is_causal", "extra"),
    [({"bias", "right", "given"}, False, 2), ({"bias", "positions", "right"}, True, 2)],
)
def test_gradients(parts, is_causal, extra, monkeypatch):
    """torch refuses gradients on a processor, although it computes them."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *given: None)
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False, raising=False)
    case = Case(MIXED, memory=20 if is_causal else 0, extra=extra, is_causal=is_causal, parts=parts)
    torch.testing.assert_close(case.by("flex"), case.by("eager"), atol=1e-11, rtol=1e-9)


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
            case = Case(mask, batch, time, parts={"right"}, consumers=0, seed=seed)
            with monkeypatch.context() as patch:
                patch.setattr(flex, "_is_compiled", lambda device: True)
                found = outputs(case, "flex")
            torch.testing.assert_close(found, outputs(case, "eager"), atol=1e-11, rtol=1e-9)
    assert len(graphs) <= 4


def test_within_a_compiled_model_it_is_part_of_the_graph():
    case = Case(MIXED, extra=2, parts={"bias", "right", "given"})
    found = torch.compile(lambda: outputs(case, "flex"), backend="eager", fullgraph=True)()
    torch.testing.assert_close(found, outputs(case, "eager"), atol=1e-11, rtol=1e-9)


@torch.no_grad()
def test_sublayers_with_the_same_mask_and_other_keys_have_block_masks_of_their_own():
    """Persistent vectors are more keys; without an `l` that reads it, an `s` leaves out memory beyond its reach."""
    found = {}
    for back_end in ("flex", "eager"):
        encoder = make_encoder("s[window=8,persistent=4] f s[window=8] f", attention_backend=back_end)
        decoder = make_decoder("s[window=8] f s[window=8] l f", mem_len=32, attention_backend=back_end)
        memory = StreamMemory()
        segments = [decoder(random_tokens(2, 32), memory)[0] for _ in range(2)]
        found[back_end] = [encoder(vectors(2, 40))[0], *segments]
    torch.testing.assert_close(found["flex"], found["eager"], atol=1e-11, rtol=1e-9)


@pytest.mark.slow
def test_compiled_for_a_processor(monkeypatch):
    """Where torch's compiler reads the lists of blocks; in single precision, forward alone.

    Sizes are constants: of many that vary, torch 2.13 writes C++ that names one wrongly (`cur_qSplitSize4`).
    """
    monkeypatch.setattr(flex, "_is_compiled", lambda device: True)
    mask = AttentionMask(((1, (Band(40, 40),)), (1, (Columns(0, 64, 3),))))
    case = Case(mask, time=400, parts={"bias", "right"})
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False), torch.no_grad():
        found = case.by("flex", with_gradients=False, dtype=torch.float32)
    expected = [part.float() for part in outputs(case, "eager")]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
