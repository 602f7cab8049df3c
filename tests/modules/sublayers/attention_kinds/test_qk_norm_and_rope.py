"""Norm of queries and keys, and rotary positions: the papers' equations, transformers' ModernBERT and Qwen3."""

import math

import pytest
import torch
from attention_by_einsum import HEADS, SIZE, WIDTH, Attending, padded_and_with_memory
from every_kind import ON_A_CPU, TOKENS, assert_alike, build, run, tokens
from tiny_networks import loud
from torch import Tensor, nn
from transformers.models.modernbert import modeling_modernbert as modernbert
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.modules.attention.scores import Scores
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention_kinds.rope import Turn
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
        gains = (makers["qk_norm"].weight for makers in (self.s.query_makers, self.s.key_makers))
        return [
            *(
                x * gain / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
                for x, gain in zip((q, k), gains, strict=True)
            ),
            v,
        ]


class NormedAndTurned(Normed, Turned):
    """A norm, then the turn."""


@padded_and_with_memory
@pytest.mark.parametrize("back_end", ON_A_CPU)
def test_queries_and_keys_are_normed_before_they_are_turned(given, back_end):
    Normed("s[qk_norm]", **given, back_end=back_end).assert_equations()
    NormedAndTurned(f"s[qk_norm,rope={BASE}]", **given, back_end=back_end).assert_equations()


def test_it_is_qwen3s_norm():
    theirs = loud(Qwen3RMSNorm(SIZE, eps=1e-6)).float()
    ours = build(ENCODER, "s[qk_norm]", num_heads=4).float().sublayers[0].inner.query_makers["qk_norm"]
    assert (ours.weight == 1).all() and ours.weight.shape == (SIZE,)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, HEADS, 5, SIZE) * 9
    torch.testing.assert_close(ours(x, Scores(), 5), theirs(x))
    in_half = x.bfloat16()  # with gains in single precision, as under autocast
    assert torch.equal(ours(in_half, Scores(), 5), ours(in_half.float(), Scores(), 5).bfloat16())


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
    with_global.sublayers[0].inner.start_copies()
    padding = (torch.arange(TOKENS) < torch.tensor([[0], [4]]),) if direction == ENCODER else ()
    assert_alike(*(run(each, tokens(), *padding) for each in (plain, with_global)))


@pytest.mark.parametrize("windowed", [False, True])
def test_it_is_modernberts(windowed):
    kind = "sliding_attention" if windowed else "full_attention"
    config = modernbert.ModernBertConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_hidden_layers=1, layer_types=[kind], local_attention=8,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 160000.0}}, attn_implementation="eager",
    )  # fmt: skip
    theirs = loud(modernbert.ModernBertAttention(config, 0), 0.5).float()
    encoder = Encoder(f"s[{'window=4,' * windowed}rope=160000]", None, WIDTH, 8, HEADS, 64, relative_position_buckets=0)
    ours = encoder.sublayers[0].inner
    with torch.no_grad():
        for linear, source in ((ours.qkv_proj, theirs.Wqkv), (ours.out_proj, theirs.Wo)):
            linear.weight.copy_(source.weight)
            linear.bias.zero_()
    x, places = torch.randn(2, 40, WIDTH), torch.arange(40)
    turns = modernbert.ModernBertRotaryEmbedding(config)(x, places[None], kind)
    hidden = (places - places[:, None]).abs() > 4 if windowed else torch.zeros(40, 40, dtype=torch.bool)
    found, _ = theirs(x, turns, torch.zeros(1, 1, 40, 40).masked_fill(hidden, -math.inf))
    torch.testing.assert_close(ours(x, {}, encoder.context(x))[0], found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_in_half_precision_angles_are_in_single(precision):
    """At place 4,095 half precision has no angle: its numbers are whole there, or further apart."""
    x, scores = torch.randn(1, 1, 4096, 8).to(precision), Scores()
    found, exact = Turn(10000)(x, scores, 4096), Turn(10000)(x.double(), scores, 4096)
    assert found.dtype == precision
    torch.testing.assert_close(found.double(), exact, atol=0.001, rtol=2 * torch.finfo(precision).eps)


def test_places_may_be_beyond_the_number_of_rows():
    x, places = torch.randn(1, 1, 4, 8), torch.tensor([90, 7, 40, 3])
    rows = torch.zeros(1, 1, 91, 8).index_copy(2, places, x)
    expected = Turn(100)(rows, Scores(), 91)[:, :, places]
    assert torch.equal(Turn(100)(x, Scores(places_BT=places[None]), 4), expected)


def test_a_memory_further_back_turns_no_scores():
    """What is beyond the reach of a window is left out, and places count from another key: products stay the same."""
    decoder = loud(build(CAUSAL, "s[window=3,rope=100] f s[window=3,rope=100]", mem_len=9))
    assert decoder.content_bias.requires_grad is decoder.position_bias.requires_grad is False
    text = torch.cat([tokens(), tokens().flip(0)], 1)
    memory, whole = StreamMemory(), run(decoder, text)
    found = torch.cat([run(decoder, part, memory) for part in text.split(4, 1)], 1)
    assert_alike(found, whole)


def test_heads_of_an_odd_size_are_refused():
    with pytest.raises(UserError, match=r"s\[rope=100\] turns pairs of numbers, and 2 heads of 6 have 3 each"):
        Encoder("s[rope=100]", None, 6, 8, 2)
