"""Back end ``fused`` on a GPU at real sizes: against ``eager`` in float64, and what memory it takes."""

import pytest
import torch
from torch import Tensor

from lazyformer_fairseq.modules.attention.back_ends import has_triton, runs_triton
from lazyformer_fairseq.modules.networks.encoder import Encoder, init_bert_weights

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not runs_triton("cuda"), reason="no CUDA GPU of compute capability 8.0 or above"
)

VOCABULARY, PADDING, HEADS = 1000, 1, 4
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def first_tiles(request, monkeypatch):
    """The first tiles of each list alone: each compilation takes seconds. Except where all are to be tried."""
    if "trial_of_tiles" not in request.fixturenames:
        from lazyformer_fairseq.modules.attention import triton_kernels

        choose = triton_kernels.tiles_for
        monkeypatch.setattr(triton_kernels, "tiles_for", lambda *arguments: choose(*arguments)[:1])


@pytest.fixture
def trial_of_tiles():
    """As in use: the fastest of the list."""


def build(pattern: str, head_size: int = 64, longest: int = 2048) -> Encoder:
    """With a relative bias that counts, and queries and keys that make distributions far from uniform."""
    torch.manual_seed(1)
    width = HEADS * head_size
    encoder = Encoder(pattern, VOCABULARY, width, 2 * width, HEADS, longest, PADDING)
    encoder.apply(init_bert_weights)
    torch.nn.init.normal_(encoder.relative_position_bias.table)
    for sublayer in encoder.sublayers:
        if hasattr(sublayer.inner, "qkv_proj"):
            torch.nn.init.normal_(sublayer.inner.qkv_proj.weight, std=1.5 * width**-0.5)
    return encoder.to(DEVICE)


def batch(time: int, padded: bool) -> tuple[Tensor, Tensor | None]:
    """(ids of two sequences, mask of padding or None)."""
    tokens = torch.randint(PADDING + 1, VOCABULARY, (2, time), device=DEVICE)
    if not padded:
        return tokens, None
    lengths = torch.tensor([[time], [max(1, time // 3)]], device=DEVICE)
    mask = torch.arange(time, device=DEVICE) >= lengths
    return tokens.masked_fill(mask, PADDING), mask


def run(encoder: Encoder, backend: str, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Features of the tokens, and gradients of all weights from a loss that weighs every feature differently."""
    encoder.attention_backend = backend
    encoder.zero_grad()
    features, _ = encoder(tokens, mask)
    if mask is not None:
        features = features.masked_fill(mask.unsqueeze(-1), 0)
    weights = torch.sin(torch.arange(features.numel(), device=DEVICE)).view_as(features)
    (features.float() * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in encoder.named_parameters()}
    return {name: found.detach().double() for name, found in {"features": features, **gradients}.items()}


def assert_no_worse_than_eager(encoder: Encoder, dtype: torch.dtype, tokens: Tensor, mask: Tensor | None) -> None:
    """Both have errors, from the precision: those of ``fused`` are no more than twice those of ``eager``."""
    encoder.to(dtype)
    fused, eager = (run(encoder, backend, tokens, mask) for backend in ("fused", "eager"))
    exact = run(encoder.double(), "eager", tokens, mask)
    for name, expected in exact.items():
        ours, theirs = ((found[name] - expected).norm() / expected.norm() for found in (fused, eager))
        slack = max(torch.finfo(dtype).eps, 1e-6)  # exp2 of a GPU is approximate
        assert ours < 2 * theirs + slack, f"{name}: {ours:.1e} where eager has {theirs:.1e}"


def test_triton_computes():
    assert has_triton()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("time", [2, 17, 128, 500, 512, 2048])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lazy_blocks_of_two(dtype: torch.dtype, time: int, padded: bool):
    assert_no_worse_than_eager(build("(sflf)x2"), dtype, *batch(time, padded))


@pytest.mark.usefixtures("trial_of_tiles")
@pytest.mark.parametrize("pattern", ["sf", "sflf"])
def test_the_trial_of_tiles_leaves_nothing_behind(pattern: str):
    assert_no_worse_than_eager(build(pattern), torch.bfloat16, *batch(512, padded=False))


@pytest.mark.parametrize("pattern", ["sf", "sflflf", "sflflflflflf"])
@pytest.mark.parametrize("head_size", [32, 48, 64, 128])
def test_layers_and_head_sizes(head_size: int, pattern: str):
    assert_no_worse_than_eager(build(pattern, head_size), torch.bfloat16, *batch(300, padded=True))


def test_single_precision():
    assert_no_worse_than_eager(build("sflf"), torch.float32, *batch(200, padded=True))


def test_the_gradient_of_the_bias_is_always_the_same():
    encoder = build("sflf").bfloat16()
    tokens, mask = batch(1000, padded=True)
    first, second = (run(encoder, "fused", tokens, mask)["relative_position_bias.table"] for _ in range(2))
    assert torch.equal(first, second)


def peak_memory(backend: str, time: int) -> int:
    """Bytes beyond the weights that one forward and backward pass needs at most."""
    encoder = build("sflf", longest=time).bfloat16()
    tokens = torch.randint(PADDING + 1, VOCABULARY, (1, time), device=DEVICE)
    run(encoder, backend, tokens)  # chooses tiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(encoder, backend, tokens)
    return torch.cuda.max_memory_allocated() - before


def test_memory_grows_linearly():
    assert peak_memory("fused", 8192) < 2.2 * peak_memory("fused", 4096)


def test_memory_of_eager_does_not():
    assert peak_memory("eager", 8192) > 3 * peak_memory("eager", 4096)
