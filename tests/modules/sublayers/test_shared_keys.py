"""The letter k against einsum in float64: own queries on the keys and values of the s below."""

import math

import pytest
import torch
from refusals import assert_refused

from lazyformer_fairseq.errors import UserError
from lazyformer_fairseq.measure.costs.flops import (
    count_flops,
)
from lazyformer_fairseq.modules.attention.choice import back_ends_of
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.encoder import Encoder
from lazyformer_fairseq.modules.networks.stack import StreamMemory
from lazyformer_fairseq.patterns.attention_kinds import ATTENTION_KINDS
from lazyformer_fairseq.patterns.grammar import plan
from lazyformer_fairseq.patterns.kinds import KEYS_AND_VALUES

WIDTH, HEADS = 8, 2


def random_weights(network):
    torch.manual_seed(1)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return network.double()


def encoder_of(pattern, **options):
    return random_weights(Encoder(pattern, 11, WIDTH, 12, HEADS, 16, **options))


def by_head(x):
    return x.unflatten(-1, (HEADS, -1))


def einsum_attention(q, k, v, added):
    scores = torch.einsum("bind,bjnd->bnij", by_head(q), by_head(k)) / math.sqrt(WIDTH // HEADS) + added
    return torch.einsum("bnij,bjnd->bind", scores.softmax(-1), by_head(v)).flatten(2)


def gradients(outputs, leaves):
    weights = [torch.sin(torch.arange(each.numel(), dtype=each.dtype)).view_as(each) for each in outputs]
    loss = sum((each * weight).sum() for each, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(loss, leaves, retain_graph=True)  # the table of biases is written once


@pytest.mark.parametrize("back_end", back_ends_of("cpu"))
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [0, 2])
def test_an_encoder(back_end, padded, window):
    """With T5's bias, padding and mask; all gradients, of the s's weights too."""
    settings = f"[window={window}]" if window else ""
    try:
        encoder = encoder_of(f"s{settings} k l k", relative_position_buckets=4, attention_backend=back_end)
    except UserError as error:
        assert window and "cannot compute" in str(error)
        return
    x = torch.randn(2, 6, WIDTH, dtype=torch.double, requires_grad=True)
    shared = encoder.context(x)
    added = shared.scores.dense(6, 6, x)
    if padded:
        padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
        shared = shared._replace(scores=shared.scores.with_padding(padding, is_on_right=True))
        added = added.masked_fill(padding[:, None, None], -math.inf)
    if window:
        place = torch.arange(6)
        added = added.masked_fill((place - place[:, None]).abs() > window, -math.inf)
    first, second, lazy, third = (sublayer.inner for sublayer in encoder.sublayers)
    _, below = first(x, {}, shared)
    found = [layer(2 * x, below, shared) for layer in (second, lazy, third)]
    assert found[0][1] == found[2][1] == {}

    _, k, v = first.qkv_proj(x).chunk(3, -1)
    expected = [layer.out_proj(einsum_attention(layer.q_proj(2 * x), k, v, added)) for layer in (second, third)]
    leaves = [
        x,
        encoder.relative_position_bias.table,
        *first.qkv_proj.parameters(),
        *second.parameters(),
        *third.parameters(),
    ]
    ours = gradients([found[0][0], found[2][0]], leaves)
    for our, their in zip([found[0][0], found[2][0], *ours], [*expected, *gradients(expected, leaves)], strict=True):
        torch.testing.assert_close(our, their)


@pytest.mark.parametrize("back_end", back_ends_of("cpu"))
@pytest.mark.parametrize("memory_length", [0, 3])
def test_a_causal_model(back_end, memory_length):
    """Equation by equation of Transformer-XL, with own queries and an own projection of distances."""
    decoder = random_weights(CausalDecoder("sk", 11, WIDTH, 12, HEADS, mem_len=4, attention_backend=back_end))
    time, keys = 4, memory_length + 4
    x = torch.randn(2, time, WIDTH, dtype=torch.double, requires_grad=True)
    memory = torch.randn(2, memory_length, WIDTH, dtype=torch.double) if memory_length else None
    shared = decoder.context(x, memory_length)
    below, (first, second) = {}, (sublayer.inner for sublayer in decoder.sublayers)
    _, below = first(x, below, shared, memory)
    found, handed_on = second(3 * x, below, shared)
    assert handed_on == {} and not second.attends

    k, v = first.kv_proj(x if memory is None else torch.cat([memory, x], 1)).chunk(2, -1)
    q, distances = by_head(second.q_proj(3 * x)), by_head(second.position_proj(shared.positions.encoded))
    content = torch.einsum("bind,bjnd->bnij", q + decoder.content_bias, by_head(k))
    scores = torch.full_like(content, -math.inf)
    for i in range(time):
        for j in range(memory_length + i + 1):
            row = distances[keys - 1 - (memory_length + i - j)]
            position = torch.einsum("bnd,nd->bn", q[:, i] + decoder.position_bias, row)
            scores[:, :, i, j] = (content[:, :, i, j] + position) / math.sqrt(WIDTH // HEADS)
    attended = torch.einsum("bnij,bjnd->bind", scores.softmax(-1), by_head(v)).flatten(2)
    expected = second.out_proj(attended)
    leaves = [x, *first.kv_proj.parameters(), *second.parameters(), decoder.content_bias, decoder.position_bias]
    ours, theirs = gradients([found], leaves), gradients([expected], leaves)
    for our, their in zip([found, *ours], [expected, *theirs], strict=True):
        torch.testing.assert_close(our, their)


KINDS = {
    "window": "window=2,dilation=2,dilated_heads=1",
    "strided": "strided=3",
    "fixed": "fixed=4,summary=1,heads=split",
    "linformer": "linformer=3",
    "span": "span=4,ramp=2",
    "persistent": "persistent=3",
    "entmax": "entmax=1.5",
}
REFUSED = {"synthesizer": "synthesizer=dense+dot", "buckets": "buckets=4", "window": "window=2,global=1"}


def test_each_kind_of_attention_gives_its_keys_or_is_refused():
    assert {row.name for row in ATTENTION_KINDS} <= KINDS.keys() | REFUSED.keys()
    for name, settings in REFUSED.items():
        with pytest.raises(UserError, match=f"this k cannot read .*{name} keeps its keys and values for itself"):
            plan(f"s[{settings}] f k")


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("network", [Encoder, CausalDecoder])
def test_with_the_queries_of_the_s_it_is_the_s(network, settings):
    """Whatever the s attends to and however, over memory and padding too."""
    if network is CausalDecoder and settings.startswith("linformer"):
        return
    pattern = f"s[{settings}]k"
    if network is Encoder:
        built, memory, memory_length = encoder_of(pattern, relative_position_buckets=0), None, 0
    else:
        built, memory_length = random_weights(CausalDecoder(pattern, 11, WIDTH, 12, HEADS, mem_len=4)), 3
        memory = torch.randn(2, memory_length, WIDTH, dtype=torch.double)
    first, second = (sublayer.inner for sublayer in built.sublayers)
    with torch.no_grad():
        second.out_proj.load_state_dict(first.out_proj.state_dict())
        if network is Encoder:
            second.q_proj.weight.copy_(first.qkv_proj.weight[:WIDTH])
            second.q_proj.bias.copy_(first.qkv_proj.bias[:WIDTH])
        else:
            second.q_proj.load_state_dict(first.q_proj.state_dict())
            second.position_proj.load_state_dict(first.position_proj.state_dict())
    x = torch.randn(2, 6, WIDTH, dtype=torch.double)
    shared = built.context(x, memory_length)
    if network is Encoder:
        padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
        shared = shared._replace(scores=shared.scores.with_padding(padding, is_on_right=True))
    y, below = first(x, {}, shared, *([] if memory is None else [memory]))
    z, _ = second(x, below, shared)
    torch.testing.assert_close(z, y)
    sizes = built.sizes
    assert count_flops(pattern, sizes, 6, memory_length) > count_flops(f"s[{settings}]", sizes, 6, memory_length)


def test_a_stream_remembers_for_the_s_alone():
    decoder = random_weights(CausalDecoder("s f k", 11, WIDTH, 12, HEADS, mem_len=9)).eval()
    tokens = torch.randint(0, 11, (2, 9))
    memory = StreamMemory()
    parts = [decoder(part, memory)[0] for part in tokens.split(3, 1)]
    assert len(memory.states) == 1
    torch.testing.assert_close(torch.cat(parts, 1), decoder(tokens)[0])


def test_each_k_reads_the_nearest_s_and_an_l_looks_through_it():
    first, _, second, shared, lazy = plan("s k s k l")
    assert first.consumers == (KEYS_AND_VALUES,) and second.consumers == (KEYS_AND_VALUES, "distribution")
    assert shared.producer.kind is lazy.producer.kind is second.kind
    encoder = encoder_of("s k s l")
    keeps = [getattr(sublayer.inner, "is_key_producer", False) for sublayer in encoder.sublayers]
    assert keeps == [True, False, False, False]
    consumers = [getattr(sublayer.inner, "consumers", 0) for sublayer in encoder.sublayers]
    assert consumers == [0, 0, 1, 0]


def test_a_k_needs_an_s():
    assert_refused("f k s", "k", "this k has no s below it whose keys and values it could reuse")


@pytest.mark.parametrize(
    ("producer", "why"),
    [
        ("s[buckets=4]", "buckets keeps its keys and values for itself: they are its queries too"),
        ("s[window=2,global=1]", "its global tokens have keys and values of their own"),
        ("s[synthesizer=random]", "its scores are made for its own input"),
    ],
)
def test_an_s_may_keep_its_keys(producer, why):
    assert_refused(f"s k {producer} (l k)x2", "k)x2", f"this k cannot read {producer}: ")
    assert_refused(f"s k {producer} (l k)x2", "k)x2", why)
