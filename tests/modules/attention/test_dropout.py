"""Attention dropout in tiles: against autograd through the same masks, written out; how masks are drawn."""

import functools

import pytest
import torch

from lazyformer_fairseq.measure.costs.latency import peak_memory
from lazyformer_fairseq.modules.attention import attend, tile_geometry, tiles
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.attention.weights import Dropout, Masks

RATE = 0.25
WINDOW = AttentionMask(((2, (Band(6, 6), Columns(2))),))
STRIDED = AttentionMask(((1, (Band(7, 0), Band(None, 0, dilation=8))), (1, (Band(3, 0, dilation=2),))))


@pytest.fixture
def in_small_pieces(monkeypatch):
    """Several stretches, and several pieces of each."""
    monkeypatch.setattr(tile_geometry, "TILE", 8)
    monkeypatch.setattr(tile_geometry, "STRETCH_ELEMENTS", 1000)
    for name in ("_stretches", "_count"):
        monkeypatch.setattr(tile_geometry, name, functools.lru_cache(getattr(tile_geometry, name).__wrapped__))


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


def masks_of(q, k, scores, layers: int) -> list[torch.Tensor]:
    """What each layer lets through, (B, N, T, K), zeros and scales: its output for one-hot values, over P."""
    one_hot = torch.eye(k.size(-2), dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    bare = scores.with_own(dropout=None)
    distribution = tiles.COMPUTING.attend_forward(q, k, one_hot, bare)[0]
    found = []
    for layer in range(layers):
        own = scores.with_own(dropout=scores.dropout.of([layer]))
        found.append(tiles.COMPUTING.attend_forward(q, k, one_hot, own)[0] / distribution.clamp(min=1e-30))
    return found


@pytest.mark.parametrize("consumers", [0, 2])
@pytest.mark.parametrize(
    ("mask", "is_causal", "parts"),
    [
        (WINDOW, False, {"padding"}),
        (STRIDED, True, {"bias"}),
        (WINDOW, False, {"entmax"}),
    ],
)
def test_outputs_and_gradients_are_those_of_the_same_masks_written_out(
    in_small_pieces, monkeypatch, mask, is_causal, parts, consumers
):
    torch.manual_seed(1)
    batch, heads, time, size = 2, 2, 40, 4
    scores, learned = Scores(mask=mask, is_causal=is_causal), []
    if "padding" in parts:
        scores = scores.with_padding(torch.arange(time) >= torch.tensor([[time], [29]]), True)
    if "bias" in parts:
        learned.append(leaf(6, heads))
        buckets = torch.randint(6, (2 * time - 1,))
        scores = scores.with_own(bucket_by_distance=buckets, table_KN=learned[0])
    if "entmax" in parts:
        learned.append((1.1 + 0.8 * torch.rand(heads, dtype=torch.double)).requires_grad_())
        scores = scores.with_own(exponent_N=learned[0])
    dropout = Dropout.draw(RATE, 1 + consumers)
    monkeypatch.setattr(Dropout, "draw", classmethod(lambda cls, rate, layers: dropout))
    q, k = leaf(batch, heads, time, size), leaf(batch, heads, time, size)
    values = [leaf(batch, heads, time, size) for _ in range(1 + consumers)]
    d_outputs = [torch.randn_like(value) for value in values]
    leaves = [q, k, *values, *learned]

    output, reusable = attend(q, k, values[0], scores, RATE, consumers, "tiles")
    outputs = [output, *(reusable.attend(value, RATE) for value in values[1:])]
    found = [*outputs, *torch.autograd.grad(outputs, leaves, d_outputs)]

    with torch.no_grad():
        masks = masks_of(q, k, scores.with_own(dropout=dropout), 1 + consumers)
    distribution = attend(q, k, values[0], scores, 0.0, 1, "eager")[1].probabilities
    expected = [(distribution * mask) @ value for mask, value in zip(masks, values, strict=True)]
    expected += torch.autograd.grad(expected, leaves, d_outputs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for mask in masks:
        shown = mask[distribution > 0]
        kept = (shown > 0).double().mean()
        assert abs(kept - (1 - RATE)) < 0.05
        torch.testing.assert_close(shown[shown > 0].mean() * (1 - RATE), torch.ones((), dtype=torch.double))
    assert not consumers or not torch.equal(masks[0], masks[1])


def test_an_unread_layer_leaves_the_masks_of_the_others(in_small_pieces):
    """The second of two consumers counts, the first does not: its gradients are as if nothing else were there."""
    q, k, v = (leaf(1, 2, 40, 4) for _ in range(3))
    scores = Scores(mask=WINDOW)
    found = []
    for uses_first in (False, True):
        torch.manual_seed(3)
        _, reusable = attend(q, k, v, scores, RATE, 2, "tiles")
        first, second = (reusable.attend(v, RATE) for _ in range(2))
        found.append(torch.autograd.grad(second.sum() + 0 * first.sum() if uses_first else second.sum(), [q, k, v]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_passes_draw_anew_and_repeat_with_the_seed(in_small_pieces):
    q, k, v = (leaf(1, 2, 40, 4) for _ in range(3))

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([attend(q, k, v, Scores(mask=WINDOW), RATE, 0, "tiles")[0] for _ in range(2)])

    assert torch.equal(run(1), run(1))
    first, second = run(1)
    assert not torch.equal(first, second) and not torch.equal(run(2)[0], first)


@pytest.mark.parametrize("rate", [0.0001, 0.1, 0.5, 1.0])
def test_masks_drop_their_share_of_entries_that_have_nothing_to_do_with_each_other(rate):
    dropout = Dropout.draw(rate, 2)
    one, other = (Masks(dropout, layer, torch.device("cpu")).draw((1000, 999)) for layer in range(2))
    for mask in (one, other, one == other, one[1:] == one[:-1]):
        dropped = mask.double().mean()
        is_pair = mask is not one and mask is not other
        expected = rate**2 + (1 - rate) ** 2 if is_pair else rate
        assert abs(dropped - expected) < 4e-3
    assert dropout.scale * max(1 - rate, 2**-16) == pytest.approx(1, rel=1e-3)


def test_memory_is_linear_in_the_length():
    taken = {}
    for time in (2048, 4096):
        q, k, v = (torch.randn(1, 2, time, 8, requires_grad=True) for _ in range(3))
        scores = Scores(mask=AttentionMask(((2, (Band(6, 6),)),)))

        def update(q=q, k=k, v=v, scores=scores):
            output, reusable = attend(q, k, v, scores, RATE, 1, "tiles")
            (output + reusable.attend(v, RATE)).sum().backward()

        taken[time] = peak_memory(update, "cpu")
    assert taken[4096] < 2.6 * taken[2048]
