import math

import numpy as np
import pytest
import torch

from lazyformer_fairseq.modules.attention import blockwise
from lazyformer_fairseq.modules.attention.back_ends import StoredDistribution
from lazyformer_fairseq.modules.attention.choice import back_ends_of
from lazyformer_fairseq.modules.attention.scores import Scores, relative_shift
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.modules.sublayers.attention import RelativeAttention, encode_distances
from lazyformer_fairseq.modules.sublayers.interface import Context, RelativePositions, SublayerOptions
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import DISTRIBUTION

WIDTH = 8


def make_decoder(heads: int, clamp_len: int = 0, normalize_before: bool = False) -> CausalDecoder:
    """For its sublayers, its two biases and its positions."""
    torch.manual_seed(1)
    decoder = CausalDecoder("s", 5, WIDTH, 12, heads, 99, clamp_len, normalize_before=normalize_before).eval()
    return decoder.double()


def relative_attention(width: int, heads: int, consumers: int) -> RelativeAttention:
    sublayer = plan("s" + "l" * consumers)[0]
    return RelativeAttention.build(SublayerOptions(width, 12, heads, is_causal=True), sublayer)


def random_weights(module: torch.nn.Module) -> torch.nn.Module:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module.double().eval()


def segment_and_memory(time: int, memory_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    both = torch.randn(2, memory_length + time, WIDTH, generator=generator, dtype=torch.double)
    return both[:, memory_length:], both[:, :memory_length]


# --- a naive reference, one query and one key at a time ---------------------------------------------------------------


def sinusoid(distance: float) -> np.ndarray:
    angles = [distance / 10000 ** (2 * i / WIDTH) for i in range(WIDTH // 2)]
    return np.array([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])


def naive_distribution(
    attention: RelativeAttention, context: np.ndarray, length: int, decoder: CausalDecoder
) -> np.ndarray:
    """(N, T, M + T) of one stream: the query in memory's place M + i meets each key j that is not after it."""
    w_q, w_r = attention.q_proj.weight.detach().numpy(), attention.position_proj.weight.detach().numpy()
    w_k = attention.kv_proj.weight.detach().numpy()[:WIDTH]
    u, v = decoder.content_bias.detach().numpy(), decoder.position_bias.detach().numpy()
    heads, size = u.shape
    time = len(context) - length
    result = np.zeros((heads, time, len(context)))
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        for i in range(time):
            query = (w_q @ context[length + i])[part]
            scores = []
            for j in range(length + i + 1):
                distance = length + i - j
                if decoder.clamp_len > 0:
                    distance = min(distance, decoder.clamp_len)
                key, position = (w_k @ context[j])[part], (w_r @ sinusoid(distance))[part]
                scores.append(((query + u[head]) @ key + (query + v[head]) @ position) / math.sqrt(size))
            exponents = np.exp(np.array(scores) - max(scores))
            result[head, i, : length + i + 1] = exponents / exponents.sum()
    return result


def naive_output(distribution: np.ndarray, context: np.ndarray, w_v: np.ndarray, w_o: np.ndarray) -> np.ndarray:
    values = context @ w_v.T
    size = WIDTH // len(distribution)
    attended = [weights @ values[:, head * size : (head + 1) * size] for head, weights in enumerate(distribution)]
    return np.concatenate(attended, axis=1) @ w_o.T


@pytest.mark.parametrize("precision, tolerance", [(torch.double, 1e-10), (torch.float, 1e-5)])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("time, memory_length, clamp_len", [(5, 0, 0), (1, 7, 0), (5, 3, 0), (4, 9, 6), (5, 9, -1)])
def test_attention_equals_the_naive_reference(time, memory_length, clamp_len, heads, precision, tolerance):
    decoder = random_weights(make_decoder(heads, clamp_len))
    decoder.attention_backend = "eager"
    attention = random_weights(relative_attention(WIDTH, heads, 1))
    lazy = random_weights(decoder.build_sublayer(plan("sl")[1]).inner)
    x, memory = segment_and_memory(time, memory_length)
    another_x, another_memory = x.flip(-1), memory.flip(-1)  # what an l above sees is another layer's
    expected = []
    for row in range(2):
        context = torch.cat([memory, x], 1)[row].numpy()
        distribution = naive_distribution(attention, context, memory_length, decoder)
        w_v, w_o = attention.kv_proj.weight[WIDTH:].detach().numpy(), attention.out_proj.weight.detach().numpy()
        output = naive_output(distribution, context, w_v, w_o)
        other = torch.cat([another_memory, another_x], 1)[row].numpy()
        w_v, w_o = lazy.v_proj.weight.detach().numpy(), lazy.out_proj.weight.detach().numpy()
        expected.append((output, distribution, naive_output(distribution, other, w_v, w_o)))

    for module in (decoder, attention, lazy):
        module.to(precision)
    shared = decoder.context(x.to(precision), memory_length)
    y, handed_on = attention(x.to(precision), {}, shared, memory.to(precision) if memory_length else None)
    lazy_y, nothing = lazy(
        another_x.to(precision), handed_on, shared, another_memory.to(precision) if memory_length else None
    )
    assert not nothing
    probabilities = handed_on[DISTRIBUTION].probabilities
    for ours, theirs in zip((y, probabilities, lazy_y), zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), np.stack(theirs), atol=tolerance, rtol=0)


def test_a_pre_norm_sublayer_normalises_memory_like_its_input():
    decoder = random_weights(make_decoder(2, normalize_before=True))
    x, memory = segment_and_memory(4, 3)
    shared = decoder.context(x, 3)
    for planned in plan("sl"):
        sublayer = random_weights(decoder.build_sublayer(planned))
        norm, below = sublayer.layer_norm, {DISTRIBUTION: StoredDistribution(torch.rand(2, 2, 4, 7).double())}
        y, _ = sublayer.inner(norm(x), below, shared, norm(memory))
        torch.testing.assert_close(sublayer(x, below, shared, memory)[0], x + y)


# --- its parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("time, memory_length", [(1, 0), (1, 4), (4, 0), (3, 5), (5, 3)])
def test_the_relative_shift_puts_each_distance_where_query_and_key_are_that_far_apart(time, memory_length):
    keys = memory_length + time
    by_distance = torch.randn(2, 3, time, keys + 1)
    shifted = relative_shift(by_distance)
    assert shifted.shape == (2, 3, time, keys) and shifted.data_ptr() >= by_distance.data_ptr()
    for i in range(time):
        for j in range(memory_length + i + 1):
            distance = memory_length + i - j
            assert torch.equal(shifted[..., i, j], by_distance[..., i, keys - 1 - distance])
    assert shifted.untyped_storage().data_ptr() == by_distance.untyped_storage().data_ptr()  # nothing is copied


def test_distances_in_half_precision_are_those_of_single_precision_rounded():
    wanted = encode_distances(5000, 8, 0, torch.zeros(()))
    for half in (torch.float16, torch.bfloat16):
        assert torch.equal(encode_distances(5000, 8, 0, torch.zeros((), dtype=half)), wanted.to(half))


@pytest.mark.parametrize("pieces", [2**21, 7])  # 7: a piece is a row
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("back_end", [name for name in back_ends_of("cpu") if name != "eager"])
@pytest.mark.parametrize("time, memory_length", [(5, 4), (4, 0), (1, 6), (6, 2)])
def test_each_back_end_equals_eager_forward_and_gradients(time, memory_length, back_end, layers, pieces, monkeypatch):
    monkeypatch.setattr(blockwise, "PIECE_ELEMENTS", pieces)
    decoder = random_weights(make_decoder(2))
    attention = random_weights(relative_attention(WIDTH, 2, layers - 1))
    values = torch.randn(layers - 1, 2, 2, memory_length + time, WIDTH // 2, dtype=torch.double)
    results = []
    for name in ("eager", back_end):
        decoder.attention_backend = name
        x, memory = (part.clone().requires_grad_() for part in segment_and_memory(time, memory_length))
        of_consumers = [value.clone().requires_grad_() for value in values]
        y, handed_on = attention(x, {}, decoder.context(x, memory_length), memory if memory_length else None)
        outputs = [y, *(handed_on[DISTRIBUTION].attend(value, 0.0) for value in of_consumers)]
        leaves = [x, decoder.content_bias, decoder.position_bias, *attention.parameters(), *of_consumers]
        leaves += [memory] if memory_length else []
        loss = sum((out * torch.linspace(-1, 1, out.numel()).double().view_as(out)).sum() for out in outputs)
        results.append((*outputs, *torch.autograd.grad(loss, leaves)))
    for explicit, other in zip(*results, strict=True):
        assert explicit.abs().max() > 1e-3
        torch.testing.assert_close(other, explicit, atol=1e-12, rtol=1e-10)


def test_gradients_are_those_of_finite_differences():
    attention = random_weights(relative_attention(4, 2, 1))
    encoded = encode_distances(5, 4, 0, torch.zeros((), dtype=torch.double))

    def attend(x, memory, u, v):
        shared = Context(Scores(is_causal=True), lambda consumers, settings: "eager", RelativePositions(encoded, u, v))
        y, handed_on = attention(x, {}, shared, memory)
        return y, handed_on[DISTRIBUTION].probabilities

    shapes = ((1, 3, 4), (1, 2, 4), (2, 2), (2, 2))
    inputs = [torch.randn(shape, dtype=torch.double, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(attend, inputs)


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
    torch.manual_seed(1)
    decoder = CausalDecoder(pattern, 17, 12, 20, 3, mem_len=20, attention_backend="eager").double().eval()
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    tokens, memory, projected = torch.randint(17, (2, 24)), StreamMemory(), []
    decoder(tokens[:, :20], memory)
    decoder.sublayers[0].inner.kv_proj.register_forward_pre_hook(lambda _, given: projected.append(given[0].size(1)))
    found, _ = decoder(tokens[:, 20:], memory)
    assert projected == [kept + 4]
    torch.testing.assert_close(found, decoder(tokens)[0][:, 20:])
