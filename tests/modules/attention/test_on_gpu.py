"""Back ends on a GPU at real sizes: against ``eager`` in float64, which kernels run, what memory they take.

``fused`` by Triton's kernels, a bias that learns through torch's memory-efficient one, masks by ``flex`` compiled.
"""

from itertools import product
from typing import Any

import pytest
import torch
from masked_attention import Case, assert_errors_like
from torch.profiler import ProfilerActivity, profile

from lazyformer_fairseq.modules.attention import BACK_ENDS, AttentionCall, AttentionInputs, attend, back_ends
from lazyformer_fairseq.modules.attention.interface import has_triton, why_no_triton
from lazyformer_fairseq.modules.attention.masks import AttentionMask, Band, Columns
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.sublayers.attention_variants.rope import Rotation

DEVICE = "cuda"
HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU")
needs_triton = pytest.mark.skipif(
    not HAS_GPU or why_no_triton() is not None, reason="no GPU of compute capability 8.0 or above"
)
needs_flex = pytest.mark.skipif(
    not HAS_GPU or BACK_ENDS["flex"].why_not(AttentionCall(), DEVICE, torch.bfloat16) is not None,
    reason="no GPU of compute capability 8.0 or above with Triton",
)
HEADS = 4
MASKS = {
    "window": AttentionMask(((HEADS, (Band(100, 100),)),)),
    "strided": AttentionMask(((HEADS, (Band(31, 31), Band(None, None, dilation=32))),)),
    "fixed": AttentionMask(((2, (Band(None, None, block=64),)), (2, (Columns(1, 64, 8),)))),
}


@pytest.fixture(autouse=True)
def first_tiles(request, monkeypatch):
    """The first tiles of each list alone: each compilation takes seconds. Except where all are to be tried."""
    if "trial_of_tiles" not in request.fixturenames and has_triton():
        from lazyformer_fairseq.modules.attention import triton_kernels

        choose = triton_kernels.tiles_for
        monkeypatch.setattr(triton_kernels, "tiles_for", lambda *arguments: choose(*arguments)[:1])


@pytest.fixture
def trial_of_tiles():
    """As in use: the fastest of the list."""


def case_of(mask: str = "", padded: bool = False, biased: bool = True, dtype=torch.bfloat16, **given: Any) -> Case:
    """Of heads of 64; with a bias that counts."""
    parts = {*(["bias"] if biased else []), *(["right"] if padded else []), *given.pop("parts", ())}
    given = {"heads": HEADS, "size": 64, **given}
    return Case(MASKS.get(mask), parts=parts, dtype=dtype, device=DEVICE, **given)


def assert_no_worse_than_eager(back_end: str, case: Case) -> None:
    """Both round: errors are no more than twice those of ``eager``."""
    assert_errors_like(case.by(back_end), case.by("eager", dtype=torch.double), case.by("eager"))


def memory_of(back_end: str, case: Case) -> int:
    """Bytes beyond the inputs that one forward and backward pass needs at most."""
    case.by(back_end)  # chooses tiles, compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.by(back_end)
    return torch.cuda.max_memory_allocated() - before


@needs_triton
def test_triton_computes():
    assert has_triton()


@needs_triton
@pytest.mark.parametrize(
    "given",
    [
        *(
            {"time": time, "padded": padded, "dtype": dtype}
            for time, padded, dtype in product([2, 17, 128, 500, 512, 2048], [0, 1], [torch.float16, torch.bfloat16])
        ),
        *(
            {"time": 300, "padded": True, "size": size, "consumers": consumers}
            for size, consumers in product([32, 48, 64, 128], [0, 2, 5])
        ),
        {"time": 200, "padded": True, "dtype": torch.float32},
        *({"time": 300, "padded": padded, "biased": False} for padded in (False, True)),
    ],
    ids=str,
)
def test_lazy_blocks(given):
    assert_no_worse_than_eager("fused", case_of(**given))


@needs_triton
@pytest.mark.parametrize("more", [-200, 200])
def test_fewer_and_more_keys_than_queries(more):
    assert_no_worse_than_eager("fused", case_of(time=300, memory=more, biased=False))


@needs_triton
@pytest.mark.usefixtures("trial_of_tiles")  # the descriptors are chosen here
@pytest.mark.parametrize(
    "given",
    [
        *(
            {"time": time, "padded": padded, "biased": biased}
            for time, padded, biased in product([77, 512], [0, 1], [0, 1])
        ),
        *({"time": 300, "size": size, "consumers": consumers} for size, consumers in product([48, 64, 128], [0, 1])),
    ],
    ids=str,
)
def test_tensor_descriptors(given, monkeypatch):
    """The first and the last tiles with descriptors."""
    from lazyformer_fairseq.modules.attention import triton_kernels

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no GPU of compute capability 9.0 or above")
    choose = triton_kernels.tiles_for
    case = case_of(**given)
    for last in (False, True):

        def described(*arguments, last=last):
            tiles = [choice for choice in choose(*arguments) if choice.descriptors]
            return (tiles[-last],)

        monkeypatch.setattr(triton_kernels, "tiles_for", described)
        assert_no_worse_than_eager("fused", case)


