"""All-attention: learned keys and values, against the paper's equations and x-transformers' memory keys."""

import math

import pytest
import torch
from attention_by_einsum import BATCH, HEADS, RIGHT, SIZE, WIDTH, Attending, assert_same, padded_and_with_memory
from torch import Tensor, nn

from lazyformer_fairseq.modules.networks.encoder import Encoder

VECTORS = 5


class WithVectors(Attending):
    """One softmax over tokens and vectors; keys times sqrt(D), values times sqrt(m) (section 4)."""

    def weigh(self, q: Tensor, scores: Tensor, distances: Tensor) -> Tensor:
        keys = self.s.choices["persistent"].keys * math.sqrt(SIZE)
        to_vectors = torch.einsum("bntd,nmd->bntm", q, keys) / math.sqrt(SIZE)
        return torch.cat([scores, to_vectors], -1).softmax(-1)

    def make_values(self, maker: nn.Module, values: Tensor) -> Tensor:
        vectors = maker.values * math.sqrt(VECTORS)
        return torch.cat([values, vectors.expand(BATCH, -1, -1, -1)], 2)


@padded_and_with_memory
@pytest.mark.parametrize("back_end", ["eager", "recompute", "tiles"])
def test_it_is_the_papers(given, back_end):
    attending = WithVectors(f"s[persistent={VECTORS}]", **given, back_end=back_end)
    expected = attending.with_gradients(attending.expected(attending.weigh))
    assert_same(attending.with_gradients(attending.outputs()), expected)


@pytest.mark.parametrize("padding", [None, RIGHT])
def test_it_is_x_transformers_memory(padding):
    package = pytest.importorskip("x_transformers.x_transformers", reason="x-transformers is not installed")
    theirs = package.Attention(WIDTH, dim_head=SIZE, heads=HEADS, num_mem_kv=VECTORS).double()
    ours = Attending(f"s[persistent={VECTORS}]", 7, padding=padding)
    with torch.no_grad():
        q, k, v = ours.s.qkv_proj.weight.chunk(3)
        for weight, value in ((theirs.to_q, q), (theirs.to_k, k), (theirs.to_v, v), (theirs.to_out, ours.s.out_proj)):
            weight.weight.copy_(value if isinstance(value, Tensor) else value.weight)
        ours.s.qkv_proj.bias.zero_()
        ours.s.out_proj.bias.zero_()
        theirs.mem_k.copy_(ours.s.choices["persistent"].keys * math.sqrt(SIZE))
        theirs.mem_v.copy_(ours.s.value_makers["persistent"].values * math.sqrt(VECTORS))
    found = theirs(ours.x, mask=None if padding is None else ~padding)
    is_text = torch.ones(BATCH, 7, dtype=torch.bool) if padding is None else ~padding  # theirs has zeros at padding
    # Its softmax is in single precision.
    torch.testing.assert_close(ours.outputs()[0][is_text], found[is_text], atol=1e-5, rtol=1e-5)


def test_keys_and_values_start_with_a_variance_of_one():
    """As in the published code: the weights are smaller, and multiplied by the root of D or m."""
    torch.manual_seed(1)
    attention = Encoder("s[persistent=512]", None, 256, 8, 8).sublayers[0].inner
    keys = attention.choices["persistent"].keys.detach()
    values = attention.value_makers["persistent"].values.detach()
    assert keys.std() * math.sqrt(32) == pytest.approx(1, abs=0.02)
    assert values.std() * math.sqrt(512) == pytest.approx(1, abs=0.02)
    assert keys.shape == values.shape == (8, 512, 32)


def test_an_l_has_values_of_its_own():
    attending = WithVectors(f"s[persistent={VECTORS}]", 3)
    assert attending.l.value_makers["persistent"].values is not attending.s.value_makers["persistent"].values
    counts = [sum(p.numel() for p in part.parameters()) for part in (attending.s, attending.l)]
    assert counts == [4 * (WIDTH**2 + WIDTH) + 2 * VECTORS * WIDTH, 2 * (WIDTH**2 + WIDTH) + VECTORS * WIDTH]


@pytest.mark.parametrize("letter", ["s[window=2,persistent=5]", "s[span=3,ramp=2,persistent=5]"])
def test_vectors_are_seen_from_everywhere(letter):
    """With a narrow mask too, and where a query sees nothing else."""
    attending = Attending(letter, 7, padding=torch.arange(7) >= torch.tensor([[1], [7]]), biased=True)
    output, handed_on = attending.s(attending.x, {}, attending.context())
    probabilities = handed_on["distribution"].probabilities
    assert (probabilities[..., 7:] > 0).all()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(BATCH, HEADS, 7, dtype=torch.double))
    assert (probabilities[0, :, 5, :7] == 0).all() and output.isfinite().all()
