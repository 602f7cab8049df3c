import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_networks import WIDTH, make_decoder, random_tokens
from torch import nn

from lazyformer_fairseq.modules.networks.adaptive_softmax import AdaptiveSoftmax
from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder, init_transformer_xl_weights
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory

PATTERNS = ["(sf)x2", "(sfff)x1 (f)x2", "sflfl", "sslf ls", "fsf", "ff", "sfk"]


@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=8)
@given(lengths=st.lists(st.integers(1, 7), min_size=2, max_size=5), clamp_len=st.sampled_from([0, 3]))
def test_segments_with_memory_equal_one_long_segment(pattern, normalize_before, lengths, clamp_len):
    decoder = make_decoder(pattern, normalize_before=normalize_before, clamp_len=clamp_len, cutoffs=(5, 9))
    tokens, memory = random_tokens(2, sum(lengths)), StreamMemory()
    whole, _ = decoder(tokens)
    parts = [decoder(segment, memory)[0] for segment in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-10, rtol=0)


def test_memory_holds_the_inputs_of_attending_sublayers_cut_to_its_length():
    """Inner states are one for the embeddings and one for each sublayer."""
    decoder, memory = make_decoder("sflf", mem_len=5), StreamMemory()
    seen = []
    for segment in random_tokens(2, 8).split(4, 1):
        features, states = decoder(segment, memory, return_all=True)
        assert len(states) == 5 and torch.equal(states[-1], features)
        seen.append(states)
    assert [tuple(state.shape) for state in memory.states] == [(2, 5, WIDTH)] * 2
    for state, layer in zip(memory.states, (0, 2), strict=True):  # what went into the s, and into the l; no more
        assert state.untyped_storage().nbytes() == state.nbytes
        assert torch.equal(state, torch.cat([seen[0][layer][:, 3:], seen[1][layer]], dim=1))


def test_no_gradient_flows_into_earlier_segments():
    decoder, memory = make_decoder("sflf"), StreamMemory()
    decoder(torch.tensor([[1, 2, 3]]), memory)
    assert not any(state.requires_grad for state in memory.states)
    decoder(torch.tensor([[4, 5]]), memory)[0].square().sum().backward()
    reached = decoder.embedding.bands[0].table.grad.abs().sum(dim=1).nonzero().flatten().tolist()
    assert reached == [4, 5]
    assert decoder.sublayers[0].inner.kv_proj.weight.grad.abs().max() > 0  # memory's keys and values do teach


def test_initialisation_is_transformer_xls():
    """u and v are shared by all sublayers, and attention has no other bias."""
    model = nn.Module()
    model.decoder = CausalDecoder("M2", 4000, 64, 128, 2, 8, cutoffs=(1000, 2000), div_val=2)
    model.softmax = AdaptiveSoftmax(model.decoder.embedding)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 7.0 if parameter.dim() > 1 else 1.0)
    model.apply(init_transformer_xl_weights)
    for name, parameter in model.named_parameters():
        if name.endswith("layer_norm.weight"):
            assert parameter.eq(1).all(), name
        elif parameter.dim() == 1:
            assert not parameter.any() or "layer_norm" in name, name
        else:
            few = parameter.numel() < 500
            expected = 0.01 if "projection" in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.3 if few else 0.1), name
            assert parameter.mean().item() == pytest.approx(0, abs=5e-3 if few else 1e-3), name
    biases = [name for name, _ in model.decoder.named_parameters() if name.endswith("_bias") or "proj.bias" in name]
    assert biases == ["content_bias", "position_bias"]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_heads=5), "dimension of 12 is not divisible by 5 attention heads"),
        (dict(num_heads=0), "0 attention heads"),
        (dict(embed_dim=9, num_heads=3), "embedding dimension must be even .* not 9"),
        (dict(ffn_embed_dim=0), "feed-forward sublayers must be 1 or more, not 0"),
        (dict(mem_len=-1), "--mem-len -1: must be 0"),
        (dict(clamp_len=-2), "--clamp-len -2"),
        (dict(cutoffs=(15, 9)), "15,9: 9 is not greater than 15"),
        (dict(cutoffs=(9, 9)), "9,9: 9 is not greater than 9"),
        (dict(cutoffs=(0, 9)), "0,9: 0 is not greater than 0"),
        (dict(cutoffs=(9, 17)), "17 is not below the vocabulary size, 17"),
        (dict(div_val=0), "--adaptive-softmax-factor 0"),
        (dict(div_val=5, cutoffs=(9, 12)), "--adaptive-softmax-factor 5: .* 12 must be divisible by this .* is 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        make_decoder("sf", **options)


def test_without_memory_length_and_when_cleared_nothing_is_remembered():
    memory = StreamMemory()
    memory.remember([torch.randn(2, 3, 4)], mem_len=0)
    assert memory.length == 0 and memory.by_sublayer([True, False]) == [None, None]
    memory.remember([torch.randn(2, 3, 4)], mem_len=2)
    assert memory.length == 2
    assert memory.by_sublayer([False, True])[1] is memory.states[0]
    memory.remember([torch.randn(2, 1, 4, dtype=torch.bfloat16)], mem_len=2)  # it takes the precision of the input
    assert memory.states[0].dtype == torch.bfloat16
    memory.clear()
    assert memory.length == 0 and memory.by_sublayer([True]) == [None]


def test_the_state_survives_a_checkpoint_that_holds_tensors_alone():
    memory, restored, file = StreamMemory(), StreamMemory(), io.BytesIO()
    first, second = ([torch.randn(2, time, 4) for _ in range(2)] for time in (5, 3))
    memory.remember(first, mem_len=4)
    torch.save(memory.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert restored.length == 4 and len(restored.states) == 2
    for _ in range(2):
        assert all(torch.equal(*pair) for pair in zip(memory.states, restored.states, strict=True))
        memory.remember(second, mem_len=4)
        restored.remember(second, mem_len=4)