@needs_triton
@pytest.mark.usefixtures("trial_of_tiles")
@pytest.mark.parametrize("consumers", [0, 1])
def test_the_trial_of_tiles_leaves_nothing_behind(consumers):
    assert_no_worse_than_eager("fused", case_of(time=512, consumers=consumers))


@needs_triton
def test_the_gradient_of_the_bias_is_always_the_same():
    case = case_of(time=1000, padded=True)
    assert torch.equal(case.by("fused")[-1], case.by("fused")[-1])


@needs_triton
def test_memory_of_fused_grows_linearly_and_that_of_eager_does_not():
    cases = [case_of(batch=1, time=time) for time in (4096, 8192)]
    (fused, of_twice), (eager, of_twice_eager) = (
        [memory_of(name, case) for case in cases] for name in ("fused", "eager")
    )
    assert of_twice < 2.2 * fused and of_twice_eager > 3 * eager


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("time", [64, 77])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_memory_efficient_kernel_runs_both_ways(dtype, time, padded, dropout):
    case = case_of(batch=3, time=time, padded=padded, dtype=dtype)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        case.by("recompute", dropout=dropout)
        torch.cuda.synchronize()
    names = {event.key for event in recorded.key_averages()}
    assert "aten::_scaled_dot_product_efficient_attention" in names
    assert "aten::_scaled_dot_product_efficient_attention_backward" in names
    assert "aten::_scaled_dot_product_attention_math" not in names
    assert any("fmha_cutlassF" in name for name in names) and any("fmha_cutlassB" in name for name in names)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("time", [8, 77, 512])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_recompute_is_no_worse_than_eager(dtype, time, padded):
    assert_no_worse_than_eager("recompute", case_of(batch=3, time=time, padded=padded, dtype=dtype))


def test_each_sublayer_drops_others():
    """Keys that all score alike, and values that tell which of them were kept."""
    time = 256
    q = torch.zeros(1, 1, time, time, device=DEVICE, dtype=torch.float16, requires_grad=True)
    bias = torch.zeros(1, 1, time, time, device=DEVICE, dtype=torch.float16, requires_grad=True)
    v = torch.eye(time, device=DEVICE, dtype=torch.float16).expand(1, 1, time, time)
    output, reusable = attend(AttentionInputs(q, q, v, Scores(learned_BNTK=bias), 0.5, 1), "recompute")
    first, second = (found != 0 for found in (output, reusable.attend(v, 0.5)))
    assert 0.4 < first.float().mean() < 0.6
    assert 0.4 < (first != second).float().mean() < 0.6


def test_the_gradient_of_the_bias_takes_one_piece(monkeypatch):
    taken = {}
    for at_once in (1, 8):
        monkeypatch.setattr(back_ends, "CHUNK_NUMBERS", at_once * 4 * 512 * 512)
        taken[at_once] = memory_of("recompute", case_of(batch=8, time=512, dtype=torch.float16))
    assert taken[8] - taken[1] > 6 * 4 * 512 * 512 * 2


@needs_flex
@pytest.mark.parametrize(
    "given",
    [
        *({"mask": mask, "time": 512, "biased": False} for mask in MASKS),
        *({"mask": mask, "time": 700, "biased": False, "padded": True} for mask in MASKS),
        {"mask": "window", "time": 600, "padded": True},
        {"mask": "window", "time": 384, "memory": 256, "biased": False, "is_causal": True, "parts": {"positions"}},
    ],
    ids=str,
)
def test_masks(given):
    assert_no_worse_than_eager("flex", case_of(**given))


@needs_flex
def test_memory_of_a_window_is_linear():
    taken = [memory_of("flex", case_of("window", time=time, biased=False)) for time in (8192, 16384)]
    assert taken[1] < 2.3 * taken[0]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_rotated_as_on_the_cpu(dtype: torch.dtype):
    """At positions up to 8,191, with the gradient; angles are in single precision on both."""
    rotation = Rotation(base=10_000)
    projected = torch.randn(2, 8192, 3 * HEADS * 64, dtype=dtype)

    def rotated_and_gradient(device: str) -> list[torch.Tensor]:
        x = projected.to(device).unflatten(-1, (3 * HEADS, 64)).transpose(1, 2)[:, :HEADS].requires_grad_()
        rotated = rotation(x, Scores(), keys=8192)
        (gradient,) = torch.autograd.grad(rotated.float().square().sum(), x)
        return [rotated.cpu(), gradient.cpu()]

    bound = 2e-3 if dtype == torch.float32 else 4e-2  # an angle of 8,191 is exact to 5e-4
    for found, wanted in zip(rotated_and_gradient(DEVICE), rotated_and_gradient("cpu"), strict=True):
        assert (found - wanted).abs().max() <= bound * wanted.abs().max()
