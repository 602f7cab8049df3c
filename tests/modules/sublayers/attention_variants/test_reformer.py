"""Hashed attention against the sets and the softmax of its paper, position by position."""

import math
from unittest import mock

import pytest
import torch
from attention_by_einsum import BATCH, HEADS, SIZE, WIDTH, Attending, split
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny_networks import make_encoder, vectors
from torch import Tensor

from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.sublayers.attention_variants import reformer as hashed
from lazyformer_fairseq.modules.sublayers.attention_variants.reformer import buckets_of

LSH = "s[buckets=4,rounds=2,chunk=4]"


def seen_by_paper(buckets: Tensor, chunk: int, is_padding: Tensor) -> Tensor:
    """(B, N, K, K): the union over rounds of a query's sets, position by position (section 2)."""
    batch, heads, rounds, places = buckets.shape
    seen = torch.zeros(batch, heads, places, places, dtype=torch.bool)
    for b, n, r in torch.cartesian_prod(*map(torch.arange, (batch, heads, rounds))).tolist():
        found = [100 if is_padding[b, place] else buckets[b, n, r, place].item() for place in range(places)]
        order = sorted(range(places), key=lambda place: (found[place], place))
        chunk_of = {place: number // chunk for number, place in enumerate(order)}
        for i in range(places):
            for j in range(places):
                seen[b, n, i, j] |= found[i] == found[j] and abs(chunk_of[i] - chunk_of[j]) <= 1
    return seen


def probabilities_by_paper(vectors: Tensor, seen: Tensor) -> Tensor:
    """One softmax over the union; a query scores itself -1e5."""
    keys = vectors * torch.rsqrt(vectors.square().mean(-1, keepdim=True) + 1e-6) / math.sqrt(vectors.size(-1))
    scores = torch.einsum("bntd,bnkd->bntk", vectors, keys).masked_fill(~seen, -math.inf)
    return scores.masked_fill(torch.eye(seen.size(-1), dtype=torch.bool), -1e5).softmax(-1)


def made(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_same_gradients(found: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad((out * weights).sum(), leaves) for out in (found, expected)))


@hypothesis_settings(max_examples=15, deadline=None)
@given(*(st.integers(1, most) for most in (23, 5, 3, 6)), st.data())
def test_it_is_one_softmax_over_what_the_rounds_show(places, buckets, rounds, chunk, data):
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    is_padding = torch.arange(places) >= torch.tensor([[data.draw(st.integers(1, places))], [places]])
    found_buckets = torch.randint(0, buckets, (BATCH, HEADS, rounds, places))
    vectors, v, above = made(BATCH, HEADS, places, SIZE), made(BATCH, HEADS, places, 2), made(BATCH, HEADS, places, 2)
    output, distribution = hashed.attend(vectors, v, found_buckets, buckets, chunk, is_padding, 0.0)
    probabilities = probabilities_by_paper(vectors, seen_by_paper(found_buckets, chunk, is_padding))
    torch.testing.assert_close(distribution.probabilities, probabilities)
    found = torch.cat([output, distribution.attend(above, 0.0)], -1)
    assert_same_gradients(found, probabilities @ torch.cat([v, above], -1), [vectors, v, above])


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_token_that_meets_no_other_keeps_its_value_in_single_precision(rounds):
    """Each in a bucket of its own: all that it sees, in each round, is itself."""
    places = 12
    buckets = torch.arange(places).expand(1, 1, rounds, -1)
    vectors, v = torch.randn(1, 1, places, SIZE), torch.randn(1, 1, places, 2)
    output, _ = hashed.attend(vectors, v, buckets, places, 4, None, dropout=0.0)
    torch.testing.assert_close(output, v)


class Hashing(Attending):
    """Two sublayers that share the order and the weights of the ``s``."""

    buckets: Tensor
    chunk: int

    def projected(self, x_BKC: Tensor) -> list[Tensor]:
        """Vectors that are queries and keys, twice."""
        vectors, v = (split(part) for part in self.s.qkv_proj(x_BKC).chunk(2, -1))
        return [vectors, vectors, v]

    def scores(self, q: Tensor, k: Tensor, distances: Tensor) -> Tensor:
        return k

    def weigh(self, q: Tensor, scores: Tensor, distances: Tensor) -> Tensor:
        none = torch.zeros(BATCH, self.keys, dtype=torch.bool)
        seen = seen_by_paper(self.buckets, self.chunk, none if self.padding is None else self.padding)
        return probabilities_by_paper(scores, seen)


class TurnedHashing(Hashing):
    """Vectors are turned by their places (RoFormer, equation 13, of halves) where they meet."""

    def scores(self, q: Tensor, k: Tensor, distances: Tensor) -> Tensor:
        angles = torch.arange(self.keys)[:, None] * 100.0 ** -(torch.arange(SIZE // 2, dtype=torch.double) * 2 / SIZE)
        turned = torch.complex(*k.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize(
    "given",
    [
        {"time": 13},
        {"time": 13, "padding": torch.arange(13) >= torch.tensor([[9], [13]])},
        {"time": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_lazy_block_with_its_projections(given, is_turned):
    hashing = TurnedHashing(LSH.replace("]", ",rope=100]"), **given) if is_turned else Hashing(LSH, **given)
    hashing.modules.eval()  # draws the same each time
    with mock.patch.object(hashed, "attend", side_effect=hashed.attend) as attend:
        hashing.outputs()
    hashing.buckets = attend.call_args.args[2]
    hashing.chunk = attend.call_args.kwargs["chunk"]
    assert attend.call_args.kwargs["buckets"] == 4 and (hashing.buckets.size(2) == 2 or hashing.keys <= 4)
    hashing.assert_equations()


def test_buckets_are_the_nearest_of_the_rotated_directions():
    """h(x) = argmax([x R; -x R]), in a loop; lengths do not matter, and a vector's opposite has the opposite bucket."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 4)
    rotations = hashed.random_rotations(x, 2, 6, None)
    found = hashed.buckets_of(x, rotations)
    assert found.shape == (2, 3, 2, 9) and rotations.shape == (3, 4, 2, 3)
    for b, n, r, k in torch.cartesian_prod(*map(torch.arange, found.shape)).tolist():
        rotated = [sum(x[b, n, k, d] * rotations[n, d, r, h] for d in range(4)) for h in range(3)]
        assert found[b, n, r, k] == max(range(6), key=lambda h: (rotated + [-value for value in rotated])[h])
    assert torch.equal(hashed.buckets_of(5 * x, rotations), found)
    assert torch.equal(hashed.buckets_of(-x, rotations), (found + 3) % 6)


@pytest.mark.parametrize("settings", ["", ",rope=100"])
def test_the_same_content_has_the_same_buckets_wherever_it_stands(settings, monkeypatch):
    """Turns by place come after hashing."""
    found = []
    monkeypatch.setattr(hashed, "buckets_of", lambda *given: found.append(buckets_of(*given)) or found[-1])
    encoder = make_encoder(f"s[buckets=8,rounds=2,chunk=16{settings}]")
    text = vectors(2, 64)
    encoder(torch.cat([text, text], 1))
    (buckets,) = found
    assert torch.equal(buckets[..., :64], buckets[..., 64:]) and buckets.unique().numel() == 8


def test_training_draws_from_torchs_generator_and_evaluation_always_the_same():
    encoder = Encoder(LSH, 11, WIDTH, 20, HEADS, relative_position_buckets=0)
    tokens = torch.randint(4, 11, (BATCH, 20))
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(encoder(tokens)[0])
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    state = torch.random.get_rng_state()
    assert torch.equal(encoder.eval()(tokens)[0], encoder(tokens)[0])
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_half_precision(precision):
    torch.manual_seed(0)
    x = torch.randn(BATCH, HEADS, 30, SIZE)
    v, buckets = torch.randn(BATCH, HEADS, 30, SIZE), torch.randint(0, 4, (BATCH, HEADS, 2, 30))
    expected = hashed.attend(x, v, buckets, 4, 8, None, 0.0)[0]
    found = hashed.attend(x.to(precision), v.to(precision), buckets, 4, 8, None, 0.0)[0]
    assert found.dtype == precision
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
