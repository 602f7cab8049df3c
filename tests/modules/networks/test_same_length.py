"""--same-length: every query sees itself and the mem_len tokens before it."""

import pytest
import torch
from every_variant import ON_A_CPU
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_networks import make_decoder, random_tokens

from lazyformer_fairseq.modules.networks.causal_decoder import CausalDecoder
from lazyformer_fairseq.modules.networks.stream_memory import StreamMemory

PATTERNS = ["sf", "sflf sf", "skfsl", "s[entmax=1.5]l", "s[persistent=3]", "s[span=5,ramp=2]f"]


def published_mask(time: int, keys: int, mem_len: int) -> torch.Tensor:
    """(T, K), True at what is hidden: the two triangles of Transformer-XL's code (`dec_attn_mask`)."""
    ones, remembered = torch.ones(time, keys), keys - time
    too_far = keys - mem_len - 1
    shift = time - too_far if too_far > 0 else time
    return (torch.triu(ones, 1 + remembered) + torch.tril(ones, -shift)).bool()


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0, 1))
def test_it_hides_what_the_published_code_hides(time, mem_len, share):
    remembered = round(share * mem_len)
    keys = remembered + time
    decoder = CausalDecoder("s", 9, 8, 8, 2, mem_len, same_length=True)
    added = decoder.context(torch.zeros(1, time, 8), remembered).scores.dense(time, keys, torch.zeros(()))
    assert torch.equal(added.view(time, keys) == -torch.inf, published_mask(time, keys, mem_len))


@pytest.mark.parametrize("pattern", [*PATTERNS, "s[window=2,dilation=2]k"])
@settings(max_examples=5)
@given(sizes=st.lists(st.integers(1, 7), min_size=2, max_size=4), mem_len=st.integers(1, 6))
def test_how_a_text_is_cut_into_segments_does_not_matter(pattern, sizes, mem_len):
    decoder = make_decoder(pattern, mem_len=mem_len, same_length=True)
    tokens, memory = random_tokens(2, sum(sizes)), StreamMemory()
    whole, _ = decoder(tokens)
    parts = [decoder(segment, memory)[0] for segment in tokens.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("before", [0, 2, 6])
@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        *(("slfs", name) for name in ON_A_CPU if name != "eager"),
        *(("sks[span=5,ramp=2]", name) for name in ("recompute", "fused")),
    ],
)
def test_all_back_ends_compute_the_same(pattern, name, before):
    """With an empty memory, one half full and a full one."""
    tokens, found = random_tokens(2, before + 7), []
    for back_end in ("eager", name):
        decoder, memory = make_decoder(pattern, mem_len=4, same_length=True), StreamMemory()
        if before:
            decoder(tokens[:, :before], memory)
        decoder.attention_backend = back_end
        features, _ = decoder(tokens[:, before:], memory)
        features.square().sum().backward()
        found.append([features, *(weight.grad for weight in decoder.parameters() if weight.grad is not None)])
    torch.testing.assert_close(*found, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize(
    ("pattern", "mem_len", "message"),
    [
        ("sf s[fixed=8]", 8, r"--same-length cannot be used with s\[fixed=8\]: queries see blocks and summaries"),
        ("sf", 0, "--same-length with --mem-len 0: .* only itself"),
    ],
)
def test_what_cannot_have_it_is_said(pattern, mem_len, message):
    with pytest.raises(ValueError, match=message):
        make_decoder(pattern, mem_len=mem_len, same_length=True)
    decoder = make_decoder(pattern, mem_len=mem_len)
    if mem_len:
        with pytest.raises(ValueError, match=message):
            decoder.same_length = True
        assert not decoder.same_length
