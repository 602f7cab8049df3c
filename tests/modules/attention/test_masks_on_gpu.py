"""Masks on a GPU, by ``flex`` compiled: against ``eager`` in float64, and its memory."""

import pytest
import torch

from lazyformer_fairseq.modules.attention import BACK_ENDS, attend
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.encoder import RelativePositionBias

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not BACK_ENDS["flex"].supports("cuda", frozenset(), 64),
    reason="no CUDA GPU of compute capability 8.0 or above with Triton",
)

HEADS, SIZE = 4, 64
MASKS = {
    "window": AttentionMask(((HEADS, (Band(100, 100),)),)),
    "strided": AttentionMask(((HEADS, (Band(31, 31), Band(None, None, dilation=32))),)),
    "fixed": AttentionMask(((2, (Band(None, None, block=64),)), (2, (Columns(1, 64, 8),)))),
}


class Case:
    """Inputs of an ``s`` and its one consumer, in the layout of a model."""

    def __init__(self, mask: str, time: int, added: str = "", padded: bool = False, memory: int = 0):
        torch.manual_seed(1)

        def rows(length: int) -> torch.Tensor:
            return torch.randn(2, length, HEADS, SIZE, device="cuda").transpose(1, 2)

        tokens = time + memory
        self.q, self.k, *self.values = rows(time), *(rows(tokens) for _ in range(3))
        self.d_outputs = [rows(time), rows(time)]
        self.scores = Scores(mask=MASKS[mask], is_causal=added == "positions")
        self.learned = {}
        if added == "bias":
            bias = RelativePositionBias(HEADS).cuda()(time)
            self.scores = self.scores.with_own(bucket_by_distance=bias.bucket_by_distance, far=bias.far)
            self.learned = {"table_KN": torch.randn(32, HEADS, device="cuda")}
        elif added == "positions":
            distances = torch.randn(HEADS, tokens + 1, SIZE, device="cuda")
            self.learned = {"position_queries_BNTD": rows(time) / SIZE**0.5, "distances_NKD": distances}
        if padded:
            lengths = torch.tensor([[tokens], [tokens // 3]], device="cuda")
            self.scores = self.scores.with_padding(torch.arange(tokens, device="cuda") >= lengths, True)

    def by(self, back_end: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """Outputs and gradients."""
        leaves = [self.q, self.k, *self.values, *self.learned.values()]
        leaves = [leaf.to(torch.bfloat16).to(dtype).requires_grad_() for leaf in leaves]
        q, k, first, second, *learned = leaves
        scores = self.scores.with_own(**dict(zip(self.learned, learned, strict=True)))
        output, reusable = attend(q, k, first, scores, 0.0, 1)
        outputs = [output, reusable.attend(second, 0.0)]
        return [*outputs, *torch.autograd.grad(outputs, leaves, [d.to(dtype) for d in self.d_outputs])]


def assert_no_worse_than_eager(case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
    """Both round: errors are no more than twice those of ``eager``."""
    ours, theirs, exact = case.by("flex", dtype), case.by("eager", dtype), case.by("eager", torch.double)
    for number, expected in enumerate(exact):
        found, others = ((tensors[number].double() - expected).norm() / expected.norm() for tensors in (ours, theirs))
        assert found < 2 * others + torch.finfo(dtype).eps, f"tensor {number}: {found:.1e} for eager's {others:.1e}"


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask: str):
    for time in (512, 700):
        assert_no_worse_than_eager(Case(mask, time, padded=time == 700))


def test_a_bias_that_learns():
    assert_no_worse_than_eager(Case("window", 600, "bias", padded=True))


def test_positions_over_memory():
    assert_no_worse_than_eager(Case("window", 384, "positions", memory=256))


def test_memory_of_a_window_is_linear():
    taken = {}
    for time in (8192, 16384):
        case = Case("window", time)
        case.by("flex", torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.by("flex", torch.bfloat16)
        taken[time] = torch.cuda.max_memory_allocated() - before
    assert taken[16384] < 2.3 * taken[8192]
