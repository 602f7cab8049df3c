"""Norm of queries and keys, and rotary positions, by the equations of their papers."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from attention_by_einsum import BATCH, SIZE, Attending, padded_and_with_memory
from every_variant import ON_A_CPU, TOKENS, assert_alike, build, run, tokens
from tiny_networks import loud
from torch import Tensor, nn

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention_variants import rope
from lazyformer_fairseq.modules.sublayers.attention_variants.rope import Rotation
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER

BASE = 100


class Turned(Attending):
    """Re sum_i q_i k_i* exp(sqrt(-1) m b^(-2 i / D)), m from key to query, of halves as complex numbers (equation 13).

    Attributes:
        window: keys further away are not seen.
    """

    window = math.inf

    def scores(self, q: Tensor, k: Tensor, distances: Tensor, sublayer: nn.Module | None = None) -> Tensor:
        angles = distances[..., None].double() * BASE ** -(torch.arange(SIZE // 2, dtype=torch.double) * 2 / SIZE)
        q, k = (torch.complex(*each.chunk(2, -1)) for each in (q, k))
        turns = torch.polar(torch.ones_like(angles), angles)
        scores = torch.einsum("bntd,bnkd,tkd->bntk", q, k.conj(), turns).real / math.sqrt(SIZE)
        scores = scores.masked_fill(distances.abs() > self.window, -math.inf)
        return self.causal(scores, distances) if self.is_causal else self.biased_and_padded(scores, distances)


class Normed(Attending):
    """x / sqrt(mean(x^2) + 1e-6) times a gain, of queries and of keys, before anything is added or turned."""

    def projected(self, x_BKC: Tensor) -> list[Tensor]:
        q, k, v = super().projected(x_BKC)
        return [self.normed(q, self.s.query_makers), self.normed(k, self.s.key_makers), v]

    def normed(self, x: Tensor, makers: nn.ModuleDict) -> Tensor:
        return x * makers["qk_norm"].weight / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class NormedAndTurned(Normed, Turned):
    """A norm, then the turn."""


class WithVectors(Attending):
    """Beside tokens' keys those of persistent vectors, which have no place: all-attention, section 4.

    They meet the queries that :meth:`projected` has, before anything is turned, and are normed like keys of tokens.
    """

    def weigh(self, q: Tensor, scores: Tensor, distances: Tensor) -> Tensor:
        keys = self.s.choices["persistent"].keys * math.sqrt(SIZE)
        if isinstance(self, Normed):
            keys = self.normed(keys, self.s.key_makers)
        if isinstance(self, Turned):  # so without Transformer-XL's u
            q, _, _ = self.projected(self.inputs()[0])
        return torch.cat([scores, torch.einsum("bntd,nmd->bntm", q, keys) / math.sqrt(SIZE)], -1).softmax(-1)

    def attend(self, probabilities: Tensor, values: Tensor, sublayer: nn.Module, x_BKC: Tensor) -> Tensor:
        vectors = sublayer.value_transforms["persistent"].values
        vectors = (vectors * math.sqrt(vectors.size(1))).expand(BATCH, -1, -1, -1)
        return torch.einsum("bntk,bnkd->bntd", probabilities, torch.cat([values, vectors], 2))


class NormedWithVectors(WithVectors, Normed):
    pass


class TurnedWithVectors(WithVectors, Turned):
    pass


class NormedAndTurnedWithVectors(WithVectors, NormedAndTurned):
    pass


@padded_and_with_memory
@pytest.mark.parametrize("back_end", ON_A_CPU)
def test_queries_and_keys_are_normed_before_they_are_turned(given, back_end):
    Normed("s[qk_norm]", **given, back_end=back_end).assert_equations()
    NormedAndTurned(f"s[qk_norm,rope={BASE}]", **given, back_end=back_end).assert_equations()


@padded_and_with_memory
@pytest.mark.parametrize("back_end", ON_A_CPU)
def test_persistent_keys_are_normed_but_never_turned(given, back_end):
    NormedWithVectors("s[persistent=5,qk_norm]", **given, back_end=back_end).assert_equations()
    TurnedWithVectors(f"s[persistent=5,rope={BASE}]", **given, back_end=back_end).assert_equations()
    NormedAndTurnedWithVectors(f"s[persistent=5,qk_norm,rope={BASE}]", **given, back_end=back_end).assert_equations()
    windowed = TurnedWithVectors(f"s[window=1,persistent=5,rope={BASE}]", **given, back_end=back_end)
    windowed.window = 1
    windowed.assert_equations()


def test_a_back_end_that_cannot_keep_what_was_before_the_turn_is_refused_by_name():
    network = build(ENCODER, "s[persistent=5,rope=100]", attention_backend="flex")
    with pytest.raises(UserError, match="--attention-backend flex: .* choose from auto, eager"):
        run(network, tokens())


@pytest.mark.parametrize("direction", [ENCODER, CAUSAL])
@pytest.mark.parametrize("s", ["s[rope=100]", "s[persistent=3,rope=100]", "s[persistent=3,qk_norm,rope=100]"])
def test_outputs_and_gradients_do_not_depend_on_where_a_text_stands(direction, s, monkeypatch):
    network = loud(build(direction, f"{s} f l k {s}"))
    learned = [weight for weight in network.parameters() if weight.requires_grad]
    make, found = rope._cosines_and_sines, []
    for first in (0, 64):
        monkeypatch.setattr(rope, "_cosines_and_sines", partial(turns_from, first, make))
        features = run(network, tokens())
        gradients = torch.autograd.grad(features.sin().sum(), learned, allow_unused=True, materialize_grads=True)
        found.append([features, *gradients])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


def turns_from(first: int, make: Callable, base: int, keys: int, places: Tensor | None, like: Tensor) -> tuple:
    """The turns of places that begin with another one than 0."""
    assert places is None
    return tuple(each[0, 0] for each in make(base, keys, first + torch.arange(keys)[None], like))


@pytest.mark.parametrize("settings", ["window=3,rope=100", "window=3,persistent=3,rope=100"])
def test_outputs_do_not_depend_on_the_length_of_a_streams_memory(settings):
    """A window sees the same tokens from a memory of any length that holds them; what is beyond its reach is left out.

    Places then count from another key, and products stay the same.
    """
    decoder = loud(build(CAUSAL, f"s[{settings}] f s[{settings}]", mem_len=20))
    assert decoder.content_bias.requires_grad is decoder.position_bias.requires_grad is False
    text = torch.cat([tokens(), tokens().flip(0)], 1)
    for length in (6, 9, 20):  # 6 of two windows are what a token depends on
        decoder.mem_len, memory = length, StreamMemory()
        found = torch.cat([run(decoder, part, memory) for part in text.split(4, 1)], 1)
        torch.testing.assert_close(found, run(decoder, text), rtol=1e-11, atol=1e-12)


@padded_and_with_memory
@pytest.mark.parametrize("back_end", ON_A_CPU)
def test_products_are_turned_by_their_distance(given, back_end):
    found = Turned(f"s[rope={BASE}]", **given, back_end=back_end).assert_equations()
    windowed = Turned(f"s[window=3,rope={BASE}]", **given, back_end=back_end)
    windowed.window = 3
    windowed.assert_equations()
    assert not any(found[name].any() for name in ("u", "v") if name in found)  # Transformer-XL's are not there


@pytest.mark.parametrize("direction", [ENCODER, CAUSAL])
def test_global_tokens_are_turned_by_their_own_places(direction):
    """Their projections start as copies: where the window shows all, they see what they would without."""
    plain, with_global = (
        loud(build(direction, s)) for s in ("s[qk_norm,rope=100]", "s[window=99,global=3,qk_norm,rope=100]")
    )
    with_global.load_state_dict(plain.state_dict(), strict=False)
    with_global.sublayers[0].inner.initialize_copies()
    padding = (torch.arange(TOKENS) < torch.tensor([[0], [4]]),) if direction == ENCODER else ()
    assert_alike(*(run(each, tokens(), *padding) for each in (plain, with_global)))


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_in_half_precision_angles_are_in_single(precision):
    """At place 4,095 half precision has no angle: its numbers are whole there, or further apart."""
    x, scores = torch.randn(1, 1, 4096, 8).to(precision), Scores()
    found, exact = Rotation(10000)(x, scores, 4096), Rotation(10000)(x.double(), scores, 4096)
    assert found.dtype == precision
    torch.testing.assert_close(found.double(), exact, atol=0.001, rtol=2 * torch.finfo(precision).eps)


def test_heads_of_an_odd_size_are_refused():
    with pytest.raises(UserError, match=r"s\[rope=100\] rotates pairs .* 2 heads .* have size 3"):
        Encoder("s[rope=100]", None, 6, 8, 2)
