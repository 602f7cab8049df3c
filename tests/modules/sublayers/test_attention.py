"""The sublayers s, l and k by Transformer-XL's and BERT's equations, one back end after the other; their parts."""

import math

import pytest
import torch
from attention_by_einsum import WIDTH, Attending, padded_and_with_memory, split
from every_variant import ON_A_CPU
from helpers import assert_refused
from tiny_networks import make_decoder, random_tokens, vectors
from torch import Tensor

from lazyformer_fairseq.modules.attention import blockwise
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention import encode_distances


@pytest.mark.parametrize("pieces", [2**21, 7])  # 7: a piece is a row
@pytest.mark.parametrize("back_end", ON_A_CPU)
@padded_and_with_memory
def test_outputs_and_gradients_are_those_of_the_equations(given, back_end, pieces, monkeypatch):
    """Of an l too, which sees another layer's input."""
    monkeypatch.setattr(blockwise, "CHUNK_ELEMENTS", pieces)
    Attending("s", **given, back_end=back_end).assert_equations()


@pytest.mark.parametrize("clamp_len, farthest", [(0, 8), (6, 6), (-1, 8)])
def test_distances_are_sines_and_cosines(clamp_len, farthest):
    """Those of 8, 7, ..., 0 and of -1, which no query may look at."""
    encoded = make_decoder("s", clamp_len=clamp_len).context(vectors(1, 4), 5).positions.encoded
    rows = []
    for distance in range(8, -1, -1):
        angles = [min(distance, farthest) / 10000 ** (2 * i / WIDTH) for i in range(WIDTH // 2)]
        rows.append([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])
    torch.testing.assert_close(encoded[:-1], torch.tensor(rows, dtype=torch.double))


def test_distances_in_half_precision_are_those_of_single_precision_rounded():
    wanted = encode_distances(5000, 8, 0, torch.zeros(()))
    for half in (torch.float16, torch.bfloat16):
        assert torch.equal(encode_distances(5000, 8, 0, torch.zeros((), dtype=half)), wanted.to(half))


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("s[window=2]", 2),
        ("s[window=2,dilation=3,dilated_heads=1]", 6),
        ("s[strided=4,part=local]", 4),
        ("s[strided=4]", 20),
        ("s[fixed=4,part=local]", 20),  # where memory begins, blocks do
        ("s[window=2] l", 20),  # a consumer needs all
        ("s[window=2] k", 20),
        ("s[window=30]", 20),
    ],
)
def test_memory_masked_out_is_not_projected(pattern, kept):
    decoder = make_decoder(pattern, mem_len=20)
    tokens, memory, projected = random_tokens(2, 24), StreamMemory(), []
    decoder(tokens[:, :20], memory)
    decoder.sublayers[0].inner.kv_proj.register_forward_pre_hook(lambda _, given: projected.append(given[0].size(1)))
    found, _ = decoder(tokens[:, 20:], memory)
    assert projected == [kept + 4]
    torch.testing.assert_close(found, decoder(tokens)[0][:, 20:])


class SharedKeys(Attending):
    """In a causal model with an own projection of distances, too; a ``k`` hands nothing on and has no memory."""

    def outputs(self) -> list[Tensor]:
        shared = self.context()
        output, below = self.s(self.x, {}, shared, self.memory[0])
        above, handed_on = self.l(self.above, below, shared)
        assert handed_on == {} and not self.l.attends
        return [output, above]

    def expected(self) -> list[Tensor]:
        q, k, v = self.projected(self.inputs()[0])
        distances = torch.arange(self.keys - self.time, self.keys)[:, None] - torch.arange(self.keys)
        outputs = []
        for sublayer, own in ((self.s, q), (self.l, split(self.l.q_proj(self.above)))):
            probabilities = self.weigh(own, self.scores(own, k, distances, sublayer), distances)
            outputs.append(sublayer.out_proj((probabilities @ v).transpose(1, 2).flatten(2)))
        return outputs


@padded_and_with_memory
@pytest.mark.parametrize("back_end", ON_A_CPU)
def test_it_is_attention_of_own_queries(given, back_end):
    """With T5's bias, padding, memory; all gradients, of the s's weights too."""
    SharedKeys("s", **given, above="k", back_end=back_end).assert_equations()


@pytest.mark.parametrize(
    ("producer", "why"),
    [
        ("f", "this k has no s below it to reuse the keys and values from"),
        ("s[buckets=4]", "buckets does not share its keys and values: its keys are also its queries"),
        ("s[window=2,global=1]", "its global tokens have separate keys and values"),
        ("s[synthesizer=random]", "its scores are computed for its own input"),
    ],
)
def test_what_it_cannot_read_is_named(producer, why):
    assert_refused(*(("f k s", "k") if producer == "f" else (f"s k {producer} (l k)x2", "k)x2")), why)
