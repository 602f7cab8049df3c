"""Attention in tiles against `eager`, which writes the mask out, in float64: forward, consumers, all gradients."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_attention import Case, masks

from lazyformer_fairseq.measure.costs.latency import peak_memory
from lazyformer_fairseq.modules.attention import tile_geometry
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns
from lazyformer_fairseq.modules.attention.scores import Scores


def use_sizes(patch: pytest.MonkeyPatch, tile: int, elements: int) -> None:
    """Other sizes of tiles and stretches, which plans remember."""
    patch.setattr(tile_geometry, "TILE", tile)
    patch.setattr(tile_geometry, "STRETCH_ELEMENTS", elements)
    for name in ("_stretches", "_count"):
        patch.setattr(tile_geometry, name, functools.lru_cache(getattr(tile_geometry, name).__wrapped__))


parts = st.sets(st.sampled_from(["bias", "positions", "right", "anywhere", "given", "entmax"]), max_size=3)


@settings(max_examples=25, deadline=None)
@given(
    mask=masks,
    batch=st.integers(1, 3),
    time=st.sampled_from([1, 2, 5, 17, 40, 65, 100]),
    memory=st.sampled_from([0, 0, 3, 20, 64]),
    extra=st.sampled_from([0, 0, 2]),
    is_causal=st.booleans(),
    parts=parts,
    consumers=st.integers(0, 3),
    tile=st.sampled_from([4, 8, 64]),
    elements=st.sampled_from([1, 300, 5000, 2**21]),
    seed=st.integers(0, 1000),
)
def test_forward_readers_and_all_gradients(
    mask, batch, time, memory, extra, is_causal, parts, consumers, tile, elements, seed
):
    case = Case(mask, batch, time, memory if is_causal else 0, extra, is_causal, parts, consumers, seed)
    with pytest.MonkeyPatch.context() as patch:
        use_sizes(patch, tile, elements)
        found = case.by("tiles")
    for ours, theirs in zip(found, case.by("eager"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-6)


WINDOW = AttentionMask(((2, (Band(6, 6),)),))
STRIDED = AttentionMask(((2, (Band(7, 7), Band(None, None, dilation=8))),))
FIXED = AttentionMask(((2, (Band(None, None, block=8), Columns(0, 8, 2))),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [WINDOW, STRIDED, FIXED])
def test_in_low_precision(mask, is_causal, dtype, monkeypatch):
    use_sizes(monkeypatch, 8, 2**21)
    case = Case(mask, 2, 40, 0, 0, is_causal, {"right"}, 2, 1, dtype)
    exact = Case(mask, 2, 40, 0, 0, is_causal, {"right"}, 2, 1)
    for ours, theirs in zip(case.by("tiles"), exact.by("eager"), strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < 16 * torch.finfo(dtype).eps, error


DILATED = AttentionMask(((2, (Band(6, 6, dilation=2), Columns(2))),))


@pytest.mark.parametrize(
    ("mask", "consumers"),
    [(WINDOW, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((WINDOW, 0), (DILATED, 0), (DILATED, 1)))],
)
def test_time_and_memory_of_a_window_are_linear(mask, consumers):
    """FLOPs in place of time: they wait for no clock."""
    scores = Scores(mask=mask)
    flops = [tile_geometry.count((1, 2, time, 8), (1, 2, time, 8), scores) for time in (1024, 2048)]
    assert flops[1] == 2 * flops[0]
    taken = {}
    for time in (2048, 4096):
        case = Case(mask, 1, time, 0, 0, False, set(), consumers, 1, torch.float32)
        taken[time] = peak_memory(lambda case=case: case.by("tiles"), "cpu")
    assert taken[4096] < 2.6 * taken[2048]


def test_a_query_that_sees_nothing_gets_zeros():
    """As in Sparse Transformer's summaries alone: before the first one there is none."""
    mask = AttentionMask(((1, (Columns(0, 8, 2),)),))
    case = Case(mask, 1, 24, 0, 0, True, set(), 1, 1)
    output, reused, *gradients = case.by("tiles")
    assert not output[:, :, :6].any() and not reused[:, :, :6].any() and output[:, :, 6:].all()
    assert all(gradient.isfinite().all() for gradient in gradients)
