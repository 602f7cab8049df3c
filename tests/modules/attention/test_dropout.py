"""Attention dropout in tiles: against autograd through the same masks, written out; how masks are drawn."""

import pytest
import torch
from masked_attention import Case, use_tiles

from lazyformer_fairseq.modules.attention import attend, tiles
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns
from lazyformer_fairseq.modules.attention.weights import PARTS, Dropout, Masks

RATE = 0.25
WINDOW = AttentionMask(((2, (Band(6, 6), Columns(2))),))
STRIDED = AttentionMask(((1, (Band(7, 0), Band(None, 0, dilation=8))), (1, (Band(3, 0, dilation=2),))))


@pytest.fixture
def in_small_pieces(monkeypatch):
    """Several segments, and several pieces of each."""
    use_tiles(monkeypatch, 8, 1000)


def masks_of(q, k, scores, layers: int) -> list[torch.Tensor]:
    """What each layer lets through, (B, N, T, K), zeros and scales: its output for one-hot values, over P."""
    one_hot = torch.eye(k.size(-2), dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    bare = scores.with_own(dropout=None)
    distribution = tiles.COMPUTING.attend_forward(q, k, one_hot, bare)[0]
    found = []
    for layer in range(layers):
        own = scores.with_own(dropout=scores.dropout._replace(seeds=scores.dropout.seeds[[layer]]))
        found.append(tiles.COMPUTING.attend_forward(q, k, one_hot, own)[0] / distribution.clamp(min=1e-30))
    return found


@pytest.mark.parametrize("consumers", [0, 2])
@pytest.mark.parametrize(
    ("mask", "is_causal", "parts"),
    [(WINDOW, False, {"right"}), (STRIDED, True, {"bias"}), (WINDOW, False, {"entmax"})],
)
def test_outputs_and_gradients_are_those_of_the_same_masks_written_out(
    in_small_pieces, monkeypatch, mask, is_causal, parts, consumers
):
    case = Case(mask, is_causal=is_causal, parts=parts, consumers=consumers)
    dropout = Dropout.draw(RATE, 1 + consumers)
    monkeypatch.setattr(Dropout, "draw", classmethod(lambda cls, rate, layers: dropout))
    with torch.no_grad():
        masks = masks_of(case.q, case.k, case.scores.with_own(dropout=dropout), 1 + consumers)
    distribution = attend(case.q, case.k, case.values[0], case.scores, 0.0, 1, "eager")[1].probabilities
    expected = [(distribution * mask) @ value for mask, value in zip(masks, case.values, strict=True)]
    torch.testing.assert_close(case.by("tiles", dropout=RATE), case.with_gradients(expected))
    for mask in masks:
        shown = mask[distribution > 0]
        kept = (shown > 0).double().mean()
        assert abs(kept - (1 - RATE)) < 0.05
        torch.testing.assert_close(shown[shown > 0].mean() * (1 - RATE), torch.ones((), dtype=torch.double))
    assert not consumers or not torch.equal(masks[0], masks[1])


def test_an_unread_layer_leaves_the_masks_of_the_others(in_small_pieces):
    """The second of two consumers counts, the first does not: its gradients are as if nothing else were there."""
    case, found = Case(WINDOW, 1), []
    for uses_first in (False, True):
        torch.manual_seed(3)
        _, reusable = attend(case.q, case.k, case.values[0], case.scores, RATE, 2, "tiles")
        first, second = (reusable.attend(case.values[0], RATE) for _ in range(2))
        loss = second.sum() + 0 * first.sum() if uses_first else second.sum()
        found.append(torch.autograd.grad(loss, [case.q, case.k, case.values[0]]))
    torch.testing.assert_close(*found)


def test_passes_draw_anew_and_repeat_with_the_seed(in_small_pieces):
    case = Case(WINDOW, 1, consumers=0)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.cat([case.by("tiles", with_gradients=False, dropout=RATE)[0] for _ in range(2)])

    assert torch.equal(run(1), run(1))
    first, second = run(1)
    assert not torch.equal(first, second) and not torch.equal(run(2)[0], first)


@pytest.mark.parametrize("rate", [0.0001, 0.1, 0.5, 1.0])
def test_masks_drop_their_share_of_entries_that_have_nothing_to_do_with_each_other(rate):
    dropout = Dropout.draw(rate, 2)
    drawn = dropout.parts / PARTS  # the rate of the masks
    one, other = (Masks(dropout, layer, torch.device("cpu")).draw((1000, 999)) for layer in range(2))
    for mask in (one, other, one == other, one[1:] == one[:-1]):
        dropped = mask.double().mean()
        is_pair = mask is not one and mask is not other
        expected = drawn**2 + (1 - drawn) ** 2 if is_pair else drawn
        assert abs(dropped - expected) <= 6 * (expected * (1 - expected) / mask.numel()) ** 0.5
    assert dropout.scale * max(1 - rate, 2**-16) == pytest.approx(1, rel=1e-3)
