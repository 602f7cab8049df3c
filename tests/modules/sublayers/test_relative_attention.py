"""Transformer-XL's attention by its equations, one back end after the other; its parts."""

import math

import pytest
import torch
from attention_by_einsum import WIDTH, Attending
from tiny_networks import loud, make_decoder, random_tokens, vectors

from lazyformer_fairseq.modules.attention import blockwise
from lazyformer_fairseq.modules.attention.back_ends import StoredDistribution
from lazyformer_fairseq.modules.attention.choice import back_ends_of
from lazyformer_fairseq.modules.attention.scores import relative_shift
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention import encode_distances
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION


@pytest.mark.parametrize("pieces", [2**21, 7])  # 7: a piece is a row
@pytest.mark.parametrize("back_end", back_ends_of("cpu"))
@pytest.mark.parametrize("time, memory", [(5, 4), (4, 0), (1, 6), (6, 2)])
def test_outputs_and_gradients_are_those_of_the_equations(time, memory, back_end, pieces, monkeypatch):
    """Of an l too, which sees another layer's input."""
    monkeypatch.setattr(blockwise, "PIECE_ELEMENTS", pieces)
    Attending("s", time, memory, back_end=back_end).assert_equations()


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


def test_a_pre_norm_sublayer_normalises_memory_like_its_input():
    decoder = make_decoder("s", normalize_before=True)
    x, memory = vectors(2, 7).split([4, 3], 1)
    shared = decoder.context(x, 3)
    for planned in plan("sl"):
        sublayer = loud(decoder.build_sublayer(planned))
        norm, below = sublayer.layer_norm, {DISTRIBUTION: StoredDistribution(torch.rand(2, 3, 4, 7).double())}
        y, _ = sublayer.inner(norm(x), below, shared, norm(memory))
        torch.testing.assert_close(sublayer(x, below, shared, memory)[0], x + y)


@pytest.mark.parametrize("time, memory_length", [(1, 0), (1, 4), (4, 0), (3, 5), (5, 3)])
def test_the_relative_shift_puts_each_distance_where_query_and_key_are_that_far_apart(time, memory_length):
    keys = memory_length + time
    by_distance = torch.randn(2, 3, time, keys + 1)
    shifted = relative_shift(by_distance)
    assert shifted.shape == (2, 3, time, keys)
    for i in range(time):
        for j in range(memory_length + i + 1):
            distance = memory_length + i - j
            assert torch.equal(shifted[..., i, j], by_distance[..., i, keys - 1 - distance])
    assert shifted.untyped_storage().data_ptr() == by_distance.untyped_storage().data_ptr()  # nothing is copied


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
