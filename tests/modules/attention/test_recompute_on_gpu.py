"""A bias that learns through torch's memory-efficient kernel, on a GPU."""

import pytest
import torch
from attention_with_bias import BiasedAttention
from torch.profiler import ProfilerActivity, profile

from lazyformer_fairseq.modules.attention import attend, back_ends
from lazyformer_fairseq.modules.attention.scores import Scores

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def kernels_of(run) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    return {event.key for event in recorded.key_averages()}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("time", [64, 77])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_memory_efficient_kernel_runs_both_ways(dtype, time, padded, dropout):
    inputs = BiasedAttention(3, 4, time, 64, padded, device="cuda", dtype=dtype)
    names = kernels_of(lambda: inputs.by("recompute", dropout))
    assert "aten::_scaled_dot_product_efficient_attention" in names
    assert "aten::_scaled_dot_product_efficient_attention_backward" in names
    assert "aten::_scaled_dot_product_attention_math" not in names
    assert any("fmha_cutlassF" in name for name in names) and any("fmha_cutlassB" in name for name in names)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("time", [8, 77, 512])
def test_it_is_no_worse_than_eager(time, padded):
    for dtype in (torch.float16, torch.float32):
        inputs = BiasedAttention(3, 4, time, 64, padded, device="cuda", dtype=dtype)
        exact = BiasedAttention(3, 4, time, 64, padded, device="cuda")
        for name in ("q", "k", "v", "table", "weight"):
            getattr(exact, name).data.copy_(getattr(inputs, name))
        exact.scores.lengths_B = inputs.scores.lengths_B
        for ours, theirs, expected in zip(inputs.by("recompute"), inputs.by("eager"), exact.by("eager"), strict=True):
            error, allowed = ((found.double() - expected).norm() / expected.norm() for found in (ours, theirs))
            assert error < 2 * allowed + torch.finfo(dtype).eps


def test_each_sublayer_drops_others():
    """Keys that all score alike, and values that tell which of them were kept."""
    time = 256
    q = torch.zeros(1, 1, time, time, device="cuda", dtype=torch.float16, requires_grad=True)
    bias = torch.zeros(1, 1, time, time, device="cuda", dtype=torch.float16, requires_grad=True)
    v = torch.eye(time, device="cuda", dtype=torch.float16).expand(1, 1, time, time)
    output, reusable = attend(q, q, v, Scores(learned_BNTK=bias), 0.5, 1, "recompute")
    first, second = (found != 0 for found in (output, reusable.attend(v, 0.5)))
    assert 0.4 < first.float().mean() < 0.6
    assert 0.4 < (first != second).float().mean() < 0.6


def test_the_gradient_of_the_bias_takes_one_piece(monkeypatch):
    taken = {}
    for at_once in (1, 8):
        inputs = BiasedAttention(8, 4, 512, 64, padded=False, device="cuda", dtype=torch.float16)
        monkeypatch.setattr(back_ends, "PIECE_NUMBERS", at_once * 4 * 512 * 512)
        inputs.by("recompute")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        inputs.by("recompute")
        taken[at_once] = torch.cuda.max_memory_allocated() - before
    assert taken[8] - taken[1] > 6 * 4 * 512 * 512 * 2
